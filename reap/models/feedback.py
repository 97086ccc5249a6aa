"""Affine quantization that lets later columns make up for the rounding of earlier ones.

Lowers Σ (w - v) H (w - v)ᵀ over the rows w of a weight and what v is stored of them, H being
E[x xᵀ] of the inputs x, hence the expected squared error of the outputs. Columns are rounded one
after another, those that matter most first, and what a column's rounding adds to the error is taken
off in the columns that remain (GPTQ, arXiv 2210.17323). Then every group's scale and bias are
fitted anew to the codes, in the same metric. Starts from `search_affine`, and a row for which
nothing better was found stays as that left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from reap.artifacts import Format
from reap.errors import ReapError
from reap.models.arrays import Mlx, operations, packed
from reap.models.lowbit import search_affine
from reap.models.quantize import Quantizer

# Added to H's diagonal, as a share of its mean: text that was not seen may differ.
_DAMPING = 0.05

# Rows in float32 at once, in elements; columns whose rounding is passed on together.
_CPU_CHUNK = 1 << 22
_GPU_CHUNK = 1 << 28
_BLOCK = 32

# A row must get better by more than float32 sums can be wrong.
_MARGIN = 1 - 1e-4


def feedback(covariance: np.ndarray, *, passes: int = 2) -> Quantizer:
    """The quantizer for weights whose inputs have E[x xᵀ] = covariance [columns, columns].

    `passes`: how often the columns are rounded, each time with the scales and biases of the last.
    Raises ReapError for a covariance that is not finite or does not fit the weight.
    """
    h, order, factor = _prepared(covariance)

    def quantize(weight: mx.array, format: Format) -> dict[str, mx.array]:
        columns = weight.shape[-1]
        if columns != len(h):
            raise ReapError(f"a covariance of {len(h)} inputs for {columns} columns.")
        start = search_affine(weight, format, importance=np.diag(h))
        parts = [
            _stored(
                _Rows(ops, w, scales, biases, xp_h, dtype=weight.dtype, format=format),
                order,
                xp_factor,
                passes,
            )
            for ops, w, scales, biases, xp_h, xp_factor in _chunks(weight, start, h, factor)
        ]
        dtypes = {"weight": mx.uint32, "scales": weight.dtype, "biases": weight.dtype}
        return {
            name: mx.concatenate([part[i] for part in parts])
            .astype(dtype)
            .reshape(*weight.shape[:-1], -1)
            for i, (name, dtype) in enumerate(dtypes.items())
        }

    return quantize


def _prepared(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """H damped with mean diagonal 1, its columns by falling diagonal, and the upper triangular U
    with UᵀU = H⁻¹ in that order."""
    h = np.asarray(covariance, np.float64)
    if h.ndim != 2 or h.shape[0] != h.shape[1] or not np.isfinite(h).all():
        raise ReapError("a covariance must be a square matrix of finite numbers.")
    mean = np.trace(h) / len(h)
    h = (h + h.T) / 2 / (mean if mean > 0 else 1.0)
    h[np.diag_indices_from(h)] += _DAMPING
    order = np.argsort(-np.diag(h), kind="stable")
    factor = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T
    return h.astype(np.float32), order, np.ascontiguousarray(factor, np.float32)


def _chunks(
    weight: mx.array, start: dict[str, mx.array], h: np.ndarray, factor: np.ndarray
) -> Iterator[tuple[Any, ...]]:
    """Rows with their first scales and biases, in the arrays of whatever computes here."""
    ops = operations()
    columns = weight.shape[-1]
    size = max(1, (_GPU_CHUNK if ops is Mlx else _CPU_CHUNK) // columns)
    flat = [a.reshape(-1, a.shape[-1]) for a in (weight, start["scales"], start["biases"])]
    shared = [ops.array(a) for a in (h, factor)]
    for first in range(0, flat[0].shape[0], size):
        rows = [ops.array(a[first : first + size].astype(mx.float32)) for a in flat]
        yield (ops, *rows, *shared)


class _Rows:
    """Rows w [rows, columns] with their scales and biases [rows, groups]."""

    def __init__(
        self, ops: Any, w: Any, scales: Any, biases: Any, h: Any, *, dtype: Any, format: Format
    ) -> None:
        self.ops, self.w, self.h, self.format = ops, w, h, format
        self.scales, self.biases = scales, biases
        self.dtype = str(dtype).removeprefix("mlx.core.")
        self.top = 2**format.bits - 1
        self.codes = self._nearest()

    def _spread(self, per_group: Any) -> Any:
        return self.ops.xp.repeat(per_group, self.format.group_size, axis=1)

    def _nearest(self) -> Any:
        scales, biases = self._spread(self.scales), self._spread(self.biases)
        return _nearest(self.ops.xp, self.w, scales, biases, self.top)

    def rest(self) -> Any:
        """What the stored weights lack."""
        return self.w - (self.codes * self._spread(self.scales) + self._spread(self.biases))

    def error(self) -> Any:
        """(w - v) H (w - v)ᵀ of each row."""
        rest = self.rest()
        return self.ops.dot(rest @ self.h, rest)

    def round_columns(self, order: np.ndarray, factor: Any) -> None:
        """New codes, one column after another; `factor` is U of `_prepared`."""
        xp, ops, group = self.ops.xp, self.ops, self.format.group_size
        where = ops.array(order)
        # Transposed, so that a column is contiguous.
        left = ops.contiguous(self.w[:, where].T)
        scales, biases = ops.contiguous(self.scales.T), ops.contiguous(self.biases.T)
        groups = (order // group).tolist()
        found = []
        for first in range(0, len(order), _BLOCK):
            last = min(first + _BLOCK, len(order))
            block, errors = left[: last - first], []
            for j in range(first, last):
                scale, bias = scales[groups[j]], biases[groups[j]]
                code = _nearest(xp, block[0], scale, bias, self.top)
                error = (block[0] - (code * scale + bias)) / factor[j, j]
                block = block[1:] - factor[j, j + 1 : last][:, None] * error[None]
                found.append(code)
                errors.append(error)
            left = left[last - first :]
            if last < len(order):
                left = left - factor[first:last, last:].T @ xp.stack(errors)
            ops.evaluate(left, found)
        codes = xp.stack(found)
        self.codes = ops.contiguous(codes[ops.array(np.argsort(order))].T)

    def fit(self) -> None:
        """Least squares for scale and bias of one group after another, as they are stored."""
        xp, ops, size = self.ops.xp, self.ops, self.format.group_size
        lacking = self.rest() @ self.h
        scales, biases = [], []
        for group in range(self.scales.shape[1]):
            part = slice(group * size, (group + 1) * size)
            q, h = self.codes[:, part], self.h[part, part]
            qh, ones = q @ h, h.sum(axis=0)
            qq, q1, one = ops.dot(qh, q), qh.sum(axis=1), ones.sum()
            to_q, to_1 = ops.dot(lacking[:, part], q), lacking[:, part].sum(axis=1)
            determinant = qq * one - q1 * q1
            usable = determinant > 1e-5 * qq * one
            more = xp.where(
                usable, (to_q * one - to_1 * q1) / xp.where(usable, determinant, 1.0), 0.0
            )
            old_scale, old_bias = self.scales[:, group], self.biases[:, group]
            scale = ops.stored(old_scale + more, self.dtype)
            more = scale - old_scale
            bias = ops.stored(old_bias + (to_1 - more * q1) / one, self.dtype)
            change = q * more[:, None] + (bias - old_bias)[:, None]
            lacking = lacking - change @ self.h[part]
            scales.append(scale)
            biases.append(bias)
        self.scales, self.biases = xp.stack(scales, axis=1), xp.stack(biases, axis=1)
        ops.evaluate(self.scales, self.biases)

    def solution(self) -> tuple[Any, Any, Any]:
        return self.codes, self.scales, self.biases


def _nearest(xp: Any, w: Any, scale: Any, bias: Any, top: int) -> Any:
    """Codes, float32 whole numbers from 0 to `top`."""
    usable = scale != 0
    return xp.clip(xp.round((w - bias) * (usable / xp.where(usable, scale, 1.0))), 0, top)


def _stored(rows: _Rows, order: np.ndarray, factor: Any, passes: int) -> tuple[mx.array, ...]:
    """Packed codes, scales and biases of the best solution for each row."""
    ops = rows.ops
    best, least = rows.solution(), rows.error()
    for _ in range(passes):
        rows.round_columns(order, factor)
        rows.fit()
        error = rows.error()
        better = error < _MARGIN * least
        least = ops.xp.where(better, error, least)
        best = tuple(
            ops.xp.where(better[:, None], new, old) for new, old in zip(rows.solution(), best)
        )
    codes, scales, biases = best
    made = packed(ops, codes, rows.format.bits), scales, biases
    return tuple(mx.array(array) for array in made)
