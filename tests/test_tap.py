"""The tap sees the coefficients that a block multiplies by, or refuses the block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from reap.errors import CalibrationError
from reap.models.source import SourceModel, open_source
from reap.models.tap import ExpertTap

Combine = Callable[[Any, mx.array], mx.array]


class Block(nn.Module):
    """A router, 4 experts of which each token gets 2, and some way to combine them."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.switch_mlp = SwitchGLU(8, 8, 4)
        self.combine = combine

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.sigmoid(self.gate(x))
        indices = mx.argpartition(-scores, kth=1, axis=-1)[..., :2]
        weights = mx.take_along_axis(scores, indices, axis=-1)
        return self.combine(self.switch_mlp(x, indices), weights)


def observed(combine: Combine) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """A block's output under a tap, and what the tap saw."""
    mx.random.seed(0)
    block, seen = Block(combine), []
    with ExpertTap(5, lambda *arrays: seen.append(arrays)).on(block.switch_mlp):
        y = block(mx.random.normal((2, 3, 8)))
    assert type(block.switch_mlp) is SwitchGLU
    return y, seen


def test_what_the_block_multiplies_by_is_seen() -> None:
    y, [(x, indices, weights, outputs)] = observed(lambda y, w: (y * w[..., None]).sum(axis=-2))
    assert (x.shape, indices.shape, weights.shape) == ((2, 3, 8), (2, 3, 2), (2, 3, 2))
    assert outputs.shape == (2, 3, 2, 8)
    assert mx.array_equal(y, (outputs * weights[..., None]).sum(axis=-2))


def test_a_coefficient_that_is_not_what_the_router_returned_is_seen_as_it_is() -> None:
    _, [(_, _, plain, _)] = observed(lambda y, w: (y * w[..., None]).sum(axis=-2))
    _, [(_, _, scaled, _)] = observed(lambda y, w: (y * (3 * w[..., None] - 1)).sum(axis=-2))
    assert mx.allclose(scaled, 3 * plain - 1)


UNSEEN: dict[str, Combine] = {
    "never used": lambda y, w: w.sum(axis=-1),
    "summed": lambda y, w: y.sum(axis=-2),
    "summed by MLX": lambda y, w: mx.sum(y, axis=-2),
    "matrix product": lambda y, w: (w[..., None, :] @ y).squeeze(-2),
    "matrix product from the left": lambda y, w: y @ w,
    "einsum": lambda y, w: mx.einsum("btkd,btk->btd", y, w),
    "weights on the left": lambda y, w: (w[..., None] * y).sum(axis=-2),
    "multiplied by MLX": lambda y, w: mx.multiply(y, w[..., None]),
    "a number": lambda y, w: y * 0.5,
    "a scalar": lambda y, w: y * mx.array(0.5),
    "one weight per channel": lambda y, w: y * mx.ones(y.shape),
    "one weight per token": lambda y, w: y * w.sum(axis=-1)[..., None, None],
    "indexed": lambda y, w: y[..., 0, :],
    "added": lambda y, w: y + 1,
    "compared": lambda y, w: mx.array(y == w),
    "reshaped": lambda y, w: y.reshape(6, 2, 8),
    "weighted twice": lambda y, w: y * w[..., None] + y * w[..., None],
}


@pytest.mark.parametrize("how", UNSEEN)
def test_a_block_that_does_not_show_its_weights_is_refused(how: str) -> None:
    with pytest.raises(CalibrationError, match="router's weights in layer 5 cannot be observed"):
        observed(UNSEEN[how])


def test_an_error_of_the_block_itself_is_not_disguised() -> None:
    def fails(y: Any, w: mx.array) -> mx.array:
        combined = (y * w[..., None]).sum(axis=-2)
        return combined.reshape(1_000_003)

    with pytest.raises(ValueError, match="1000003"):
        observed(fails)


def test_replaced_outputs_go_on_and_the_real_ones_are_observed() -> None:
    mx.random.seed(0)
    block, seen = Block(lambda y, w: (y * w[..., None]).sum(axis=-2)), []
    x = mx.random.normal((2, 3, 8))
    plain = block(x)

    def observe(x: mx.array, indices: mx.array, weights: mx.array, outputs: mx.array) -> None:
        seen.append((outputs * weights[..., None]).sum(axis=-2))

    tap = ExpertTap(0, observe, replace=lambda x, indices: mx.ones((2, 3, 2, 8)))
    with tap.on(block.switch_mlp):
        replaced = block(x)
    assert mx.array_equal(seen[0], plain)
    assert mx.allclose(replaced, replaced[..., :1])
    assert not mx.allclose(replaced, plain)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceModel]:
    at = tmp_path_factory.mktemp("checkpoints")
    paths: dict[str, Path] = {
        "kimi_k3": models.embedded_model(),
        "qwen3_moe": models.write_qwen3_moe(at / "q"),
        "qwen3_moe unnormalised": models.write_qwen3_moe(at / "u", norm_topk_prob=False),
        "deepseek_v3": models.write_deepseek_v3(at / "d"),
        "deepseek_v3 groups": models.write_deepseek_v3(at / "g", n_group=4, topk_group=2),
        "glm4_moe": models.write_glm4_moe(at / "glm"),
    }
    return {name: open_source(str(path)) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("family", "total"),
    [
        ("kimi_k3", 2.5),
        ("qwen3_moe", 1.0),
        ("qwen3_moe unnormalised", None),
        ("deepseek_v3", 2.5),
        ("deepseek_v3 groups", 2.5),
        ("glm4_moe", 1.5),
    ],
)
def test_the_tap_changes_nothing_and_the_bias_is_not_in_the_weights(
    sources: dict[str, SourceModel], family: str, total: float | None
) -> None:
    """reap-mlx #93: a selection bias that leaks makes gates negative or larger than they can be."""
    source, index = sources[family], 2
    source.load_layer(index)
    block, experts = source.block(index), source.experts(index)
    for name in source.family.router:
        if name.endswith("bias"):
            owner = block if family == "kimi_k3" else block.gate
            owner.e_score_correction_bias = owner.e_score_correction_bias - 3.0
    hidden = source.layers[index].input_layernorm.weight.size
    x = mx.array(np.random.default_rng(0).standard_normal((2, 50, hidden)).astype(np.float32))
    seen: list[mx.array] = []
    plain = block(x)
    with ExpertTap(index, lambda x, indices, weights, outputs: seen.append(weights)).on(experts):
        tapped = block(x)
    assert mx.array_equal(tapped, plain)
    [weights] = seen
    assert weights.min() > 0
    sums = np.array(weights.sum(axis=-1))
    if total is None:
        assert sums.max() < 1
    else:
        np.testing.assert_allclose(sums, total, rtol=1e-5)
