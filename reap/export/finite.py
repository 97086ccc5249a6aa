"""Whether values are finite, by their bits: MLX and NumPy share the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from reap.errors import CheckpointError
from reap.models.checkpoint import dtype_name

# All bits of the exponent, by the dtypes' names in safetensors.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}

_BLOCK = 2**18  # elements whose temporaries stay in a processor's cache


def check_finite(tensors: Mapping[str, mx.array], prefix: str = "") -> None:
    """Raise CheckpointError for a value, or a scale of the MX formats, that is NaN or infinite."""
    scales = {n for n, a in tensors.items() if is_scales(n, dtype_name(a.dtype))}
    looked_at = {n: a for n, a in tensors.items() if n in scales or _dtype(a) in _EXPONENT}
    for name, values in raw(looked_at).items():
        weight = tensors[weight_of(name)].shape if name in scales else None
        if not finite(values, _dtype(tensors[name]), tensors[name].shape, weight):
            raise not_finite(f"{prefix}{name}")


def not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"{name} holds a value that is not finite.")


def is_scales(name: str, dtype: str) -> bool:
    """Whether a tensor holds the scales of one of the MX formats."""
    return dtype == "U8" and name.endswith(".scales")


def weight_of(scales: str) -> str:
    return f"{scales.removesuffix('.scales')}.weight"


def finite(
    values: np.ndarray, dtype: str, shape: Sequence[int], weight: Sequence[int] | None = None
) -> bool:
    """Of the bits of a tensor, or of some of it: unsigned integers. `weight`: for scales (E8M0, or
    E4M3 in nvfp4, which has 16 codes of 4 bits a group), the shape of the packed matrix."""
    if weight is not None:
        nvfp4 = 8 * weight[-1] == 16 * shape[-1]
        return not np.any((values & 127) == 127 if nvfp4 else values == 255)
    mask = _EXPONENT.get(dtype)
    if mask is None:
        return True
    blocks = (values[i : i + _BLOCK] for i in range(0, values.size, _BLOCK))
    return not any(np.any((block & mask) == mask) for block in blocks)


def raw(arrays: Mapping[str, mx.array]) -> dict[str, np.ndarray]:
    """The values as unsigned integers of their size, [elements], sharing the memory."""
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    views = {
        name: mx.contiguous(array).reshape(-1).view(kinds[array.dtype.size])
        for name, array in arrays.items()
    }
    mx.eval(views)
    return {name: np.array(view, copy=False) for name, view in views.items()}


def _dtype(array: mx.array) -> str:
    return dtype_name(array.dtype)
