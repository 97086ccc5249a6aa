"""Layer by layer is the plain forward pass, bit for bit, and so are the variants of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import pytest
from mlx.utils import tree_flatten

from reap.artifacts import Format
from reap.calibrate.measure import restricted_router
from reap.data import embedded_model
from reap.errors import CalibrationError
from reap.models.hooks import hooked
from reap.models.quantize import requantized_experts
from reap.models.source import SourceModel, open_source
from reap.models.stream import LayerStream

FAMILIES = (
    "kimi_k3",
    "qwen3_moe",
    "qwen3_moe-bf16",
    "deepseek_v3",
    "deepseek_v3-groups",
    "glm4_moe",
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("checkpoints")
    return {
        "kimi_k3": embedded_model(),
        "qwen3_moe": models.write_qwen3_moe(at / "q", norm_topk_prob=False, mlp_only_layers=[1]),
        "qwen3_moe-bf16": models.write_qwen3_moe(at / "b", dtype=mx.bfloat16, tied=True),
        "deepseek_v3": models.write_deepseek_v3(at / "d"),
        "deepseek_v3-groups": models.write_deepseek_v3(at / "g", n_group=4, topk_group=2),
        "glm4_moe": models.write_glm4_moe(at / "glm"),
    }


def random_batches(*shapes: tuple[int, int]) -> list[mx.array]:
    generator = np.random.default_rng(1)
    return [mx.array(generator.integers(0, models.VOCABULARY, shape)) for shape in shapes]


def classes(source: SourceModel) -> list[type]:
    return [type(module) for _, module in source.model.named_modules()]


def loaded(path: Path) -> SourceModel:
    """Every layer resident."""
    source = open_source(str(path))
    source.load_trunk()
    for index in range(len(source.layers)):
        source.load_layer(index)
    return source


def stream_logits(source: SourceModel, batches: list[mx.array]) -> list[mx.array]:
    """With one layer resident at a time."""
    source.load_trunk()
    with LayerStream(source.model, source.layers, batches) as stream:
        for index, layer in enumerate(source.layers):
            source.load_layer(index)
            for batch in range(len(batches)):
                stream.step(batch)
            source.release_layer(index)
            assert all(array.size == 0 for _, array in tree_flatten(layer.parameters()))
        return [stream.finish(batch) for batch in range(len(batches))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_plain_forward(
    checkpoints: dict[str, Path], family: str
) -> None:
    batches = random_batches((3, 17), (1, 40), (2, 1))
    source = open_source(str(checkpoints[family]))
    source.spec()  # brings every module into the form that the files have
    before = classes(source)
    logits = stream_logits(source, batches)
    plain = models.load_plain(checkpoints[family])
    for batch, ours in zip(batches, logits, strict=True):
        assert mx.array_equal(ours, plain(batch))
    # And afterwards the model is as it was.
    assert classes(source) == before
    for index in range(len(source.layers)):
        source.load_layer(index)
    assert mx.array_equal(source.model(batches[0]), logits[0])


def test_a_layer_of_another_model_in_the_same_process_is_not_disturbed(
    checkpoints: dict[str, Path],
) -> None:
    """Two streams at once, as a comparison of two checkpoints needs."""
    batches = random_batches((2, 9))
    first, second = (open_source(str(checkpoints[name])) for name in ("qwen3_moe", "deepseek_v3"))
    for source in (first, second):
        source.load_trunk()
    with (
        LayerStream(first.model, first.layers, batches) as one,
        LayerStream(second.model, second.layers, batches) as other,
    ):
        for index in range(3):
            for source, stream in ((first, one), (second, other)):
                source.load_layer(index)
                stream.step(0)
        logits = [one.finish(0), other.finish(0)]
    for name, ours in zip(("qwen3_moe", "deepseek_v3"), logits, strict=True):
        assert mx.array_equal(ours, models.load_plain(checkpoints[name])(batches[0]))


def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """The whole of the layers is never resident (peak over the trunk, in layers)."""
    peaks = []
    for layers in (2, 8):
        path = models.write_qwen3_moe(tmp_path / str(layers), layers=layers, experts=16)
        source = open_source(str(path))
        source.load_trunk()
        mx.eval(source.trunk_weights())
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(stream_logits(source, random_batches((1, 4), (1, 4))))
        spec = source.spec()
        layer = spec.num_experts * spec.expert_bytes(spec.moe_layers[0])
        peaks.append((mx.get_peak_memory() - before) / layer)
        assert mx.get_active_memory() - before < layer
    assert peaks[1] < peaks[0] + 0.5
    assert peaks[1] < 4  # the experts apart, stacked, and the trunk


# Errors


def test_an_error_inside_a_layer_comes_out_and_leaves_no_hook(
    checkpoints: dict[str, Path],
) -> None:
    source = loaded(checkpoints["qwen3_moe"])
    before = classes(source)
    batches = random_batches((1, 5), (2, 5))

    def fails(original: Any, *args: Any) -> Any:
        raise ZeroDivisionError("in the middle of layer 2")

    with (
        pytest.raises(ZeroDivisionError, match="in the middle of layer 2"),
        LayerStream(source.model, source.layers, batches) as stream,
    ):
        for batch in (0, 1):
            stream.step(batch)
        stream.step(0)
        with hooked(source.block(2), fails):
            stream.step(0)
    assert classes(source) == before
    assert source.model(batches[0]).shape == (1, 5, models.VOCABULARY)


def test_an_error_before_the_first_layer_leaves_no_hook(checkpoints: dict[str, Path]) -> None:
    source = loaded(checkpoints["qwen3_moe"])
    before = classes(source)

    def fails(original: Any, *args: Any) -> Any:
        raise ZeroDivisionError

    with (
        hooked(source.model.model.embed_tokens, fails),
        pytest.raises(ZeroDivisionError),
        LayerStream(source.model, source.layers, random_batches((1, 5))),
    ):
        pass
    assert classes(source) == before


def test_a_stream_left_in_the_middle_leaves_no_hook(checkpoints: dict[str, Path]) -> None:
    source = loaded(checkpoints["kimi_k3"])
    before = classes(source)
    with LayerStream(source.model, source.layers, random_batches((1, 5), (1, 3))) as stream:
        stream.step(0)
    assert classes(source) == before


def test_hooks_nest_and_keep_the_parameter_names(checkpoints: dict[str, Path]) -> None:
    source = loaded(checkpoints["qwen3_moe"])
    block, x = source.block(0), mx.ones((1, 1, models.HIDDEN))
    names, plain = sorted(dict(tree_flatten(block.parameters()))), block(x)
    with hooked(block, lambda original, x: original(x) + 1):
        with hooked(block, lambda original, x: original(x) * 2):
            assert mx.array_equal(block(x), (plain + 1) * 2)
            assert sorted(dict(tree_flatten(block.parameters()))) == names
        assert mx.array_equal(block(x), plain + 1)
    assert mx.array_equal(block(x), plain)


# Variants of one layer

Change = Callable[[SourceModel, int], AbstractContextManager[None]]


def fewer(source: SourceModel, index: int) -> AbstractContextManager[None]:
    """Half of the experts, of each group of the router."""
    groups, _ = source.groups()
    size = source.num_experts // groups
    kept = [group * size + slot for group in range(groups) for slot in range(size // 2)]
    return restricted_router(source, index, kept)


@contextmanager
def coarser(source: SourceModel, index: int) -> Iterator[None]:
    """Every expert at 2 bit."""
    low = requantized_experts(source.experts(index), Format(2, 128, "affine"))
    with hooked(source.experts(index), lambda original, x, indices: low(x, indices)):
        yield


@contextmanager
def weaker_attention(source: SourceModel, index: int) -> Iterator[None]:
    """Something that reaches attention, not only the experts."""
    with hooked(source.layers[index].self_attn, lambda original, *a, **k: 0.5 * original(*a, **k)):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_a_variant_of_one_layer_is_the_whole_changed_model(
    checkpoints: dict[str, Path], family: str
) -> None:
    """Carried through the later layers without running the earlier ones again, bit for bit."""
    batches = random_batches((2, 11), (1, 23), (1, 7))
    changes: dict[str, Change] = {
        "fewer": fewer,
        "coarser": coarser,
        "attention": weaker_attention,
    }
    source = open_source(str(checkpoints[family]))
    source.load_trunk()
    forked = frozenset({1, 2})
    with LayerStream(source.model, source.layers, batches, forked=forked) as stream:
        for index in range(len(source.layers)):
            source.load_layer(index)
            for batch in range(len(batches)):
                stream.step(batch)
                if batch in forked:
                    stream.step_forks(batch)
            if index in source.moe_layers:
                for batch in forked:
                    for name, change in changes.items():
                        stream.fork(batch, (index, name), change(source, index))
            source.release_layer(index)
        plain = [stream.finish(batch) for batch in range(len(batches))]
        variants = {
            (batch, index, name): stream.fork_logits(batch, (index, name))
            for batch in forked
            for index in source.moe_layers
            for name in changes
        }
    whole = loaded(checkpoints[family])
    for batch, tokens in enumerate(batches):
        assert mx.array_equal(plain[batch], whole.model(tokens))
    for (batch, index, name), logits in variants.items():
        with changes[name](whole, index):
            expected = whole.model(batches[batch])
        assert mx.array_equal(logits, expected), (batch, index, name)
        assert mx.abs(logits - plain[batch]).max() > 1e-3, (batch, index, name)
    # The variants left nothing behind.
    assert mx.array_equal(whole.model(batches[0]), plain[0])


class Doubling(nn.Module):
    """Does something between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = 2 * layer(x)
        return x


def test_a_model_that_works_between_its_layers_is_not_forked() -> None:
    model, x = Doubling(), mx.ones((1, 4))
    plain = model(x)
    with LayerStream(model, model.layers, [x]) as stream:
        stream.step(0)
        stream.step(0)
        assert mx.array_equal(stream.finish(0), plain)
    with (
        pytest.raises(CalibrationError, match="changes the hidden state between decoder layers"),
        LayerStream(model, model.layers, [x], forked=frozenset({0})) as stream,
    ):
        stream.step(0)
        stream.step(0)
    assert mx.array_equal(model(x), plain)
