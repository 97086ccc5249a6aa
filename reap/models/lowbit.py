"""Affine quantization at few bits: scales and biases found by search instead of by min and max.

For every group w of a row, with importance h (the second moment of each input channel), the search
lowers Σ h (w - s q - b)² over the codes q, the scale s and the bias b: several ranges are tried,
each is followed by the least-squares fit of s and b to its codes, and the best is refitted. The
last codes are chosen for s and b as they are stored, in 16 bits. What min and max give is one of
the candidates, so no group is worse than with `mx.quantize`.

The arrays are laid out as `mx.quantize` lays them out; nothing else has to know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, get_args

import mlx.core as mx
import numpy as np

from reap.artifacts import Format
from reap.artifacts.plan import Rounding
from reap.errors import ReapError
from reap.models.arrays import Mlx, NumPy, operations, packed
from reap.models.quantize import Quantizer, quantized

ROUNDINGS: tuple[str, ...] = get_args(Rounding)

# Elements in float32 at once: 64 MB in all on the CPU, cut so that each thread stays in its cache.
_CPU_BLOCK = 1 << 24
_CPU_CHUNK = 1 << 17
_GPU_CHUNK = 1 << 25

# Smallest importance of a channel, as a share of the mean: text that was not seen may use it.
_LEAST_IMPORTANCE = 1e-2

# Half-ranges to try: shares of min and max, and multiples of the group's standard deviation.
_SHRINK = {2: (0.4, 1.0), 3: (0.5, 1.0), 4: (0.65, 1.0)}
_DEVIATIONS = {2: (1.1, 2.8), 3: (1.5, 3.4), 4: (1.9, 3.8)}
_WIDE_SHRINK = (0.85, 1.0)

# A searched group must beat the plain one by more than float32 sums can be wrong.
_MARGIN = 1 - 1e-5


NEEDS_MOMENTS = ("weighted", "feedback")
"""Roundings that need what calibration saw."""


def quantizer(
    rounding: str,
    importance: np.ndarray | None = None,
    covariance: Callable[[], np.ndarray] | None = None,
) -> Quantizer:
    """How a weight becomes MLX's arrays: "plain" as `mx.quantize`, "search" with every channel
    alike, "weighted" by `importance` [columns], "feedback" by the `covariance` [columns, columns]
    that is only computed then; formats other than affine are always plain."""
    if rounding not in ROUNDINGS:
        raise ReapError(f"unknown rounding {rounding!r}.", f"one of {', '.join(ROUNDINGS)}")
    if rounding == "weighted" and importance is None:
        raise ReapError(
            "weighted rounding needs the second moments of the experts' inputs.",
            "calibrate again, or use rounding 'search'",
        )

    if rounding == "feedback":
        # Imported here: feedback starts from the search.
        from reap.models.feedback import feedback

        if covariance is None:
            raise ReapError(
                "rounding with feedback needs the covariance of the experts' inputs.",
                "calibrate with low_rounding feedback",
            )
        rounded = feedback(covariance())

    def quantize(weight: mx.array, format: Format) -> dict[str, mx.array]:
        if rounding == "plain" or format.mode != "affine":
            return quantized(weight, format)
        if rounding == "feedback":
            return rounded(weight, format)
        used = importance if rounding == "weighted" else None
        return search_affine(weight, format, importance=used)

    return quantize


def search_affine(
    weight: mx.array,
    format: Format,
    *,
    importance: np.ndarray | None = None,
    steps: int = 5,
    refits: int = 2,
) -> dict[str, mx.array]:
    """`weight` [..., rows, columns] as MLX's arrays for an affine `format`.

    importance: E[x²] of each input channel, [columns]; None if all count alike. `steps`: ranges
    to try of either kind; `refits`: least-squares fits after the best. Deterministic. Raises
    ReapError for a format or an importance that does not fit.
    """
    columns, group = weight.shape[-1], format.group_size
    if format.mode != "affine" or columns % group:
        raise ReapError(f"a matrix of {columns} columns cannot be stored as {format.label}.")
    h = _importance(importance, columns)
    h = None if h is None else h.reshape(-1, group)
    search = _Search(format.bits, steps, refits, str(weight.dtype).removeprefix("mlx.core."))
    rows = weight.reshape(-1, columns)
    parts = list((_on_gpu if operations() is Mlx else _on_cpu)(rows, h, group, search))
    found = {name: mx.concatenate([p[i] for p in parts]) for i, name in enumerate(_NAMES)}
    dtypes = {"weight": mx.uint32, "scales": weight.dtype, "biases": weight.dtype}
    return {
        name: array.astype(dtypes[name]).reshape(*weight.shape[:-1], -1)
        for name, array in found.items()
    }


_NAMES = ("weight", "scales", "biases")


def _importance(importance: np.ndarray | None, columns: int) -> np.ndarray | None:
    """Float32 with mean 1 and no channel near 0; None if nothing tells the channels apart."""
    if importance is None:
        return None
    given = np.asarray(importance, np.float64)
    if given.shape != (columns,):
        raise ReapError(f"importance has shape {given.shape} for {columns} columns.")
    if not np.isfinite(given).all() or (given < 0).any():
        raise ReapError("importance must be finite and not negative.")
    mean = given.mean()
    if mean == 0:
        return None
    return np.maximum(given / mean, _LEAST_IMPORTANCE).astype(np.float32)


class _Search(NamedTuple):
    bits: int
    steps: int
    refits: int
    dtype: str


Part = tuple[mx.array, mx.array, mx.array]


def _on_cpu(rows: mx.array, h: np.ndarray | None, group: int, search: _Search) -> Iterator[Part]:
    columns = rows.shape[1]
    block = max(1, _CPU_BLOCK // columns)
    chunk = max(1, _CPU_CHUNK // columns)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, rows.shape[0], block):
            # MLX is only called from this thread.
            w = np.array(rows[start : start + block].astype(mx.float32))
            w = w.reshape(len(w), -1, group)
            found = pool.map(
                lambda first, w=w: _searched(NumPy, w[first : first + chunk], h, search),
                range(0, len(w), chunk),
            )
            words, scales, biases = (np.concatenate(arrays) for arrays in zip(*found))
            yield mx.array(words), mx.array(scales), mx.array(biases)


def _on_gpu(rows: mx.array, h: np.ndarray | None, group: int, search: _Search) -> Iterator[Part]:
    chunk = max(1, _GPU_CHUNK // rows.shape[1])
    weights = None if h is None else mx.array(h)
    searched = mx.compile(lambda w: _searched(Mlx, w, weights, search))
    for start in range(0, rows.shape[0], chunk):
        w = rows[start : start + chunk].astype(mx.float32)
        part = searched(w.reshape(w.shape[0], -1, group))
        mx.eval(part)
        yield part


def _searched(ops: Any, w: Any, h: Any, search: _Search) -> Any:
    """Packed codes [rows, words], scales and biases [rows, groups] of w [rows, groups, group].

    h: importance [groups, group] or None. Scales and biases are float32 holding stored values.
    """
    xp, top = ops.xp, 2**search.bits - 1
    fit = _Fit(ops, w, h, top)
    scale, bias, error = fit.refitted(*fit.starts[0])
    for start in _starts(ops, fit, search):
        scale, bias, error = fit.better(scale, bias, error, *fit.refitted(*start))
    for _ in range(search.refits):
        scale, bias, error = fit.better(scale, bias, error, *fit.refitted(scale, bias))
    scale = ops.stored(scale, search.dtype)
    bias = ops.stored(fit.bias_for(scale, fit.codes(scale, bias)), search.dtype)
    codes = fit.codes(scale, bias)
    plain_scale, plain_bias = (ops.stored(x, search.dtype) for x in fit.starts[0])
    plain_codes = fit.codes(plain_scale, plain_bias)
    better = fit.error(scale, bias, codes) < _MARGIN * fit.error(
        plain_scale, plain_bias, plain_codes
    )
    codes = xp.where(better[..., None], codes, plain_codes)
    return (
        packed(ops, codes.reshape(codes.shape[0], -1), search.bits),
        xp.where(better, scale, plain_scale),
        xp.where(better, bias, plain_bias),
    )


def _starts(ops: Any, fit: _Fit, search: _Search) -> Iterator[tuple[Any, Any]]:
    """Scales and biases [rows, groups] whose codes are tried."""
    top = fit.top
    low, high = _SHRINK.get(search.bits, _WIDE_SHRINK)
    for share in np.linspace(low, high, search.steps).tolist():
        yield (fit.high - fit.low) * (share / top), fit.low * share
    if search.bits in _DEVIATIONS:
        low, high = _DEVIATIONS[search.bits]
        for times in np.linspace(low, high, search.steps).tolist():
            yield fit.deviation * (2 * times / top), fit.mean - fit.deviation * times


class _Fit:
    """Weighted sums of the groups w [rows, groups, group], and least squares with them."""

    def __init__(self, ops: Any, w: Any, h: Any, top: int) -> None:
        self.ops, self.w, self.h, self.top = ops, w, h, top
        xp = ops.xp
        hw = w if h is None else w * h
        self.hw = hw
        self.h_sum = float(w.shape[-1]) if h is None else ops.total(h[None])
        self.w_sum = ops.total(hw)
        self.mean = self.w_sum / self.h_sum
        self.spread = xp.maximum(ops.dot(hw, w) - self.w_sum * self.mean, 0)
        self.deviation = xp.sqrt(self.spread / self.h_sum)
        self.low, self.high = w.min(axis=-1), w.max(axis=-1)
        self.starts = [self._plain()]

    def _plain(self) -> tuple[Any, Any]:
        """Scale and bias as `mx.quantize` chooses them: an end of the range is met exactly."""
        xp = self.ops.xp
        width = xp.maximum((self.high - self.low) / self.top, 1e-7)
        negative = abs(self.low) > abs(self.high)
        scale = xp.where(negative, width, -width)
        edge = xp.where(negative, self.low, self.high)
        steps = xp.round(edge / scale)
        on_grid = steps != 0
        scale = xp.where(on_grid, edge / xp.where(on_grid, steps, 1), scale)
        return scale, xp.where(on_grid, edge, 0.0)

    def codes(self, scale: Any, bias: Any) -> Any:
        """The nearest codes, float32 whole numbers from 0 to `top`."""
        xp = self.ops.xp
        usable = scale != 0
        factor = usable / xp.where(usable, scale, 1.0)
        return self.ops.codes(self.w, factor, -bias * factor, self.top)

    def refitted(self, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
        """The codes for (scale, bias), then the best scale and bias for these codes, their error.

        Σh(w - sq - b)² = spread - covariance²/variance at the optimum.
        """
        xp, ops = self.ops.xp, self.ops
        q = self.codes(scale, bias)
        hq = q if self.h is None else q * self.h
        q_sum, square = ops.total(hq), ops.dot(hq, q)
        variance = square - q_sum * q_sum / self.h_sum
        covariance = ops.dot(self.hw, q) - q_sum * self.mean
        usable = variance > 1e-6 * square
        slope = xp.where(usable, covariance / xp.where(usable, variance, 1.0), 0.0)
        error = self.spread - slope * covariance
        return xp.where(usable, slope, scale), (self.w_sum - slope * q_sum) / self.h_sum, error

    def bias_for(self, scale: Any, q: Any) -> Any:
        """The best bias for codes and a scale that is fixed."""
        hq = q if self.h is None else q * self.h
        return (self.w_sum - scale * self.ops.total(hq)) / self.h_sum

    def better(self, scale: Any, bias: Any, error: Any, s: Any, b: Any, e: Any) -> Any:
        """The better of two solutions in every group."""
        xp = self.ops.xp
        lower = e < error
        return xp.where(lower, s, scale), xp.where(lower, b, bias), xp.where(lower, e, error)

    def error(self, scale: Any, bias: Any, q: Any) -> Any:
        """Σ h (w - s q - b)² itself."""
        rest = self.w - (q * scale[..., None] + bias[..., None])
        return self.ops.dot(rest if self.h is None else rest * self.h, rest)
