"""The default plan against plain recipes at equal bytes, exported and measured the same way.

Calibrates the embedded model and, at five sizes, makes every plan, exports it, loads it again and
measures it on the evaluation text. Prints the tables of docs/results.md (with --json one JSON
object on stdout). With --write it also renews what is committed: reports/, the table in README.md
and docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    README,
    REPORTS,
    RESULTS,
    Measured,
    calibrated,
    interval,
    provenance,
    same_checkpoint,
    say,
    size_at,
    table,
    with_interval,
    write_between,
)

from reap.artifacts import Evaluation, Plan, Saliency
from reap.artifacts.evaluation import Estimate
from reap.artifacts.files import sha256
from reap.formatting import nats
from reap.planning import PlanSettings, make_plan, plain_plan
from reap.report import write_report
from reap.report.data import spearman

COMMAND = "benchmarks/plain_recipes.py"
SHARES = (0.80, 0.67, 0.55, 0.42, 0.30)
REPORTED = (0.55, 0.30)
"""The sizes whose reports are committed."""
RANDOM_SEEDS = range(5)
PROBE_TOKENS = 4000
DEFAULT = "reap"
LABELS = {
    "frequency": "most used experts, mxfp4",
    "reap": "REAP's best experts, mxfp4",
    "global-reap": "REAP's best of all layers, mxfp4",
    "coverage": "equal coverage of every layer, mxfp4",
    "low": "as many as fit, all 2-bit",
    "two-bank": "same two banks in every layer",
}
RANDOM = "random experts, mxfp4"


@dataclass(frozen=True)
class Row:
    """One plan and what it measured.

    `share` of the experts' bytes is the limit, `expert_bytes` what the checkpoint has; `predicted`
    and `kl` in nats; `above`: the mean KL minus the default plan's and its 95 % interval, paired by
    document, None for the default plan itself; `checkpoint`: the same number for plans that come
    to the same checkpoint.
    """

    share: float
    plan: str
    kept: int
    weights: int
    size: int
    expert_bytes: int
    predicted: float
    kl: float
    kl_error: float
    perplexity: float
    above: tuple[float, float, float] | None
    checkpoint: int

    @property
    def default(self) -> bool:
        return self.above is None


@dataclass(frozen=True)
class Verdict:
    """How the default plan of a size stands to the rival of lowest KL."""

    share: float
    rival: str
    above: tuple[float, float, float]
    word: str


def plans(saliency: Saliency, share: float, digest: str) -> dict[str, Plan]:
    """The default plan first, then the plain recipes at no more bytes."""
    settings = PlanSettings(size=size_at(saliency.spec, share))
    origin = provenance(saliency, digest, f"{COMMAND} at {share:.0%}")
    made = {DEFAULT: make_plan(saliency, settings, provenance=origin)}
    for recipe, label in LABELS.items():
        made[label] = plain_plan(saliency, settings, recipe=recipe, provenance=origin)
    for seed in RANDOM_SEEDS:
        made[f"{RANDOM}, seed {seed}"] = plain_plan(
            saliency, settings, recipe="random", seed=seed, provenance=origin
        )
    return made


def run(directory: Path, saliency: Saliency, *, tokens: int) -> list[Row]:
    """All rows, by falling size; what is committed is left in `directory`."""
    file = directory / "saliency.safetensors"
    saliency.save(file)
    measured = Measured(tokens, COMMAND)
    numbers: dict[object, int] = {}
    rows: list[Row] = []
    # A checkpoint is measured under the first plan that leads to it: that is to be in a report.
    for share in sorted(SHARES, key=lambda share: share not in REPORTED):
        place = directory / percent(share)
        say(f"{share:.0%} of the expert bytes")
        made = plans(saliency, share, sha256(file))
        files = {
            label: place / (f"plan-{number}.json" if number else "plan.json")
            for number, label in enumerate(made)
        }
        found = measured(made, files, dict.fromkeys(made, file))
        for label, evaluation in zip(made, found):
            number = numbers.setdefault(same_checkpoint(made[label]), len(numbers))
            rows.append(row(share, made[label], evaluation, found[0], number))
        if share in REPORTED:
            report(place, file, files, found)
        else:
            shutil.rmtree(place)
    return sorted(rows, key=lambda row: -row.share)


def row(share: float, plan: Plan, found: Evaluation, default: Evaluation, checkpoint: int) -> Row:
    above = None
    if found is not default:
        more = found.kl_difference(default)
        above = more.value, *interval(more)
    return Row(
        share=share,
        plan=found.label,
        kept=sum(plan.expert_counts),
        weights=plan.waterfall.weights,
        size=plan.waterfall.budget,
        expert_bytes=found.expert_bytes,
        predicted=plan.damage,
        kl=found.mean_kl.value,
        kl_error=found.mean_kl.error,
        perplexity=found.perplexity.value,
        above=above,
        checkpoint=checkpoint,
    )


def report(
    place: Path, saliency: Path, files: Mapping[str, Path], found: Sequence[Evaluation]
) -> None:
    """report.html with the evaluations it is made of; of plans that come to the same the first."""
    written: dict[str, Path] = {}
    for number, (evaluation, plan) in enumerate(zip(found, files.values())):
        if evaluation.provenance.inputs["plan"] != sha256(plan):
            plan.unlink()
            continue
        written[evaluation.label] = place / f"evaluation-{number}.json"
        evaluation.save(written[evaluation.label])
    own, *rivals = written
    write_report(
        place / "report.html",
        saliency=saliency,
        plan=files[own],
        evaluation=written[own],
        rivals=[written[label] for label in rivals],
        rival_plans=[files[label] for label in rivals],
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Of every size: "lowest" if all rivals are clearly above the default plan, "beaten" if one is
    clearly below it, else "within noise"; clearly: the whole 95 % interval."""
    found = []
    for share in shares(rows):
        rivals = {row.plan: row.above for row in rows if row.share == share and row.above}
        lowest = min(rivals, key=lambda label: rivals[label][0])
        if any(high < 0 for _, _, high in rivals.values()):
            word = "beaten"
        elif all(low > 0 for _, low, _ in rivals.values()):
            word = "lowest"
        else:
            word = "within noise"
        found.append(Verdict(share, lowest, rivals[lowest], word))
    return found


