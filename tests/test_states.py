"""States between layers: in memory, on disk, and taken up again, always bit for bit the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.kimi_k3 import ResidualBlocks
from test_stream import coarser, fewer, random_batches

from reap.data import embedded_model
from reap.errors import CalibrationError, ReapError
from reap.models.source import open_source
from reap.models.states import StateStore
from reap.models.stream import LayerStream


def residual(raw: mx.array) -> ResidualBlocks:
    blocks = ResidualBlocks(1e-5)
    blocks.append(raw)
    return blocks


def states(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.glob("*.safetensors"))


@pytest.mark.parametrize("memory", [0, 300, None])
def test_every_kind_of_value_comes_back(tmp_path: Path, memory: int | None) -> None:
    x = mx.arange(24, dtype=mx.bfloat16).reshape(2, 3, 4)
    state = (x, {"a": [None, True, 3, 0.1, "s"], "b": residual(x)}, mx.array(5), mx.zeros((0, 2)))
    store = StateStore(tmp_path, memory)
    store.put((0, None), state)
    store.put((1, (2, "low")), x)
    again = StateStore(tmp_path, memory)
    again.restore(json.loads(json.dumps(store.commit())))
    assert again.keys() == [(0, None), (1, (2, "low"))]
    for kept in (store, again):
        found = kept.get((0, None))
        assert isinstance(found, tuple)
        assert found[0].dtype == mx.bfloat16 and mx.array_equal(found[0], x)
        assert found[1]["a"] == [None, True, 3, 0.1, "s"]
        assert type(found[1]["b"]) is ResidualBlocks and found[1]["b"].eps == 1e-5
        assert mx.array_equal(found[1]["b"].inv_rms, residual(x).inv_rms)
        assert found[2].item() == 5 and found[2].shape == () and found[3].shape == (0, 2)
        assert mx.array_equal(kept.get((1, (2, "low"))), x)


def test_what_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path, 0)
    store.put((0, None), (mx.zeros((10, 10)), residual(mx.ones((50, 50)))))
    once = store.bytes_written
    for _ in range(3):
        h, blocks = store.get((0, None))
        store.put((0, None), (h + 1, blocks))
        store.commit()
        store.clean()
    assert store.bytes_written == once + 3 * 400
    assert len(states(tmp_path)) == 3
    h, blocks = store.get((0, None))
    blocks.append(
        mx.ones((50, 50))
    )  # a changed object is another state, whoever else holds the old one
    assert store.get((0, None))[1].raw.shape == (1, 50, 50)


def test_the_limit_holds_and_nothing_is_written_below_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path, 1000)
    for batch in range(5):
        store.put((batch, None), mx.full((100,), batch))
    assert len(states(tmp_path)) == 3
    for batch in range(5):
        assert store.get((batch, None))[0].item() == batch
    inside = StateStore(tmp_path / "none", None)
    inside.put((0, None), mx.ones(1000))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [(nn.Linear(2, 2), "returns a mlx.nn"), (Path("x"), "returns a pathlib"), (1j, "complex")],
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        StateStore(tmp_path).put((0, None), (mx.ones(1), value))


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put((0, None), residual(mx.ones((2, 2))))
    committed = store.commit()
    evil = json.loads(json.dumps(committed).replace("mlx_lm.models.kimi_k3:", "os:"))
    other = StateStore(tmp_path)
    other.restore(evil)
    with pytest.raises(ReapError, match="not of mlx-lm"):
        other.get((0, None))
    (tmp_path / states(tmp_path)[0]).write_bytes(b"")
    with pytest.raises(ReapError, match="missing or cut short"):
        StateStore(tmp_path).restore(committed)


def test_a_stream_from_disk_is_the_stream_in_memory(tmp_path: Path) -> None:
    """Taken up by another process at every layer, with variants of layers on the way."""
    batches = random_batches((2, 11), (1, 23))

    def logits(store: StateStore | None, *, anew: bool = False) -> dict[Any, mx.array]:
        source = open_source(str(embedded_model()))
        source.load_trunk()
        for index in range(len(source.layers)):
            source.load_layer(index)
            with LayerStream(
                source.model,
                source.layers,
                batches,
                forked=frozenset({1}),
                states=store,
                start=index,
            ) as stream:
                states = stream._states
                for batch in (0, 1):
                    stream.step(batch)
                stream.step_forks(1)
                if index in source.moe_layers:
                    stream.fork(1, (index, "fewer"), fewer(source, index))
                    stream.fork(1, (index, "low"), coarser(source, index))
            source.release_layer(index)
            if anew:
                assert isinstance(states, StateStore)
                committed = json.loads(json.dumps(states.commit()))
                states.clean()
                store = StateStore(tmp_path, 0)
                store.restore(committed)
            else:
                store = states  # type: ignore[assignment]
        with LayerStream(
            source.model, source.layers, batches, states=store, start=len(source.layers)
        ) as stream:
            return {
                key: stream.finish(key[0]) if key[1] is None else stream.fork_logits(*key)
                for key in stream._states.keys()  # noqa: SIM118
            }

    plain = logits(None)
    assert len(plain) > 5
    stored = logits(StateStore(tmp_path, 0), anew=True)
    assert stored.keys() == plain.keys()
    for key, found in stored.items():
        assert mx.array_equal(found, plain[key]), key


class Skipping(nn.Module):
    """A skip over two layers: more than the output of the last layer is needed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4) for _ in range(3)]
        self.kind = kind

    def __call__(self, x: mx.array) -> mx.array:
        first = self.layers[0](x)
        second = self.layers[1](first)
        if self.kind == "handed on":
            return self.layers[2](first)
        return self.layers[2](second + first)


@pytest.mark.parametrize("kind", ["handed on", "sum"])
def test_a_model_that_needs_more_than_the_last_output_is_refused(kind: str) -> None:
    model, x = Skipping(kind), mx.ones((1, 4))
    assert model(x).shape == (1, 4)
    with (
        pytest.raises(CalibrationError, match="need more than the output of the layer before"),
        LayerStream(model, model.layers, [x]) as stream,
    ):
        for _ in range(3):
            stream.step(0)
