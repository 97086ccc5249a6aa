"""Does calibrating on one domain keep that domain better than calibrating on another?

Calibrates the embedded model on each shipped text set alone, and on all together, with equally many
tokens; makes the default plan at two sizes, exports it, loads it again and measures it on every
domain's held-out text. Prints a table for each size (with --json one JSON object on stdout). With
--write it renews docs/results.md and reports/tiny-k3/domains.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    REPORTS,
    RESULTS,
    Measured,
    calibrated,
    interval,
    provenance,
    say,
    size_at,
    table,
    with_interval,
    write_between,
)

from reap.artifacts import Evaluation, Plan
from reap.artifacts.evaluation import Estimate, clustered_mean
from reap.artifacts.files import sha256
from reap.formatting import nats
from reap.models.text import named_sets
from reap.planning import PlanSettings, make_plan

COMMAND = "benchmarks/domains.py"
SHARES = (0.30, 0.20)
"""Of the experts' bytes. At the second the layers that matter must lose experts; with more room
they keep nearly all, and a domain only chooses which are in the low bank."""
CALIBRATION_TOKENS = 6500
"""What the smallest text set has."""
PROBE_TOKENS = 2000
ALL = "all five"


@dataclass(frozen=True)
class Cell:
    """KL in nats on the text of `measured` of a plan made from text of `calibrated`."""

    calibrated: str
    measured: str
    kl: float
    kl_error: float


@dataclass(frozen=True)
class Margin:
    """By how much the plans of other domains are above a domain's own plan on its text.

    (value, low, high) with the 95 % interval, paired by document: of the other domains' mean, and
    of the lowest of them, `rival`.
    """

    domain: str
    mean: tuple[float, float, float]
    lowest: tuple[float, float, float]
    rival: str


def run(
    shares: Sequence[float], *, tokens: int, calibration_tokens: int
) -> dict[float, dict[str, Evaluation]]:
    """For each size an evaluation by what was calibrated on."""
    names = list(named_sets())
    plans: dict[float, dict[str, Plan]] = {share: {} for share in shares}
    with tempfile.TemporaryDirectory() as scratch:
        saliency_files = {name: Path(scratch) / f"{name}.safetensors" for name in [*names, ALL]}
        for name, texts in {**{name: [name] for name in names}, ALL: names}.items():
            say(f"calibrating on {name}")
            saliency = calibrated(
                texts, tokens=calibration_tokens, probe_tokens=PROBE_TOKENS, command=COMMAND
            )
            saliency.save(saliency_files[name])
            for share, made in plans.items():
                made[name] = make_plan(
                    saliency,
                    PlanSettings(size=size_at(saliency.spec, share)),
                    provenance=provenance(
                        saliency, sha256(saliency_files[name]), f"{COMMAND} at {share:.0%}"
                    ),
                )
        measured = Measured(tokens, COMMAND)
        found = {}
        for share, made in plans.items():
            files = {name: Path(scratch) / f"{share}" / f"{name}.json" for name in made}
            found[share] = dict(zip(made, measured(made, files, saliency_files)))
    return found


def cells(found: Mapping[str, Evaluation]) -> list[Cell]:
    """Rows by what was calibrated on, columns by what was measured."""
    return [
        Cell(name, domain, kl.value, kl.error)
        for name, evaluation in found.items()
        for domain in evaluation.domains
        for kl in [evaluation.mean("kl", domain)]
    ]


def margins(found: Mapping[str, Evaluation]) -> list[Margin]:
    """Of every domain that was calibrated on alone."""
    made = []
    for domain in found[ALL].domains:
        own = found[domain]
        others = [name for name in found if name not in (domain, ALL)]
        mean = difference([found[name] for name in others], own, domain)
        each = {name: difference([found[name]], own, domain) for name in others}
        rival = min(each, key=lambda name: each[name].value)
        made.append(
            Margin(
                domain,
                (mean.value, *interval(mean)),
                (each[rival].value, *interval(each[rival])),
                rival,
            )
        )
    return made


def difference(others: Sequence[Evaluation], own: Evaluation, domain: str) -> Estimate:
    """Mean KL of `others` minus that of `own` on a domain's text, paired by document."""

    def sums(evaluation: Evaluation) -> np.ndarray:
        return np.array([d.kl for d in evaluation.documents if d.domain == domain])

    counts = np.array([d.tokens for d in own.documents if d.domain == domain], dtype=np.float64)
    return clustered_mean(np.mean([sums(other) for other in others], axis=0) - sums(own), counts)


@dataclass(frozen=True)
class Crossed:
    """What was calibrated on by what was measured, at one size."""

    cells: tuple[Cell, ...]
    margins: tuple[Margin, ...]

    def markdown(self) -> str:
        """The lowest of the single domains' plans in bold in every column; then the margins."""
        known = {(cell.calibrated, cell.measured): cell for cell in self.cells}
        domains = [margin.domain for margin in self.margins]
        least = {d: min(known[name, d].kl for name in domains) for d in domains}
        lines = []
        for name in dict.fromkeys(cell.calibrated for cell in self.cells):
            line = [name]
            for domain in domains:
                cell = known[name, domain]
                text = nats(Estimate(cell.kl, cell.kl_error))
                bold = name != ALL and cell.kl == least[domain]
                line.append(f"**{text}**" if bold else text)
            lines.append(line)
        lines += [
            ["others' mean above own", *(with_interval(*m.mean) for m in self.margins)],
            ["lowest other", *(m.rival for m in self.margins)],
            ["lowest other above own", *(with_interval(*m.lowest) for m in self.margins)],
        ]
        return table(["calibrated on", *(f"KL on {domain}" for domain in domains)], lines)

    def summary(self) -> str:
        of = len(self.margins)
        mean = sum(m.mean[1] > 0 for m in self.margins)
        each = sum(m.lowest[1] > 0 for m in self.margins)
        worse = sum(m.lowest[2] < 0 for m in self.margins)
        text = (
            f"On its own text a domain's plan is clearly better than the mean of the other "
            f"domains' plans for {mean} of {of} domains, and than the lowest of them for {each}"
        )
        return text + (f"; for {worse} the lowest of them is clearly better." if worse else ".")


def crossed(found: Mapping[str, Evaluation]) -> Crossed:
    return Crossed(tuple(cells(found)), tuple(margins(found)))


def page(found: Mapping[float, Crossed], tokens: int) -> str:
    """A table for each size, with the number of calibration tokens."""
    return "\n\n".join(
        f"**{share:.0%} of the experts' bytes**, calibrated on {tokens:,} tokens. {one.summary()}"
        f"\n\n{one.markdown()}"
        for share, one in found.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="of the experts' bytes"
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="evaluation tokens")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--write", action="store_true", help="renew docs/results.md and reports/")
    arguments = parser.parse_args()
    tokens, calibration = arguments.tokens, arguments.calibration_tokens
    measured = run(arguments.shares, tokens=tokens, calibration_tokens=calibration)
    found = {share: crossed(one) for share, one in measured.items()}
    figures: dict[str, Any] = {
        "tokens": tokens,
        "calibration_tokens": calibration,
        "shares": {f"{share:.2f}": asdict(one) for share, one in found.items()},
    }
    text = page(found, calibration)
    if arguments.write:
        written = json.dumps(figures, indent=1) + "\n"
        (REPORTS / "domains.json").write_text(written, encoding="utf-8")
        write_between(RESULTS, domains=text)
    print(json.dumps({"domains": figures}) if arguments.json else text)


if __name__ == "__main__":
    main()
