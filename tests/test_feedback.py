"""Rounding with error feedback: MLX's layout, never worse than the search, and much better where
inputs are correlated."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from reap.artifacts import Format
from reap.errors import ReapError
from reap.models import feedback as module
from reap.models.arrays import Mlx
from reap.models.feedback import feedback
from reap.models.lowbit import search_affine
from reap.models.quantize import quantized

FORMATS = [Format(bits, group, "affine") for bits in (2, 3, 4) for group in (32, 64)]


def weights(*shape: int) -> mx.array:
    values = np.random.default_rng(0).standard_t(5, shape) * 0.03
    return mx.array(values, dtype=mx.float32).astype(mx.bfloat16)


def covariance(columns: int) -> np.ndarray:
    """Of inputs that mostly lie in a quarter of the directions and have strong channels."""
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal((1000, columns // 4)) @ rng.standard_normal((columns // 4, columns))
    x = (mixed + rng.standard_normal(mixed.shape)) * rng.lognormal(0, 1, columns)
    return x.T @ x / len(x)


def row_errors(
    weight: mx.array, arrays: dict[str, mx.array], format: Format, h: np.ndarray
) -> np.ndarray:
    """(w - v) H (w - v)ᵀ in float64, with the scales and biases as they are stored."""
    stored = mx.dequantize(
        arrays["weight"],
        arrays["scales"].astype(mx.float32),
        arrays["biases"].astype(mx.float32),
        group_size=format.group_size,
        bits=format.bits,
    )
    rest = np.array(weight.astype(mx.float32), np.float64) - np.array(stored, np.float64)
    return np.einsum("...i,ij,...j->...", rest, h, rest)


def damped(h: np.ndarray) -> np.ndarray:
    return h + module._DAMPING * np.trace(h) / len(h) * np.eye(len(h))


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.label)
def test_no_row_is_worse_than_searched_and_the_sum_is_far_better(format):
    weight, h = weights(3, 20, 192), covariance(192)
    found, plain = feedback(h)(weight, format), quantized(weight, format)
    for name, array in plain.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    start = search_affine(weight, format, importance=np.diag(damped(h)))
    searched = row_errors(weight, start, format, damped(h))
    ours = row_errors(weight, found, format, damped(h))
    assert (ours <= searched * (1 + 1e-4)).all()
    assert ours.sum() < 0.7 * searched.sum()


def test_inputs_that_do_not_correlate_leave_little_to_gain_and_lose_nothing():
    weight, format, h = weights(40, 128), Format(2, 64, "affine"), np.eye(128)
    found = row_errors(weight, feedback(h)(weight, format), format, h).sum()
    searched = row_errors(weight, search_affine(weight, format), format, h).sum()
    assert 0.98 * searched < found <= searched * (1 + 1e-4)


def test_inputs_that_were_never_seen_are_no_reason_to_fail():
    weight, format = weights(4, 128), Format(3, 64, "affine")
    found = feedback(np.zeros((128, 128)))(weight, format)
    error = row_errors(weight, found, format, np.eye(128)).sum()
    searched = row_errors(weight, search_affine(weight, format), format, np.eye(128)).sum()
    assert error <= searched * (1 + 1e-3)


def test_blocks_and_chunks_change_nothing_but_the_order_of_sums(monkeypatch):
    weight, format, h = weights(2, 16, 192), Format(2, 64, "affine"), covariance(192)
    whole = feedback(h)(weight, format)
    again = feedback(h)(weight, format)
    assert all(mx.array_equal(array, again[name]) for name, array in whole.items())
    monkeypatch.setattr(module, "_BLOCK", 5)
    monkeypatch.setattr(module, "_CPU_CHUNK", 192 * 7)
    parts = feedback(h)(weight, format)
    errors = [row_errors(weight, arrays, format, h).sum() for arrays in (whole, parts)]
    assert np.isclose(*errors, rtol=0.02)


def test_the_way_of_the_gpu_finds_equally_good_solutions(monkeypatch):
    weight, format, h = weights(2, 16, 192), Format(2, 64, "affine"), covariance(192)
    on_cpu = feedback(h)(weight, format)
    monkeypatch.setattr(module, "operations", lambda: Mlx)
    on_gpu = feedback(h)(weight, format)
    errors = [row_errors(weight, arrays, format, h).sum() for arrays in (on_cpu, on_gpu)]
    assert np.isclose(*errors, rtol=0.02)


def test_a_covariance_that_does_not_fit_is_refused():
    with pytest.raises(ReapError, match="square"):
        feedback(np.ones((4, 5)))
    with pytest.raises(ReapError, match="finite"):
        feedback(np.full((4, 4), np.nan))
    with pytest.raises(ReapError, match="64 inputs for 128 columns"):
        feedback(np.eye(64))(weights(2, 128), Format(2, 64, "affine"))


def test_rows_for_which_nothing_better_was_found_stay_as_searched(monkeypatch):
    def spoiled(rows: module._Rows) -> None:
        rows.scales = rows.scales * 3

    monkeypatch.setattr(module._Rows, "fit", spoiled)
    weight, format, h = weights(20, 128), Format(2, 64, "affine"), covariance(128)
    found = feedback(h)(weight, format)
    start = search_affine(weight, format, importance=np.diag(damped(h)))
    assert all(mx.array_equal(array, found[name]) for name, array in start.items())
