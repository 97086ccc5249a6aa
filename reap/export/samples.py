"""Experts of a written checkpoint against the source's: the same codes, or nearly the same outputs.

The first, a middle and the last expert of every bank of every layer are read again, from the source
by their ids and from what was written by their slots.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from reap.artifacts import Format, ModelSpec, Plan, Saliency
from reap.errors import CheckpointError
from reap.export.content import banks
from reap.export.finite import check_finite
from reap.models.quantize import dequantized
from reap.models.source import SourceModel, Stacked

_TOKENS = 32

# Most times the expected error. The inputs are drawn, not real, and what was measured is a layer's
# mean: on the embedded model single experts are off by twenty times of that.
_SLACK = 4.0

# Squared relative error of an expert's output; 1 if it gave nothing, 2 if another one stood there.
_MOST = 1.25
_AFFINE = {2: 0.5, 3: 0.2, 4: 0.1, 5: 0.02, 6: 0.01, 8: 0.002}
_OTHERS = {"mxfp4": 0.1, "nvfp4": 0.1, "mxfp8": 0.01}


class Samples:
    """Compares samples of the experts in `written` with those in `source`.

    Inputs are normally distributed, independent, with the second moments of `saliency`, or of
    variance 1 without. The output of an expert whose format is not the source's may be off by four
    times the squared relative error that is usual for the format, or that calibration measured in
    the layer if that is more.
    """

    def __init__(
        self,
        written: SourceModel,
        source: SourceModel,
        plan: Plan,
        spec: ModelSpec,
        saliency: Saliency | None,
    ) -> None:
        self._written, self._source = written, source
        self._plan, self._saliency = plan, saliency
        self._moe = {moe.layer: moe for moe in spec.moe_layers}
        self._position = {layer.layer: position for position, layer in enumerate(plan.layers)}
        self.layers = {layer.layer: layer for layer in plan.layers}

    def check(self, index: int) -> None:
        """One decoder layer. Raises CheckpointError, naming layer and expert."""
        layer, moe = self.layers[index], self._moe[index]
        projections = [p.name for p in moe.projections]
        for bank, ids in banks(layer).items():
            formats = self._plan.high if layer.kept.index(ids[0]) < layer.high else self._plan.low
            slots = sorted({0, len(ids) // 2, len(ids) - 1})
            sampled = tuple(ids[slot] for slot in slots)
            theirs = self._source.some_experts(index, sampled, projections)
            ours = {name: self._rows(f"{moe.experts}{bank}.{name}", slots) for name in projections}
            for row, expert in enumerate(sampled):
                self._check_expert(index, bank, expert, _row(ours, row), _row(theirs, row), formats)

    def _rows(self, path: str, slots: list[int]) -> dict[str, mx.array]:
        """Weight, scales, … of some of the experts that were written; nothing else is read."""
        checkpoint = self._written.checkpoint
        leaves = ("weight", "scales", "biases", "bias")
        return {
            leaf: checkpoint.rows(f"{path}.{leaf}", slots)
            for leaf in leaves
            if f"{path}.{leaf}" in checkpoint.tensors
        }

    def _check_expert(
        self,
        index: int,
        bank: str,
        expert: int,
        ours: Stacked,
        theirs: Stacked,
        formats: dict[str, Format],
    ) -> None:
        changed = False
        pairs: dict[str, tuple[mx.array, mx.array]] = {}
        for projection in self._moe[index].projections:
            name = projection.name
            path = f"{self._moe[index].experts}{bank}.{name}"
            check_finite({f"{path}.{leaf}": array for leaf, array in ours[name].items()})
            if formats[name] != projection.format:
                changed = True
                continue
            pairs |= {
                f"expert {expert} in {path}.{leaf}": (ours[name][leaf], array)
                for leaf, array in theirs[name].items()
            }
        check_same(pairs)
        if changed:
            stored = {p.name: p.format for p in self._moe[index].projections}
            self._check_output(index, expert, ours, theirs, formats, stored)

    def _check_output(
        self,
        index: int,
        expert: int,
        ours: Stacked,
        theirs: Stacked,
        formats: dict[str, Format],
        stored: dict[str, Format],
    ) -> None:
        module = self._source.experts(index)
        wanted = self._output(index, _dense(module, theirs, stored))
        found = self._output(index, _dense(module, ours, formats))
        energy, error = float((wanted**2).sum()), float(((found - wanted) ** 2).sum())
        limit = min(_MOST, _SLACK * self.expected(index, formats, stored))
        if not error <= limit * energy:
            share = error / energy if energy else float("inf")
            raise CheckpointError(
                f"layer {index}, expert {expert}: the output of what was written is off by "
                f"{share:.3g} of its energy, at most {limit:.3g} was expected of "
                f"{'/'.join(dict.fromkeys(f.label for f in formats.values()))}.",
                "plan this layer's experts at more bits, or calibrate and plan again",
            )

    def expected(self, index: int, formats: dict[str, Format], stored: dict[str, Format]) -> float:
        """Squared error of an expert's output over its energy: the usual or the measured one."""
        changed = {format for name, format in formats.items() if format != stored[name]}
        usual = sum(_OTHERS.get(f.mode) or _AFFINE[f.bits] for f in changed)
        measured = self._saliency.measurement if self._saliency else None
        if self._saliency is None or measured is None or not changed <= {*measured.formats}:
            return usual
        position = self._position[index]
        tokens = self._saliency.tokens.sum(axis=(0, 1))[position]
        energy = self._saliency.gate2_norm2.sum(axis=(0, 1))[position].sum() / max(tokens, 1)
        rows = [measured.formats.index(format) for format in changed]
        error = measured.low_expert_error[rows, position].sum(axis=-1).max()
        error /= max(measured.tokens[position], 1)
        return max(usual, float(error / energy)) if energy > 0 else usual

    def _output(self, index: int, experts: nn.Module) -> np.ndarray:
        """[tokens, columns] float64 of the only expert that `experts` holds."""
        first = experts["up_proj" if "up_proj" in experts else "fc1"]
        x = mx.array(self._inputs(index, first.weight.shape[-1]))
        y = experts(x, mx.zeros((len(x), 1), mx.uint32))
        return np.array(y[:, 0]).astype(np.float64)

    def _inputs(self, index: int, columns: int) -> np.ndarray:
        """[tokens, columns] float32."""
        drawn = np.random.default_rng(index).standard_normal((_TOKENS, columns))
        moments = self._saliency.moments if self._saliency else None
        name = next((n for n in ("up_proj", "fc1") if moments and n in moments.sums), None)
        if moments is None or name is None:
            return drawn.astype(np.float32)
        mean = moments.mean(name, self._position[index])
        if not mean.sum() > 0:
            return drawn.astype(np.float32)
        return (drawn * np.sqrt(mean)).astype(np.float32)


