"""The low-bit search: MLX's layout, never worse than mx.quantize, deterministic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from reap.artifacts import Format
from reap.errors import ReapError
from reap.models import lowbit
from reap.models.arrays import Mlx, NumPy, packed
from reap.models.lowbit import quantizer, search_affine
from reap.models.quantize import quantized

FORMATS = [Format(bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


def weights(*shape: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    """Heavy-tailed, as trained weights are."""
    values = np.random.default_rng(seed).standard_t(5, shape)
    return mx.array(values * 0.03, dtype=mx.float32).astype(dtype)


def importance(columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 1.5, columns)


def codes(arrays: dict[str, mx.array], format: Format) -> np.ndarray:
    """The codes, read by MLX: float32 scales 1 and biases 0 leave them as they are."""
    shape = arrays["scales"].shape
    ones, zeros = mx.ones(shape), mx.zeros(shape)
    read = mx.dequantize(
        arrays["weight"], ones, zeros, group_size=format.group_size, bits=format.bits
    )
    return np.array(read, np.float64)


def group_errors(
    weight: mx.array, arrays: dict[str, mx.array], format: Format, h: np.ndarray
) -> np.ndarray:
    """Σ h (w - s q - b)² of every group, in float64."""
    size = format.group_size

    def grouped(array: np.ndarray) -> np.ndarray:
        return array.reshape(*array.shape[:-1], -1, size)

    scales, biases = (
        np.array(arrays[n].astype(mx.float32), np.float64) for n in ("scales", "biases")
    )
    w = grouped(np.array(weight.astype(mx.float32), np.float64))
    stored = grouped(codes(arrays, format)) * scales[..., None] + biases[..., None]
    return (h.reshape(-1, size) * (w - stored) ** 2).sum(axis=-1)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.label)
def test_arrays_are_laid_out_as_mlx_lays_them_out(format):
    weight = weights(3, 8, 256)
    plain, found = quantized(weight, format), search_affine(weight, format)
    for name, array in plain.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.label)
def test_packing_is_bit_for_bit_that_of_mlx(format):
    plain = quantized(weights(5, 256), format)
    words = packed(NumPy, codes(plain, format).astype(np.float32), format.bits)
    assert words.dtype == np.uint32
    assert np.array_equal(words, np.array(plain["weight"]))
    on_mlx = packed(Mlx, mx.array(codes(plain, format), dtype=mx.float32), format.bits)
    assert np.array_equal(np.array(on_mlx), words)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_group_is_worse_than_with_mx_quantize(bits, dtype):
    format = Format(bits, 64, "affine")
    weight, h = weights(2, 40, 256, dtype=dtype), importance(256)
    floored = np.maximum(h / h.mean(), lowbit._LEAST_IMPORTANCE)
    for given, used in ((None, np.ones(256)), (h, floored)):
        found = group_errors(weight, search_affine(weight, format, importance=given), format, used)
        plain = group_errors(weight, quantized(weight, format), format, used)
        assert (found <= plain * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("bits", "group", "share"), [(2, 64, 0.65), (2, 128, 0.6), (3, 64, 0.78), (3, 128, 0.73)]
)
def test_error_falls_by_a_third_on_heavy_tails(bits, group, share):
    format = Format(bits, group, "affine")
    weight, h = weights(64, 512), importance(512)
    for given, used in ((None, np.ones(512)), (h, h)):
        found = group_errors(weight, search_affine(weight, format, importance=given), format, used)
        plain = group_errors(weight, quantized(weight, format), format, used)
        assert found.sum() < share * plain.sum()


def test_importance_lowers_the_weighted_error_further():
    format, weight, h = Format(2, 128, "affine"), weights(64, 512), importance(512)
    alike = group_errors(weight, search_affine(weight, format), format, h).sum()
    weighted = group_errors(weight, search_affine(weight, format, importance=h), format, h).sum()
    assert weighted < 0.9 * alike


def test_levels_that_fit_exactly_are_found():
    levels = np.array([-0.75, -0.25, 0.25, 0.75])
    picked = np.random.default_rng(0).integers(0, 4, (6, 128))
    weight = mx.array(levels[picked], dtype=mx.float32).astype(mx.bfloat16)
    format = Format(2, 64, "affine")
    found = search_affine(weight, format, importance=importance(128))
    assert group_errors(weight, found, format, np.ones(128)).max() == 0


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_groups_without_spread_stay_finite_and_exact(bits):
    format = Format(bits, 32, "affine")
    weight = mx.concatenate(
        [mx.zeros((2, 64)), mx.full((2, 64), 0.5), mx.full((2, 64), -3.0)]
    ).astype(mx.bfloat16)
    found = search_affine(weight, format, importance=np.zeros(64))
    assert all(np.isfinite(np.array(a.astype(mx.float32))).all() for a in found.values())
    assert group_errors(weight, found, format, np.ones(64)).max() == 0


def test_tiny_float16_weights_whose_scale_is_below_the_smallest_number():
    format, weight = Format(8, 32, "affine"), weights(4, 64, dtype=mx.float16) * 1e-6
    found = search_affine(weight, format)
    plain = group_errors(weight, quantized(weight, format), format, np.ones(64))
    assert (group_errors(weight, found, format, np.ones(64)) <= plain * (1 + 1e-6)).all()


def test_chunks_and_threads_do_not_change_the_result(monkeypatch):
    format, weight, h = Format(3, 64, "affine"), weights(7, 16, 256), importance(256)
    whole = search_affine(weight, format, importance=h)
    monkeypatch.setattr(lowbit, "_CPU_BLOCK", 256 * 10)
    monkeypatch.setattr(lowbit, "_CPU_CHUNK", 256 * 3)
    again = search_affine(weight, format, importance=h)
    for name, array in whole.items():
        assert mx.array_equal(array, again[name])


def test_the_way_of_the_gpu_finds_equally_good_solutions(monkeypatch):
    """On the CPU it runs without `mx.compile`, which needs a compiler there."""
    monkeypatch.setattr(mx, "compile", lambda call: call)
    format, weight, h = Format(2, 128, "affine"), weights(2, 16, 512), importance(512)
    on_cpu = search_affine(weight, format, importance=h)
    monkeypatch.setattr(lowbit, "_on_cpu", lowbit._on_gpu)
    on_gpu = search_affine(weight, format, importance=h)
    used = np.maximum(h / h.mean(), lowbit._LEAST_IMPORTANCE)
    ours = group_errors(weight, on_gpu, format, used)
    assert on_gpu["weight"].shape == on_cpu["weight"].shape
    # Other rounding of sums may lead to another local optimum now and then.
    assert np.isclose(ours.sum(), group_errors(weight, on_cpu, format, used).sum(), rtol=1e-3)


def test_a_matrix_multiplication_reads_the_result():
    format, weight = Format(3, 64, "affine"), weights(4, 32, 128)
    found = search_affine(weight, format)
    x = mx.random.normal((5, 1, 128), key=mx.random.key(0)).astype(mx.bfloat16)
    chosen = mx.array([0, 3, 1, 2, 3])
    arguments = (found["weight"], found["scales"], found["biases"])
    y = mx.gather_qmm(x, *arguments, rhs_indices=chosen, group_size=64, bits=3)
    dense = mx.dequantize(*arguments, group_size=64, bits=3).astype(mx.float32)
    expected = x.astype(mx.float32) @ dense[chosen].swapaxes(-1, -2)
    assert mx.allclose(y.astype(mx.float32), expected, atol=5e-2)


@pytest.mark.parametrize(
    ("h", "message"),
    [
        (np.ones(64), "shape"),
        (np.full(128, np.nan), "finite"),
        (np.full(128, -1.0), "negative"),
    ],
)
def test_importance_that_does_not_fit_is_refused(h, message):
    with pytest.raises(ReapError, match=message):
        search_affine(weights(2, 128), Format(2, 64, "affine"), importance=h)


def test_formats_that_do_not_fit_are_refused():
    with pytest.raises(ReapError, match="96 columns"):
        search_affine(weights(2, 96), Format(2, 64, "affine"))
    with pytest.raises(ReapError, match="mxfp4"):
        search_affine(weights(2, 64), Format(4, 32, "mxfp4"))


def test_rounding_chooses_the_quantizer():
    format, weight, h = Format(2, 64, "affine"), weights(8, 128), importance(128)
    for rounding, expected in (
        ("plain", quantized(weight, format)),
        ("search", search_affine(weight, format)),
        ("weighted", search_affine(weight, format, importance=h)),
    ):
        found = quantizer(rounding, h)(weight, format)
        assert all(mx.array_equal(found[name], array) for name, array in expected.items())
    mxfp4 = Format(4, 32, "mxfp4")
    assert mx.array_equal(
        quantizer("weighted", h)(weight, mxfp4)["weight"], quantized(weight, mxfp4)["weight"]
    )
    with pytest.raises(ReapError, match="rounding"):
        quantizer("nearest")
    with pytest.raises(ReapError, match="second moments"):
        quantizer("weighted")
