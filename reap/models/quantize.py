"""Storing expert matrices in another format, a few experts at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from reap.artifacts import Format
from reap.errors import ReapError

Quantizer = Callable[[mx.array, Format], dict[str, mx.array]]
"""From a weight [..., rows, columns] to MLX's arrays; see `quantized` and `lowbit.quantizer`."""

# Dequantized matrices held at once: 32 of K3's experts are 0.7 GB in bfloat16.
_EXPERTS_AT_ONCE = 32


def dequantized(arrays: dict[str, mx.array], format: Format) -> mx.array:
    """The dense matrix of `arrays` (weight, scales, biases) stored in `format`.

    bfloat16 for the E8M0/E4M3 formats, the scales' dtype for affine.
    """
    if format.mode == "dense":
        return arrays["weight"]
    return mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=format.group_size,
        bits=format.bits,
        mode=format.mode,
    )


def quantized(weight: mx.array, format: Format) -> dict[str, mx.array]:
    """`weight` [..., rows, columns] as MLX's arrays for `format`: weight, scales and biases."""
    packed, scales, *biases = mx.quantize(weight, format.group_size, format.bits, mode=format.mode)
    arrays = {"weight": packed, "scales": scales}
    return arrays | ({"biases": biases[0]} if biases else {})


def stored_as(
    arrays: dict[str, mx.array],
    source: Format,
    target: Format,
    quantize: Quantizer = quantized,
) -> dict[str, mx.array]:
    """A matrix, or stacked experts, from one format to another; a bias stays as it is.

    Raises ReapError for a target that is dense while the source is quantized.
    """
    if source == target:
        return arrays
    if target.mode == "dense":
        raise ReapError(
            f"the source is {source.label}; storing it as {target.label} gains nothing."
        )
    bias = {"bias": arrays["bias"]} if "bias" in arrays else {}
    return quantize(dequantized(arrays, source), target) | bias


def requantized(
    arrays: dict[str, mx.array],
    source: Format,
    target: Format,
    quantize: Quantizer = quantized,
) -> dict[str, mx.array]:
    """`stored_as` for stacked experts `[experts, …]`, evaluated in chunks of experts, so that the
    dense matrices of a large layer are never all in memory."""
    if source == target:
        return {name: mx.contiguous(array) for name, array in arrays.items()}
    chunks: list[dict[str, mx.array]] = []
    for start in range(0, arrays["weight"].shape[0], _EXPERTS_AT_ONCE):
        part = {name: a[start : start + _EXPERTS_AT_ONCE] for name, a in arrays.items()}
        chunks.append(stored_as(part, source, target, quantize))
        mx.eval(chunks[-1])
    return {name: mx.concatenate([c[name] for c in chunks]) for name in chunks[0]}


def requantized_experts(
    experts: nn.Module, target: Format, quantizer: Callable[[str], Quantizer] = lambda _: quantized
) -> Any:
    """A copy of a resident SwitchGLU or SwitchMLP whose projections are stored in `target`.

    `quantizer` gives the way to quantize a projection, by its name.
    """
    cls: Any = type(experts)
    copy = cls.__new__(cls)
    nn.Module.__init__(copy)
    copy.__dict__.update(experts.__dict__)
    for name, part in experts.items():
        linear = "weight" in part
        copy[name] = _requantized_linear(part, target, quantizer(name)) if linear else part
    copy.eval()
    return copy


def _requantized_linear(part: nn.Module, target: Format, quantize: Quantizer) -> nn.Module:
    source = Format(8 * part["weight"].dtype.size, 1, "dense")
    if "scales" in part:
        source = Format(part.bits, part.group_size, part.mode)
    arrays = {name: array for name, array in part.items() if isinstance(array, mx.array)}
    copy = QuantizedSwitchLinear.__new__(QuantizedSwitchLinear)
    nn.Module.__init__(copy)
    copy.group_size, copy.bits, copy.mode = target.group_size, target.bits, target.mode
    copy.biases = copy.global_scale = None
    for name, array in requantized(arrays, source, target, quantize).items():
        copy[name] = array
    return copy
