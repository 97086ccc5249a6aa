"""Array code that runs in NumPy on a CPU and in MLX on a GPU.

MLX's CPU kernels for such chains of small operations are several times slower than NumPy's.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def operations() -> Any:
    """`NumPy` or `Mlx`, whichever is faster on MLX's default device."""
    return Mlx if mx.default_device() == mx.Device(mx.gpu) else NumPy


class NumPy:
    """What NumPy and MLX spell differently."""

    xp = np
    contiguous = staticmethod(np.ascontiguousarray)
    array = staticmethod(np.array)

    @staticmethod
    def evaluate(*arrays: Any) -> None:
        """NumPy has its results already."""

    @staticmethod
    def codes(w: np.ndarray, factor: np.ndarray, shift: np.ndarray, top: int) -> np.ndarray:
        q = w * factor[..., None]
        q += shift[..., None]
        np.rint(q, out=q)
        return np.clip(q, 0, top, out=q)

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.vecdot(a, b)

    @staticmethod
    def total(a: np.ndarray) -> np.ndarray:
        return a.reshape(-1, a.shape[-1]).dot(np.ones(a.shape[-1], a.dtype)).reshape(a.shape[:-1])

    @staticmethod
    def stored(x: np.ndarray, dtype: str) -> np.ndarray:
        """Float32 values rounded to what the checkpoint stores."""
        if dtype == "float16":
            return x.astype(np.float16).astype(np.float32)
        if dtype != "bfloat16":
            return x
        bits = np.ascontiguousarray(x).view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (np.uint32(0x7FFF) + even)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)


class Mlx:
    """See `NumPy`."""

    xp = mx
    contiguous = staticmethod(mx.contiguous)
    array = staticmethod(mx.array)
    evaluate = staticmethod(mx.eval)

    @staticmethod
    def codes(w: mx.array, factor: mx.array, shift: mx.array, top: int) -> mx.array:
        return mx.clip(mx.round(w * factor[..., None] + shift[..., None]), 0, top)

    @staticmethod
    def dot(a: mx.array, b: mx.array) -> mx.array:
        return (a * b).sum(axis=-1)

    @staticmethod
    def total(a: mx.array) -> mx.array:
        return a.sum(axis=-1)

    @staticmethod
    def stored(x: mx.array, dtype: str) -> mx.array:
        return x.astype(getattr(mx, dtype)).astype(mx.float32)


def packed(ops: Any, codes: Any, bits: int) -> Any:
    """Codes [rows, columns], float32 whole numbers, as MLX's words: one stream of bits per row,
    the first value in the lowest bits; at 3, 5 and 6 bits values cross the words' borders."""
    xp, rows = ops.xp, codes.shape[0]
    if bits == 8:
        return codes.astype(xp.uint8).view(xp.uint32)
    # Sums of four codes are below 2^24, hence exact in float32.
    powers = xp.array([2.0 ** (bits * i) for i in range(4)], dtype=xp.float32)
    fours = (codes.reshape(-1, 4) @ powers).astype(xp.uint64).reshape(-1, 2)
    eights = fours[:, 0] | (fours[:, 1] << xp.array(4 * bits, dtype=xp.uint64))
    octets = ops.contiguous(eights).view(xp.uint8).reshape(-1, 8)[:, :bits]
    return ops.contiguous(octets.reshape(rows, -1)).view(xp.uint32)