def shares(rows: Sequence[Row]) -> list[float]:
    return list(dict.fromkeys(row.share for row in rows))


def rank_correlation(rows: Sequence[Row], share: float | None = None) -> tuple[float | None, int]:
    """Spearman's, of predicted damage and measured KL, and of how many different checkpoints."""
    mine = {row.checkpoint: row for row in rows if share is None or row.share == share}
    known = list(mine.values())
    return spearman([row.predicted for row in known], [row.kl for row in known]), len(known)


def grouped(rows: Sequence[Row]) -> dict[str, dict[float, list[Row]]]:
    """By plan and size; the random seeds together."""
    found: dict[str, dict[float, list[Row]]] = {}
    for entry in rows:
        label = RANDOM if entry.plan.startswith(RANDOM) else entry.plan
        found.setdefault(label, {}).setdefault(entry.share, []).append(entry)
    return found


def overview(rows: Sequence[Row]) -> str:
    """Plans by sizes: mean KL ± standard error, the lowest of each size in bold."""
    columns = shares(rows)
    least = {share: min(row.kl for row in rows if row.share == share) for share in columns}
    lines = []
    for label, by_share in grouped(rows).items():
        cells = []
        for share in columns:
            mine = by_share[share]
            text = _kl(mine)
            cells.append(f"**{text}**" if min(row.kl for row in mine) == least[share] else text)
        many = len(by_share[columns[0]])
        name = f"{label}, {many} seeds" if many > 1 else label
        lines.append([f"**{name}**, the default plan" if label == DEFAULT else name, *cells])
    return table(["plan", *(f"{share:.0%}" for share in columns)], lines)


