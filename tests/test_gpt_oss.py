"""gpt-oss: experts of a layer fused into one mxfp4 tensor, with biases, and a router with one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest
from exports import ROOT, Raw
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from reap.artifacts import Format, Plan
from reap.calibrate import CalibrationSettings, calibrate
from reap.errors import ReapError
from reap.export import export_hf
from reap.models.hooks import hooked
from reap.models.source import open_source
from reap.models.text import TextSet

Array = npt.NDArray[np.float64]

DOCUMENTS = [
    np.random.default_rng(seed).integers(0, models.VOCABULARY, length).tolist()
    for seed, length in enumerate((30, 5, 21))
]


@functools.cache
def source_path() -> Path:
    return models.write_gpt_oss(ROOT / "gpt_oss" / "source")


def test_the_spec_has_the_bytes_that_mlx_lm_loads() -> None:
    """The router's bias is counted once."""
    spec = open_source(str(source_path())).spec()
    model, _ = load_model(source_path(), lazy=True)
    loaded = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    rows = sum(spec.num_experts * spec.router_row_bytes(moe) for moe in spec.moe_layers)
    assert spec.trunk_bytes() + spec.experts_bytes + rows == loaded
    assert {p.format for moe in spec.moe_layers for p in moe.projections} == {
        Format(4, 32, "mxfp4")
    }


def test_the_state_has_the_bytes_of_a_real_cache(tmp_path: Path) -> None:
    """Of a cache that has decoded beyond the window; it grows by 256 tokens."""
    path = models.write_gpt_oss(
        tmp_path / "m", dtype=mx.bfloat16, sliding_window=256, layers=2, intermediate=32
    )
    model, _ = load_model(path)
    model.set_dtype(mx.bfloat16)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 511), mx.int32), cache=cache))
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    found = sum(part.nbytes for part in cache)
    assert open_source(str(path)).spec().state_bytes(512) == found


# The block by hand, in float64, on the tensors of the file

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Block:
    def __init__(self, layer: int) -> None:
        at = f"model.layers.{layer}.mlp."
        self.tensors = {
            name.removeprefix(at): tensor
            for name, tensor in exports.raw_tensors(source_path()).items()
            if name.startswith(at)
        }

    def dense(self, name: str) -> Array:
        stored = self.tensors[name]
        assert stored.dtype == "F32"
        return np.frombuffer(stored.data, np.float32).reshape(stored.shape).astype(np.float64)

    @functools.cache  # noqa: B019
    def matrix(self, name: str, expert: int) -> Array:
        blocks, scales = (self.tensors[f"experts.{name}_{part}"] for part in ("blocks", "scales"))
        codes = np.frombuffer(blocks.row(expert), np.uint8).reshape(blocks.shape[1:])
        values = FP4[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], 32)
        steps = 2.0 ** (np.frombuffer(scales.row(expert), np.uint8).astype(np.float64) - 127)
        return (values * steps.reshape(scales.shape[1:])[..., None]).reshape(len(values), -1)

    def route(self, x: Array, keep: Sequence[int]) -> dict[int, float]:
        every = self.dense("router.weight") @ x + self.dense("router.bias")
        logits = {e: every[e] for e in keep}
        chosen = sorted(keep, key=lambda e: -logits[e])[:2]
        weights = np.exp([logits[e] for e in chosen])
        return dict(zip(chosen, (weights / weights.sum()).tolist()))

    def expert(self, x: Array, e: int) -> Array:
        both = self.matrix("gate_up_proj", e) @ x + self.dense("experts.gate_up_proj_bias")[e]
        gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return self.matrix("down_proj", e) @ inner + self.dense("experts.down_proj_bias")[e]

    def output(self, x: Array, keep: Sequence[int] = range(12)) -> Array:
        return np.sum([g * self.expert(x, e) for e, g in self.route(x, keep).items()], axis=0)


