"""What the benchmarks on the embedded model share: calibrate, plan at a size, export and measure,
and write what was found between two markers of a page."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from multiprocessing import get_context
from pathlib import Path

from reap import __version__
from reap.artifacts import Evaluation, ModelSpec, Plan, Provenance, Saliency
from reap.artifacts.evaluation import Estimate
from reap.calibrate import CalibrationSettings, calibrate
from reap.data import embedded_model
from reap.evaluate import EvaluationSettings, evaluate_all
from reap.export import export
from reap.formatting import decimal, digits_for
from reap.models.source import open_source
from reap.models.text import load_texts
from reap.planning import PlanSettings
from reap.planning.precision import size_with
from reap.planning.size import MOST

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports" / "tiny-k3"
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"

SEQUENCE_LENGTH = 256
WORKERS = 4
"""At most; every one of them runs the reference, too."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def calibrated(
    texts: Sequence[str], *, tokens: int | None, probe_tokens: int, command: str
) -> Saliency:
    """Saliency of the embedded model on the shipped text sets named (all if none)."""
    return calibrate(
        open_source(str(embedded_model())),
        load_texts(texts, split="calibration"),
        CalibrationSettings(
            tokens=tokens,
            sequence_length=SEQUENCE_LENGTH,
            probe_tokens=probe_tokens,
            sensitivity_tokens=probe_tokens,
        ),
        command=command,
    )


def size_at(spec: ModelSpec, share: float) -> int:
    """What `reap plan --size` takes a share for."""
    return size_with(spec, PlanSettings(size=MOST), Decimal(str(share)))


def provenance(saliency: Saliency, digest: str, command: str) -> Provenance:
    """Of a plan made from `saliency`, whose file has the sha256 `digest`."""
    spec = saliency.spec
    return Provenance(
        reap_version=__version__,
        command=command,
        model=spec.model,
        revision=spec.revision,
        model_sha256=spec.model_sha256,
        inputs={"saliency": digest},
        corpora=saliency.provenance.corpora,
    )


def same_checkpoint(plan: Plan) -> object:
    """Equal for plans that keep the same experts in the same banks and formats, rounded alike."""
    layers = tuple(
        (layer.layer, frozenset(layer.kept[: layer.high]), frozenset(layer.kept[layer.high :]))
        for layer in plan.layers
    )
    low = any(layer.low for layer in plan.layers)
    rounding = (plan.low_rounding, plan.provenance.inputs["saliency"]) if low else None
    return layers, tuple(sorted(plan.quantization.items())), rounding


def evaluated(checkpoints: Mapping[str, Path], *, tokens: int, command: str) -> list[Evaluation]:
    """Of each checkpoint by label, on the shipped evaluation text; MLX's CPU build works on one
    core at a time, so several processes share the checkpoints."""
    labels = list(checkpoints)
    workers = min(os.cpu_count() or 1, WORKERS, len(labels))
    # A forked process would take over MLX's streams without the threads that run them.
    with ProcessPoolExecutor(max(workers, 1), get_context("spawn")) as pool:
        parts = [
            pool.submit(_evaluated, {label: checkpoints[label] for label in part}, tokens, command)
            for part in (labels[worker::workers] for worker in range(workers))
        ]
        found = {one.label: one for part in parts for one in part.result()}
    return [found[label] for label in labels]


def _evaluated(checkpoints: dict[str, Path], tokens: int, command: str) -> list[Evaluation]:
    return evaluate_all(
        {label: open_source(str(path)) for label, path in checkpoints.items()},
        load_texts((), split="evaluation"),
        EvaluationSettings(tokens=tokens, sequence_length=SEQUENCE_LENGTH),
        reference=open_source(str(embedded_model())),
        command=command,
    )


@dataclass
class Measured:
    """Evaluations by checkpoint, so that plans that come to the same are measured once."""

    tokens: int
    command: str

    def __post_init__(self) -> None:
        self._known: dict[object, Evaluation] = {}

    def __call__(
        self, plans: Mapping[str, Plan], files: Mapping[str, Path], saliency: Mapping[str, Path]
    ) -> list[Evaluation]:
        """Save every plan to its file, export what is new, load it again and evaluate it. In the
        order of `plans`, labelled by its keys; `saliency` are the files they were made from."""
        new: dict[object, str] = {}
        for label, plan in plans.items():
            plan.save(files[label], force=True)
            if same_checkpoint(plan) not in self._known:
                new.setdefault(same_checkpoint(plan), label)
        with tempfile.TemporaryDirectory() as scratch:
            checkpoints = {}
            for number, label in enumerate(new.values()):
                say(f"exporting: {label}")
                checkpoints[label] = Path(scratch) / str(number)
                source = open_source(str(embedded_model()))
                export(
                    source,
                    plans[label],
                    checkpoints[label],
                    plan_file=files[label],
                    saliency=saliency[label],
                )
            say(f"evaluating {len(checkpoints)} checkpoints")
            found = evaluated(checkpoints, tokens=self.tokens, command=self.command)
            self._known.update(zip(new, found))
        return [
            replace(self._known[same_checkpoint(plan)], label=label)
            for label, plan in plans.items()
        ]


def interval(estimate: Estimate) -> tuple[float, float]:
    """95 %, by the normal distribution."""
    return estimate.value - 1.96 * estimate.error, estimate.value + 1.96 * estimate.error


def with_interval(value: float, low: float, high: float) -> str:
    """ "+0.0220 (+0.0211 to +0.0228)", with the digits that its width needs."""
    digits = digits_for([high - low], 4, most=9)

    def signed(number: float) -> str:
        text = decimal(number, digits)
        return text if text.startswith("−") else f"+{text}"

    return f"{signed(value)} ({signed(low)} to {signed(high)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, the first `left` columns aligned to the left."""
    rule = ["---" if column < left else "---:" for column in range(len(header))]
    lines = [header, *rows]
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], f"|{'|'.join(rule)}|", *shown[1:]])


def between(text: str, name: str, content: str) -> str:
    """`text` with `content` between <!-- name --> and <!-- /name -->. ValueError without them."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(end) < text.index(start):
        raise ValueError(f"no {start} … {end}, or more than one")
    before, rest = text.split(start)
    after = rest.split(end)[1]
    return f"{before}{start}\n{content}\n{end}{after}"


def write_between(page: Path, **sections: str) -> None:
    """Renew sections of a page, all or none; "_" in a name stands for a space."""
    text = page.read_text(encoding="utf-8")
    for name, content in sections.items():
        text = between(text, name.replace("_", " "), content)
    page.write_text(text, encoding="utf-8")