def check_same(pairs: dict[str, tuple[mx.array, mx.array]]) -> None:
    """Raise CheckpointError unless the arrays of every pair are equal, naming the first."""
    same = {
        name: mx.array_equal(ours, theirs) if ours.dtype == theirs.dtype else mx.array(False)
        for name, (ours, theirs) in pairs.items()
    }
    mx.eval(same)
    for name, equal in same.items():
        if not equal.item():
            raise CheckpointError(f"{name} differs from the source.")


def _row(arrays: Stacked, row: int) -> Stacked:
    return {name: {n: a[row : row + 1] for n, a in parts.items()} for name, parts in arrays.items()}


def _dense(module: nn.Module, arrays: Stacked, formats: dict[str, Format]) -> nn.Module:
    """A copy of an experts module that holds one expert, in float32."""
    cls: Any = type(module)
    copy = cls.__new__(cls)
    nn.Module.__init__(copy)
    copy.__dict__.update(module.__dict__)
    for name, part in module.items():
        copy[name] = part
    for name, parts in arrays.items():
        linear = SwitchLinear.__new__(SwitchLinear)
        nn.Module.__init__(linear)
        linear.weight = dequantized(parts, formats[name]).astype(mx.float32)
        if "bias" in parts:
            linear.bias = parts["bias"].astype(mx.float32)
        copy[name] = linear
    copy.eval()
    return copy