def test_sums_and_drop_curve_are_those_of_a_loop_over_tokens() -> None:
    class Numbers:
        def encode(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

    texts = [TextSet("a", "a", "", tuple(" ".join(map(str, ids)) for ids in DOCUMENTS))]
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("reap.calibrate.calibrate")
        patch.setattr(module, "load_tokenizer", lambda path, **options: Numbers())
        settings = CalibrationSettings(
            sequence_length=64, probe_tokens=1000, low_formats=(Format(2, 64, "affine"),)
        )
        found = calibrate(open_source(str(source_path())), texts, settings)
    model, _ = load_model(source_path())
    inputs: dict[int, list[Array]] = {index: [] for index in range(4)}
    with ExitStack() as hooks:
        for index, layer in enumerate(model.layers):

            def recorded(original: Any, x: mx.array, index: int = index) -> mx.array:
                inputs[index].append(np.array(x[0]).astype(np.float64))
                return original(x)

            hooks.enter_context(hooked(layer.mlp, recorded))
        for ids in DOCUMENTS:
            mx.eval(model(mx.array([ids])))
    measured = found.measurement
    assert measured is not None
    for layer in range(4):
        block = Block(layer)
        tokens = np.concatenate(inputs[layer])
        count, gate, energy = np.zeros(12), np.zeros(12), np.zeros(12)
        for x in tokens:
            for e, g in block.route(x, range(12)).items():
                count[e] += 1
                gate[e] += g
                energy[e] += g**2 * (block.expert(x, e) ** 2).sum()
        np.testing.assert_array_equal(found.count.sum(axis=(0, 1))[layer], count)
        np.testing.assert_allclose(found.gate.sum(axis=(0, 1))[layer], gate, 1e-5)
        np.testing.assert_allclose(found.gate2_norm2.sum(axis=(0, 1))[layer], energy, 1e-4)
        for kept, error in zip(measured.kept, measured.drop_error[layer]):
            keep = measured.order[layer][:kept].tolist()
            wanted = sum(((block.output(x, keep) - block.output(x)) ** 2).sum() for x in tokens)
            assert error == pytest.approx(wanted, rel=1e-3, abs=1e-6)


# Exports


@functools.cache
def pruned(shape: str) -> tuple[Plan, Path]:
    spec = open_source(str(source_path())).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, shape))
    exports.write(source_path(), plan, ROOT / "gpt_oss" / shape)
    return plan, ROOT / "gpt_oss" / shape


def test_keeping_everything_changes_nothing() -> None:
    before, after = (load_model(path)[0] for path in (source_path(), pruned("identity")[1]))
    tokens = mx.array([exports.TOKENS])
    assert mx.array_equal(before(tokens), after(tokens))


@pytest.mark.parametrize("shape", exports.SHAPES)
def test_pruned_is_the_source_with_dropped_experts_masked(shape: str) -> None:
    plan, out = pruned(shape)
    found = exports.logits(exports.load(out))
    wanted = exports.logits(exports.masked_source(source_path(), plan))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    if shape != "identity":
        assert np.abs(wanted - exports.logits(exports.load(source_path()))).max() > 0.01


@pytest.mark.parametrize("shape", ["stock", "two-bank"])
def test_a_smaller_trunk_has_a_router_of_8_bits_and_its_bias(shape: str, tmp_path: Path) -> None:
    spec = open_source(str(source_path())).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, shape), trunk="4bit")
    assert plan.trunk["model.layers.0.mlp.router"].bits == 8
    result = exports.write(source_path(), plan, tmp_path / "out")
    assert result.loaded_bytes == plan.waterfall.weights
    found, wanted = exports.raw_tensors(tmp_path / "out"), exports.raw_tensors(source_path())
    for layer in plan.layers:
        name = f"model.layers.{layer.layer}.mlp.router.bias"
        rows = [wanted[name].row(expert) for expert in layer.kept]
        assert found[name].data == b"".join(rows)
    assert np.isfinite(exports.logits(exports.load(tmp_path / "out"))).all()


@functools.cache
def hugging_face() -> tuple[Plan, Path]:
    plan, out = pruned("stock")[0], ROOT / "gpt_oss" / "hf"
    plan.save(ROOT / "gpt_oss" / "hf.plan.json")
    source = open_source(str(source_path()))
    export_hf(source, plan, out, plan_file=ROOT / "gpt_oss" / "hf.plan.json")
    return plan, out


def test_the_hugging_face_layout_has_rows_of_the_fused_tensors() -> None:
    plan, out = hugging_face()
    before, after = exports.raw_tensors(source_path()), exports.raw_tensors(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = tensor
        if ".mlp." in name:
            kept = plan.layers[int(name.split(".")[2])].kept
            rows = b"".join(tensor.row(expert) for expert in kept)
            wanted = Raw(tensor.dtype, (len(kept), *tensor.shape[1:]), rows)
        assert after[name] == wanted, name
    found, mlx = (load_model(path)[0] for path in (out, pruned("stock")[1]))
    tokens = mx.array([exports.TOKENS])
    assert mx.array_equal(found(tokens), mlx(tokens))


def test_an_mlx_checkpoint_has_no_hugging_face_layout(tmp_path: Path) -> None:
    plan, out = pruned("identity")
    source = open_source(str(out))
    plan = exports.hand_plan(source.spec(), exports.kept_experts(source.spec(), "stock"))
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ReapError, match="identity is an MLX checkpoint with stacked experts"):
        export_hf(source, plan, tmp_path / "out", plan_file=tmp_path / "plan.json")


def test_transformers_computes_what_mlx_lm_computes() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, out = hugging_face()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    )
    with torch.no_grad():
        found = np.array(model.float().eval()(torch.tensor([exports.TOKENS])).logits[0])
    wanted = exports.logits(load_model(out)[0])
    print(f"\ngpt_oss: from mlx-lm {np.abs(found - wanted).max():.2e}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
