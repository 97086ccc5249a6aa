"""What searching scales and biases saves at low bits, on the embedded model's own inputs.

Second moments come from the calibration text; the error E‖f' - f‖² / E‖f‖² of the experts' outputs
(each weighted as the block weights it, squared) from the evaluation text. Beside it stands the
error of the weights, ‖W' - W‖² / ‖W‖², which is that of outputs if all input channels were
independent and alike. Prints a table (with --json one JSON object on stdout). --kl also exports the
model with all experts in each format and measures the KL divergence from the source; --write renews
docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import RESULTS, provenance, say, write_between

from reap.artifacts import Format, Saliency, SecondMoments
from reap.artifacts.files import sha256
from reap.calibrate import CalibrationSettings, calibrate
from reap.data import embedded_model
from reap.evaluate import EvaluationSettings, evaluate
from reap.export import export
from reap.models.lowbit import ROUNDINGS, quantizer
from reap.models.quantize import dequantized, requantized_experts
from reap.models.source import SourceModel, open_source
from reap.models.stream import LayerStream
from reap.models.tap import ExpertTap
from reap.models.text import batches, load_texts, load_tokenizer, sequences
from reap.planning import PlanSettings, plain_plan

FORMATS = tuple(Format.parse(name) for name in ("2bit-g64", "2bit-g128", "3bit-g64", "3bit-g128"))
Errors = dict[tuple[Format, str], list[float]]
"""By format and rounding: an error of each MoE layer, that of all layers, and the weights' own."""


def calibrated(tokens: int) -> Saliency:
    """Second moments only: nothing is measured on probes."""
    return calibrate(
        open_source(str(embedded_model())),
        load_texts((), split="calibration"),
        CalibrationSettings(
            tokens=tokens, sequence_length=256, probe_tokens=0, low_rounding="feedback"
        ),
        command="benchmarks/low_bit.py",
    )


def output_errors(source: SourceModel, moments: SecondMoments, tokens: int) -> Errors:
    """Errors of all experts in every format and rounding, on the evaluation text."""
    parts = sequences(
        load_texts((), split="evaluation"),
        load_tokenizer(source.checkpoint.path),
        sequence_length=256,
        tokens=tokens,
        vocab_size=source.vocabulary,
    )
    made = batches(parts, tokens_per_batch=2048)
    source.load_trunk()
    found: Errors = {(format, rounding): [] for format in FORMATS for rounding in ROUNDINGS}
    total = np.zeros((1 + len(found), len(source.moe_layers)))
    weights = np.zeros(1 + len(found))
    with LayerStream(source.model, source.layers, [batch.tokens for batch in made]) as stream:
        for index in range(len(source.layers)):
            source.load_layer(index)
            calls: list[tuple[mx.array, ...]] = []
            for position, batch in enumerate(made):
                if index not in source.moe_layers:
                    stream.step(position)
                    continue
                tap = ExpertTap(index, lambda *call, m=batch.mask, to=calls: to.append((*call, m)))
                with tap.on(source.experts(index)):
                    stream.step(position)
            if calls:
                say(f"layer {index}")
                layer = source.moe_layers.index(index)
                total[:, layer], rounded = _layer_errors(source, moments, index, calls, list(found))
                weights += rounded
            source.release_layer(index)
    for row, key in enumerate(found, start=1):
        found[key] = [*(total[row] / total[0]), total[row].sum() / total[0].sum()]
        found[key].append(weights[row] / weights[0])
    return found


def _layer_errors(
    source: SourceModel,
    moments: SecondMoments,
    index: int,
    calls: Sequence[tuple],
    cases: Sequence[tuple[Format, str]],
) -> tuple[list[float], list[float]]:
    """Σg²‖f‖² of the layer and Σg²‖f' - f‖² of every case; ‖W‖² and ‖W' - W‖² likewise."""
    experts, layer = source.experts(index), source.moe_layers.index(index)

    def energy(array: mx.array, weights: mx.array, mask: np.ndarray) -> float:
        norms = mx.square(array.astype(mx.float32)).sum(-1) * mx.square(weights.astype(mx.float32))
        return float(np.array(norms, np.float64)[mask].sum())

    dense = _dense(experts)
    sums = [sum(energy(y, weights, mask) for _, _, weights, y, mask in calls)]
    rounded = [sum(float(mx.square(w).sum()) for w in dense)]
    for format, rounding in cases:
        low = requantized_experts(
            experts,
            format,
            lambda name, r=rounding: quantizer(
                r, moments.mean(name, layer), lambda: moments.covariance(name, layer)
            ),
        )
        sums.append(sum(energy(low(x, chosen) - y, w, mask) for x, chosen, w, y, mask in calls))
        rounded.append(sum(float(mx.square(w - v).sum()) for w, v in zip(dense, _dense(low))))
    return sums, rounded


