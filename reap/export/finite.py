"""Whether values are finite, by their bits: MLX and NumPy share the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from reap.errors import CheckpointError
from reap.models.checkpoint import dtype_name

# Bytes of a value, and the bits that are all set in what is NaN or infinite, by safetensors' names
# and those of the MX formats' codes.
_NOT_FINITE = {
    **{"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000)},
    **{"F64": (8, 0x7FF0000000000000), "E8M0": (1, 0xFF), "E4M3": (1, 0x7F)},
    **{"F8_E8M0": (1, 0xFF), "F8_E4M3": (1, 0x7F), "F8_E5M2": (1, 0x7C)},
}

_BLOCK = 2**19  # bytes whose temporaries stay in a processor's cache

Header = Mapping[str, tuple[str, Sequence[int]]]
"""Dtype, in safetensors' spelling, and shape of tensors by name."""


def check_finite(tensors: Mapping[str, mx.array], prefix: str = "") -> None:
    """Raise CheckpointError for a value, or a code of the MX formats, that is NaN or infinite."""
    header = {name: (dtype_name(a.dtype), a.shape) for name, a in tensors.items()}
    kinds = {name: kind for name in tensors if (kind := kind_of(name, header))}
    for name, values in raw({name: tensors[name] for name in kinds}).items():
        if not finite(values, kinds[name]):
            raise not_finite(f"{prefix}{name}")


def not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"{name} holds a value that is not finite.")


def kind_of(name: str, header: Header) -> str | None:
    """How a tensor's bits are to be read by `finite`; None if all that they can be is finite.

    Scales of the MX formats are E8M0, in nvfp4 E4M3, as are the matrices of mxfp8: groups of 32
    codes of 4 bits, of 16 and of 32 of 8 bits, which are 4, 2 and 8 words of the matrix a scale.
    """
    dtype, leaf = header[name][0], name.rpartition(".")[2]
    if dtype in _NOT_FINITE:
        return dtype
    path = name.removesuffix(leaf)
    codes, scales = header.get(f"{path}weight"), header.get(f"{path}scales")
    if not codes or not scales or (codes[0], scales[0]) != ("U32", "U8"):
        return None
    words = codes[1][-1] // scales[1][-1]
    kinds = {"weight": {8: "E4M3"}.get(words), "scales": "E4M3" if words == 2 else "E8M0"}
    return kinds.get(leaf)


def finite(values: np.ndarray, kind: str) -> bool:
    """Of the bits of a tensor, or of some of it: unsigned integers."""
    size, mask = _NOT_FINITE[kind]
    values, step = values.view(f"u{size}"), _BLOCK // size
    blocks = (values[i : i + step] for i in range(0, values.size, step))
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
