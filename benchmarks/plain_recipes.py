"""The default plan against plain recipes at equal bytes, exported and measured the same way.

Calibrates the embedded model, makes every plan, exports it, loads it again and measures it on the
evaluation text. Prints a table (with --json one JSON object on stdout). With --write it also
renews what is committed: reports/, and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from reap import __version__
from reap.artifacts import Evaluation, Plan, Provenance, Saliency
from reap.artifacts.files import sha256
from reap.calibrate import CalibrationSettings, calibrate
from reap.data import embedded_model
from reap.evaluate import EvaluationSettings, evaluate_all
from reap.export import export
from reap.models.source import open_source
from reap.models.text import load_texts
from reap.planning import PlanSettings, make_plan, plain_plan
from reap.report import write_report

ROOT = Path(__file__).parents[1]
SHARES = (0.55, 0.30)
RANDOM_SEEDS = range(5)
START, END = "<!-- plain recipes -->", "<!-- /plain recipes -->"
LABELS = {
    "frequency": "most used experts, mxfp4",
    "reap": "REAP's best experts, mxfp4",
    "low": "as many as fit, all 2-bit",
    "two-bank": "same two banks in every layer",
}


@dataclass(frozen=True)
class Candidate:
    """One plan and what it measured."""

    share: float
    label: str
    plan: Plan
    evaluation: Evaluation

    def row(self, default: Evaluation) -> dict[str, object]:
        kl = self.evaluation.mean_kl
        row: dict[str, object] = {
            "share": self.share,
            "plan": self.label,
            "kept": sum(self.plan.expert_counts),
            "expert_bytes": self.evaluation.expert_bytes,
            "predicted": self.plan.damage,
            "kl": kl.value,
            "kl_error": kl.error,
            "perplexity": self.evaluation.perplexity.value,
        }
        if self.evaluation is not default:
            more = self.evaluation.kl_difference(default)
            row |= {
                "above_default": more.value,
                "interval": [more.value - 1.96 * more.error, more.value + 1.96 * more.error],
            }
        return row


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def plans(saliency: Saliency, share: float, digest: str) -> dict[str, Plan]:
    """The default plan first, then the plain recipes at no more bytes."""
    spec = saliency.spec
    routers = sum(spec.num_experts * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    size = spec.trunk_bytes() + routers + round(share * spec.experts_bytes)
    settings = PlanSettings(size=size)
    provenance = Provenance(
        reap_version=__version__,
        command=f"benchmarks/plain_recipes.py at {share:.0%}",
        model=spec.model,
        revision=spec.revision,
        config_sha256=spec.config_sha256,
        inputs={"saliency": digest},
        corpora=saliency.provenance.corpora,
    )
    made = {"reap": make_plan(saliency, settings, provenance=provenance)}
    for recipe, label in LABELS.items():
        made[label] = plain_plan(saliency, settings, recipe=recipe, provenance=provenance)
    for seed in RANDOM_SEEDS:
        made[f"random experts, mxfp4, seed {seed}"] = plain_plan(
            saliency, settings, recipe="random", seed=seed, provenance=provenance
        )
    return made


def measure(made: dict[str, Plan], saliency: Path, place: Path, tokens: int) -> list[Evaluation]:
    """Export every plan, load it again, and evaluate all in one pass over the text."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = {}
        for number, (label, plan) in enumerate(made.items()):
            say(f"exporting: {label}")
            plan_file = place / ("plan.json" if not number else f"plan-{number}.json")
            plan.save(plan_file, force=True)
            checkpoint = Path(scratch) / str(number)
            source = open_source(str(embedded_model()))
            export(source, plan, checkpoint, plan_file=plan_file, saliency=saliency)
            checkpoints[label] = open_source(str(checkpoint))
        say("evaluating")
        return evaluate_all(
            checkpoints,
            load_texts((), split="evaluation"),
            EvaluationSettings(tokens=tokens, sequence_length=256),
            reference=open_source(str(embedded_model())),
            command="benchmarks/plain_recipes.py",
        )


def run(directory: Path, *, tokens: int, calibration_tokens: int | None) -> list[Candidate]:
    say("calibrating")
    saliency = calibrate(
        open_source(str(embedded_model())),
        load_texts((), split="calibration"),
        CalibrationSettings(tokens=calibration_tokens, sequence_length=256, probe_tokens=4000),
        command="benchmarks/plain_recipes.py",
    )
    file = directory / "saliency.safetensors"
    saliency.save(file, force=True)
    candidates = []
    for share in SHARES:
        place = directory / f"{share:.0%}".rstrip("%")
        say(f"{share:.0%} of the expert bytes")
        made = plans(saliency, share, sha256(file))
        files = []
        for number, found in enumerate(measure(made, file, place, tokens)):
            files.append(place / f"evaluation-{number}.json")
            found.save(files[-1], force=True)
            candidates.append(Candidate(share, found.label, made[found.label], found))
        write_report(
            place / "report.html",
            saliency=file,
            plan=place / "plan.json",
            evaluation=files[0],
            rivals=files[1:],
            rival_plans=sorted(place.glob("plan-*.json")),
            force=True,
        )
    return candidates


def rows(candidates: list[Candidate]) -> list[dict[str, object]]:
    """One row per plan; the random seeds of a share become one row with their range."""
    found = []
    for share in SHARES:
        mine = [c for c in candidates if c.share == share]
        default = mine[0].evaluation
        found += [c.row(default) for c in mine]
    return found


def markdown(table: list[dict[str, object]]) -> str:
    lines = [
        "| expert bytes | plan | experts kept | KL to the source, nats | above reap (95 %) |",
        "|---:|---|---:|---:|---:|",
    ]
    for share in SHARES:
        mine = [row for row in table if row["share"] == share]
        drawn = [row for row in mine if str(row["plan"]).startswith("random")]
        shown = [row for row in mine if row not in drawn]
        for row in shown:
            lines.append(_line(row))
        lines.append(_random_line(drawn))
    return "\n".join(lines)


def _line(row: dict) -> str:
    more = ""
    if "interval" in row:
        low, high = row["interval"]
        more = f"{row['above_default']:+.4f} ({low:+.4f} to {high:+.4f})"
    name = f"**{row['plan']}** (default plan)" if not more else row["plan"]
    return (
        f"| {row['share']:.0%} | {name} | {row['kept']} | "
        f"{row['kl']:.5f} ± {row['kl_error']:.5f} | {more} |"
    )


def _random_line(drawn: list[dict]) -> str:
    kls = [row["kl"] for row in drawn]
    lows = min(row["interval"][0] for row in drawn)
    highs = max(row["interval"][1] for row in drawn)
    mean = sum(row["above_default"] for row in drawn) / len(drawn)
    return (
        f"| {drawn[0]['share']:.0%} | random experts, mxfp4, {len(drawn)} seeds | "
        f"{drawn[0]['kept']} | {min(kls):.4f} to {max(kls):.4f} | "
        f"{mean:+.4f} ({lows:+.4f} to {highs:+.4f}) |"
    )


def write_readme(table: str) -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(f"{before}{START}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="evaluation tokens")
    parser.add_argument("--calibration-tokens", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--write", action="store_true", help="renew reports/ and README.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = ROOT / "reports" / "tiny-k3" if arguments.write else Path(scratch)
        candidates = run(
            directory, tokens=arguments.tokens, calibration_tokens=arguments.calibration_tokens
        )
    table = rows(candidates)
    if arguments.write:
        write_readme(markdown(table))
    if arguments.json:
        print(json.dumps({"plain_recipes": table}))
    else:
        print(markdown(table))


if __name__ == "__main__":
    main()