def _dense(experts: nn.Module) -> list[mx.array]:
    """The matrices of all experts, float32 [experts, rows, columns]."""
    found = []
    for part in experts.children().values():
        if "scales" in part:
            arrays = {n: array for n, array in part.items() if isinstance(array, mx.array)}
            format = Format(part.bits, part.group_size, part.mode)
            found.append(dequantized(arrays, format).astype(mx.float32))
    return found


def divergences(saliency: Saliency, tokens: int) -> dict[tuple[Format, str], list[float]]:
    """Mean KL and its standard error with all experts in a format, exported and loaded again."""
    model = str(embedded_model())
    spec = saliency.spec
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "saliency.safetensors"
        saliency.save(file)
        for format in FORMATS:
            for rounding in ROUNDINGS:
                say(f"{format.label}, {rounding}: export and evaluate")
                low = f"{format.bits}bit-g{format.group_size}"
                size = spec.trunk_bytes() + sum(
                    spec.num_experts
                    * (
                        spec.router_row_bytes(layer)
                        + spec.expert_bytes(layer, {p.name: format for p in layer.projections})
                    )
                    for layer in spec.moe_layers
                )
                plan = plain_plan(
                    saliency,
                    PlanSettings(size=size, low=low, low_rounding=rounding),
                    recipe="low",
                    provenance=provenance(saliency, sha256(file), "benchmarks/low_bit.py"),
                )
                assert sum(plan.expert_counts) == spec.num_experts * len(spec.moe_layers)
                plan_file, out = Path(scratch) / "plan.json", Path(scratch) / "checkpoint"
                plan.save(plan_file, force=True)
                export(
                    open_source(model), plan, out, plan_file=plan_file, saliency=file, force=True
                )
                kl = evaluate(
                    open_source(str(out)),
                    load_texts((), split="evaluation"),
                    EvaluationSettings(tokens=tokens, sequence_length=256),
                    reference=open_source(model),
                ).mean_kl
                found[format, rounding] = [kl.value, kl.error]
    return found


def markdown(rows: Sequence[dict]) -> str:
    layers = len(rows[0]["layers"])
    with_kl = "kl" in rows[0]
    head = ["experts", "rounding", *(f"MoE layer {i + 1}" for i in range(layers)), "all", "÷ plain"]
    head += ["weights ÷ plain"]
    head += ["KL, nats"] if with_kl else []
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        cells = [row["format"], row["rounding"], *(f"{e:.4f}" for e in row["layers"])]
        cells += [f"{row['error']:.4f}", f"{row['ratio']:.2f}", f"{row['weights_ratio']:.2f}"]
        cells += [f"{row['kl']:.4f} ± {row['kl_error']:.4f}"] if with_kl else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2_000, help="evaluation tokens")
    parser.add_argument("--calibration-tokens", type=int, default=20_000)
    parser.add_argument("--kl", action="store_true", help="export and measure KL, too (minutes)")
    parser.add_argument("--write", action="store_true", help="renew docs/results.md; needs --kl")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.write and not arguments.kl:
        parser.error("--write needs --kl")
    say("calibrating")
    saliency = calibrated(arguments.calibration_tokens)
    assert saliency.moments is not None
    source = open_source(str(embedded_model()))
    errors = output_errors(source, saliency.moments, arguments.tokens)
    rows = [
        {
            "format": format.label,
            "rounding": rounding,
            "layers": values[:-2],
            "error": values[-2],
            "ratio": values[-2] / errors[format, "plain"][-2],
            "weights_ratio": values[-1] / errors[format, "plain"][-1],
        }
        for (format, rounding), values in errors.items()
    ]
    if arguments.kl:
        measured = divergences(saliency, arguments.tokens)
        for row, (value, error) in zip(rows, measured.values()):
            row |= {"kl": value, "kl_error": error}
    if arguments.write:
        write_between(RESULTS, low_bits=markdown(rows))
    if arguments.json:
        print(json.dumps({"low_bit": rows}))
    else:
        print(markdown(rows))


if __name__ == "__main__":
    main()