def _kl(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return nats(Estimate(rows[0].kl, rows[0].kl_error))
    low, high = min(row.kl for row in rows), max(row.kl for row in rows)
    return f"{low:.4f} to {high:.4f}"


def details(rows: Sequence[Row]) -> str:
    """One line for each plan and size, the random seeds together."""
    lines = []
    for share in shares(rows):
        for label, by_share in grouped(rows).items():
            mine = by_share[share]
            lines.append(
                [
                    f"{share:.0%}",
                    f"{label}, {len(mine)} seeds" if len(mine) > 1 else label,
                    f"{mine[0].kept}",
                    f"{mine[0].expert_bytes / 1e6:.2f}",
                    _range([row.predicted for row in mine]),
                    _kl(mine),
                    _above(mine),
                ]
            )
    header = ["expert bytes", "plan", "experts kept", "MB of experts", "predicted", "KL, nats"]
    return table([*header, "above the default plan (95 %)"], lines, left=2)


def _range(values: Sequence[float]) -> str:
    shown = [f"{value:.2g}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(shown))


def _above(rows: Sequence[Row]) -> str:
    """Of several: the mean, and from the lowest to the highest end of their intervals."""
    above = [row.above for row in rows if row.above]
    if not above:
        return ""
    mean = sum(value for value, _, _ in above) / len(above)
    return with_interval(mean, min(low for _, low, _ in above), max(high for *_, high in above))


def judgement(rows: Sequence[Row]) -> str:
    """The verdict and the rank correlation of every size."""
    lines = []
    for verdict in verdicts(rows):
        rank, count = rank_correlation(rows, verdict.share)
        lines.append(
            [
                f"{verdict.share:.0%}",
                verdict.word,
                verdict.rival,
                with_interval(*verdict.above),
                f"{_rank(rank)} of {count}",
            ]
        )
    header = ["expert bytes", "the default plan is", "lowest rival", "its KL above the default's"]
    return table([*header, "Spearman"], lines, left=3)


def _rank(rank: float | None) -> str:
    return "–" if rank is None else f"{rank:.2f}"


def summary(rows: Sequence[Row]) -> str:
    """One sentence on all sizes, one on all plans."""
    found = verdicts(rows)
    counts = {word: sum(v.word == word for v in found) for word in dict.fromkeys(_WORDS)}
    told = [f"{_WORDS[word]} at {n} of {len(found)} sizes" for word, n in counts.items() if n]
    rank, plans = rank_correlation(rows)
    return (
        f"The default plan's KL is {', '.join(told)} (95 %, paired by document). Spearman's rank "
        f"correlation of predicted damage and measured KL over all {plans} checkpoints: "
        f"{_rank(rank)}."
    )


_WORDS = {
    "lowest": "clearly the lowest",
    "within noise": "within noise of the lowest",
    "beaten": "clearly above the lowest",
}


def figures(rows: Sequence[Row], tokens: int) -> dict[str, Any]:
    """All of it as JSON."""
    pooled, checkpoints = rank_correlation(rows)
    return {
        "tokens": tokens,
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts(rows)],
        "spearman": {
            "all": pooled,
            "checkpoints": checkpoints,
            "by_share": {f"{s:.2f}": rank_correlation(rows, s)[0] for s in shares(rows)},
        },
    }


def write(made: Path, rows: Sequence[Row], tokens: int) -> None:
    """Put what was made in place of what is committed."""
    shutil.copyfile(made / "saliency.safetensors", REPORTS / "saliency.safetensors")
    for share in REPORTED:
        shutil.rmtree(REPORTS / percent(share), ignore_errors=True)
        shutil.copytree(made / percent(share), REPORTS / percent(share))
    text = json.dumps(figures(rows, tokens), indent=1) + "\n"
    (REPORTS / "table.json").write_text(text, encoding="utf-8")
    write_between(README, plain_recipes=f"{overview(rows)}\n\n{summary(rows)}")
    write_between(RESULTS, summary=summary(rows), verdicts=judgement(rows), plans=details(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000, help="evaluation tokens")
    parser.add_argument("--calibration-tokens", type=int, default=None)
    parser.add_argument("--saliency", type=Path, help="take this file instead of calibrating")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--write", action="store_true", help="renew reports/, README.md, docs/")
    arguments = parser.parse_args()
    if arguments.saliency:
        saliency = Saliency.load(arguments.saliency)
    else:
        say("calibrating")
        saliency = calibrated(
            (),
            tokens=arguments.calibration_tokens,
            probe_tokens=PROBE_TOKENS,
            command=COMMAND,
        )
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(Path(scratch), saliency, tokens=arguments.tokens)
        if arguments.write:
            write(Path(scratch), rows, arguments.tokens)
    if arguments.json:
        print(json.dumps({"plain_recipes": figures(rows, arguments.tokens)}))
    else:
        print("\n\n".join([overview(rows), judgement(rows), details(rows), summary(rows)]))


if __name__ == "__main__":
    main()
