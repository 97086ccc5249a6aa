"""What a source may be stored as: FP8 and mixed precisions work, the rest is refused by name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import mlx_lm
import models
import numpy as np
import numpy.typing as npt
import pytest
from exports import ROOT, Raw
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from reap.artifacts import Format, Plan
from reap.calibrate import CalibrationSettings, calibrate
from reap.cli import main
from reap.errors import CheckpointError, ReapError
from reap.models.source import open_source
from reap.models.text import load_texts
from reap.planning import PlanSettings
from reap.planning.precision import choose_precision

Floats = npt.NDArray[np.float32]

SHORT = CalibrationSettings(tokens=100, sequence_length=32, batch_tokens=64, probe_tokens=40)

# Widths that blocks do not divide, blocks that are not square, both types of scale in use.
FP8: dict[str, tuple[str, tuple[int, int], mx.Dtype]] = {
    "qwen3_moe": ("qwen3_moe", (128, 128), mx.bfloat16),
    "deepseek_v3": ("deepseek_v3", (128, 128), mx.float32),
    "small blocks": ("qwen3_moe", (32, 64), mx.float32),
}


@functools.cache
def fp8(kind: str) -> Path:
    family, block, scale = FP8[kind]
    make = {"qwen3_moe": models.write_qwen3_moe, "deepseek_v3": models.write_deepseek_v3}[family]
    at = ROOT / "fp8" / kind
    make(at / "original", dtype=mx.bfloat16, intermediate=192)
    return models.fp8_copy(at / "original", at / "source", block, scale)


# The value of every E4M3 code, from its definition: 4 exponent bits of bias 7, 3 of mantissa.
E4M3 = np.array(
    [
        (-1) ** (code >> 7)
        * (
            2.0**-6 * (code % 8) / 8
            if (code >> 3) % 16 == 0
            else 2.0 ** ((code >> 3) % 16 - 7) * (1 + code % 8 / 8)
        )
        if code % 128 != 127
        else np.nan
        for code in range(256)
    ],
    dtype=np.float32,
)


def values(stored: Raw) -> npt.NDArray[Any]:
    """A float32, bfloat16 or FP8 tensor in float32."""
    if stored.dtype == "F8_E4M3":
        return E4M3[np.frombuffer(stored.data, np.uint8)].reshape(stored.shape)
    if stored.dtype == "BF16":
        wide = np.frombuffer(stored.data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(stored.shape)
    assert stored.dtype == "F32"
    return np.frombuffer(stored.data, np.float32).reshape(stored.shape)


def by_hand(tensors: dict[str, Raw], name: str, block: tuple[int, int]) -> mx.array:
    """A matrix in bfloat16, element by element."""
    codes, scales = values(tensors[name]), values(tensors[f"{name}_scale_inv"])
    rows, columns = np.indices(codes.shape)
    return mx.array(codes * scales[rows // block[0], columns // block[1]]).astype(mx.bfloat16)


@functools.cache
def widened(kind: str) -> Path:
    """The FP8 source as an ordinary bfloat16 checkpoint, made by hand."""
    source = fp8(kind)
    tensors = exports.raw_tensors(source)

    def edit(shard: models.Tensors) -> models.Tensors:
        return {
            name: by_hand(tensors, name, FP8[kind][1]) if f"{name}_scale_inv" in tensors else array
            for name, array in shard.items()
            if not name.endswith("_scale_inv")
        }

    target = source.with_name("widened")
    return models.copy_checkpoint(source, target, edit, quantization_config=None)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_is_the_product_of_codes_and_block_scales(kind: str) -> None:
    ours, theirs = open_source(str(fp8(kind))), open_source(str(widened(kind)))
    assert {t.dtype for t in ours.checkpoint.tensors.values()} >= {"F8_E4M3", "BF16"}
    for index in (*range(len(ours.layers)), None):
        found, wanted = (
            s.trunk_weights() if index is None else s.layer_weights(index) for s in (ours, theirs)
        )
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert found[name].dtype == array.dtype, name
            assert mx.array_equal(found[name], array), name
    assert ours.spec() == replace(
        theirs.spec(), model="source", model_sha256=ours.checkpoint.model_sha256
    )


def test_fp8_is_what_stock_mlx_lm_makes_of_deepseek_v3() -> None:
    stock, _ = load_model(fp8("deepseek_v3"))
    source = open_source(str(fp8("deepseek_v3")))
    for index, layer in enumerate(stock.layers):
        found = source.layer_weights(index)
        for name, array in tree_flatten(layer.parameters()):
            assert mx.array_equal(found[name], array), (index, name)


def test_a_damaged_fp8_value_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def damage(shard: models.Tensors) -> models.Tensors:
        if name in shard:
            shard[name][3, 4] = 127  # NaN
        return shard

    source = fp8("qwen3_moe")
    damaged = models.copy_checkpoint(source, tmp_path / "damaged", damage)
    codes = {n for n, t in exports.raw_tensors(source).items() if t.dtype == "F8_E4M3"}
    for file in damaged.glob("model*.safetensors"):
        models.relabel(file, codes, "F8_E4M3")
    with pytest.raises(ReapError, match=r"expert 2 in layer 1 .* not finite"):
        calibrate(open_source(str(damaged)), load_texts(["math"], split="calibration"), SHORT)


# From the source to a checkpoint, as a user does it


def mixed(path: str, module: Any) -> bool | dict[str, Any]:
    """Four bits, and eight for the down projections and the router."""
    if not hasattr(module, "to_quantized"):
        return False
    wide = path.endswith(("down_proj", "gate"))
    return {"group_size": 64, "bits": 8 if wide else 4, "mode": "affine"}


CONVERSIONS: dict[str, dict[str, Any]] = {
    "affine": {"q_bits": 4, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "mixed": {"quant_predicate": mixed},
}


@functools.cache
def converted(kind: str) -> Path:
    path = ROOT / "converted" / kind
    source = ROOT / "converted" / "source"
    if not source.exists():
        models.write_qwen3_moe(source, experts=12, layers=2)
    mlx_lm.convert(str(source), str(path), quantize=True, **CONVERSIONS[kind])
    return path


@pytest.mark.parametrize("kind", ["fp8", *CONVERSIONS])
def test_from_source_to_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = fp8("qwen3_moe") if kind == "fp8" else converted(kind)
    spec = open_source(str(source)).spec()
    size = spec.trunk_bytes() + spec.experts_bytes * 3 // 5
    calibration = ["--calibration", "math", "--tokens", "100", "--sequence-length", "32"]
    for command in (
        ["calibrate", str(source), "--run", "r", *calibration, "--probe-tokens", "32"],
        [
            "plan",
            "--run",
            "r",
            "--size",
            str(size),
            "--min-experts",
            "3",
            "--low-rounding",
            "plain",
        ],
        ["export", "--run", "r"],
    ):
        assert main(command) == 0, command
    plan = Plan.load(Path("r/plan.json"))
    before = exports.raw_tensors(widened("qwen3_moe") if kind == "fp8" else source)
    after = exports.raw_tensors(Path("r/checkpoint"))
    assert sum(len(tensor.data) for tensor in after.values()) == plan.waterfall.weights
    for layer in plan.layers:
        path = plan.experts_path[layer.layer]
        bank = f"{path}.high" if layer.split else path
        for name in plan.high if layer.high else ():
            for row, expert in enumerate(layer.kept[: layer.high]):
                for leaf in ("weight", "scales", "biases"):
                    ours = after.get(f"{bank}.{name}.{leaf}")
                    stacked = before.get(f"{path}.{name}.{leaf}")
                    apart = before.get(
                        f"{path.replace('switch_mlp', f'experts.{expert}')}.{name}.{leaf}"
                    )
                    assert (ours is None) == (stacked is None and apart is None)
                    if ours is not None:
                        theirs = apart.data if stacked is None else stacked.row(expert)
                        assert ours.row(row) == theirs, (layer.layer, name, expert)
    model = exports.load(Path("r/checkpoint"))
    reference = widened("qwen3_moe") if kind == "fp8" else source
    wanted = exports.logits(exports.masked_source(reference, plan))
    np.testing.assert_allclose(exports.logits(model), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_keeping_everything_gives_the_logits_of_the_source(kind: str, tmp_path: Path) -> None:
    source = converted(kind)
    spec = open_source(str(source)).spec()
    exports.write(
        source, exports.hand_plan(spec, exports.kept_experts(spec, "identity")), tmp_path / "out"
    )
    tokens = mx.array([exports.TOKENS])
    before, after = (load_model(path)[0](tokens) for path in (source, tmp_path / "out"))
    assert mx.array_equal(before, after)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_experts_that_are_dropped_are_not_read(kind: str, tmp_path: Path) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc")
    path = models.write_qwen3_moe(tmp_path / "m", dtype=mx.bfloat16, layers=2, experts=32)
    if kind == "fp8":
        path = models.fp8_copy(path, tmp_path / "f")
    source = open_source(str(path))
    tensors = source.checkpoint.tensors
    for index in source.moe_layers:
        names = source._names[index]
        experts = [n for n in names if ".experts." in n]
        one = sum(tensors[n].nbytes for n in experts if ".experts.5." in n)
        rest = sum(tensors[n].nbytes for n in names if n not in experts)
        start = models.read_bytes()
        mx.eval(source.layer_weights(index, kept=(5, 0, 30)))
        header = 2 * max(f.stat().st_size for f in path.glob("*.json"))
        assert 3 * one + rest <= models.read_bytes() - start < 3 * one + rest + header
        assert 32 * one > 2 * (3 * one + header)  # or the bound above would say nothing


# Layers of different precision


def test_experts_of_different_precision_need_a_named_high_bank(tmp_path: Path) -> None:
    """A bank has one format for all layers: the plan asks for one that is not larger."""

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        wide = "layers.2.mlp.switch_mlp" in path
        return hasattr(module, "to_quantized") and {
            "group_size": 64,
            "bits": 8 if wide else 4,
            "mode": "affine",
        }

    path = tmp_path / "source"
    origin = exports.source_checkpoint("qwen3_moe")
    mlx_lm.convert(str(origin), str(path), quantize=True, quant_predicate=predicate)
    source = open_source(str(path))
    spec = source.spec()
    with pytest.raises(ReapError, match=r"layers\.2\..* 8-bit g64, in earlier layers as 4-bit g64"):
        choose_precision(spec, PlanSettings(size=1))
    precision = choose_precision(spec, PlanSettings(size=1, high="4bit"))
    assert set(precision.high.values()) == {Format(4, 64, "affine")}
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "two-bank"), high="4bit")
    exports.write(path, plan, tmp_path / "out")
    before, after = exports.raw_tensors(path), exports.raw_tensors(tmp_path / "out")
    layer = plan.layers[0]  # its source is at 4 bits
    experts = plan.experts_path[layer.layer]
    for row, expert in enumerate(layer.kept[: layer.high]):
        name = "up_proj.weight"
        assert after[f"{experts}.high.{name}"].row(row) == before[f"{experts}.{name}"].row(expert)
    assert np.isfinite(exports.logits(exports.load(tmp_path / "out"))).all()


@functools.cache
def by_recipe(recipe: str) -> Path:
    """Through mlx-lm's mixed recipe, which gives the last two of four layers wider down
    projections, and with mlx-lm 0.32 no group size in config.json."""
    path = ROOT / "recipes" / recipe
    source = exports.source_checkpoint("qwen3_moe")
    mlx_lm.convert(str(source), str(path), quantize=True, quant_predicate=recipe)
    return path


def test_a_mixed_recipe_is_pruned_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = by_recipe("mixed_4_6")
    assert main(["inspect", str(source)]) == 0
    assert re.search(r"\n 2 +12 +12 4-bit g64/6-bit g64 *\n", capsys.readouterr().out)
    calibration = ["--calibration", "math", "--tokens", "100", "--sequence-length", "32"]
    assert main(["calibrate", str(source), "--run", "r", *calibration]) == 0
    plan_it = ["plan", "--run", "r", "--size", "70%", "--min-experts", "3"]
    capsys.readouterr()
    assert main(plan_it) == 1
    hint = re.search(r"hint: name one for the high bank, e\.g\. (.*)\n", capsys.readouterr().err)
    assert hint is not None
    assert main([*plan_it, *hint[1].split()]) == 0
    assert main(["export", "--run", "r"]) == 0
    plan = Plan.load(Path("r/plan.json"))
    assert set(plan.high.values()) == {Format(4, 64, "affine")}
    before, after = exports.raw_tensors(source), exports.raw_tensors(Path("r/checkpoint"))
    for layer in plan.layers:
        path = plan.experts_path[layer.layer]
        bank = f"{path}.high" if layer.split else path
        for name in plan.high if layer.high else ():
            ours, theirs = (x[f"{p}.{name}.weight"] for x, p in ((after, bank), (before, path)))
            narrowed = layer.layer >= 2 and name == "down_proj"
            assert (ours.shape[2] < theirs.shape[2]) == narrowed
            for row, expert in enumerate(layer.kept[: layer.high]):
                assert narrowed or ours.row(row) == theirs.row(expert)
    assert np.isfinite(exports.logits(exports.load(Path("r/checkpoint")))).all()


@pytest.mark.parametrize("recipe", ["mixed_2_6", "mixed_3_4"])
def test_a_mixed_recipe_below_four_bits_is_refused_before_the_work(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few, more = recipe.split("_")[1:]
    calibration = ["--calibration", "math", "--tokens", "40"]
    assert main(["calibrate", str(by_recipe(recipe)), "--run", "r", *calibration]) == 1
    err = capsys.readouterr().err
    assert f"layers.0.mlp.switch_mlp.down_proj as {few}-bit g64" in err
    assert f"layers.2.mlp.switch_mlp.down_proj as {more}-bit g64" in err
    assert "layer 0" not in err and not Path("r").exists()


# Refusals, all when the source is opened

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_block_size": None}, "fp8 with weight_block_size None"),
        ({"weight_block_size": [128]}, r"fp8 with weight_block_size \[128\]"),
        ({"weight_block_size": [0, 128]}, r"fp8 with weight_block_size \[0, 128\]"),
        ({"fmt": "e5m2"}, "fp8 with fmt e5m2"),
        ({"activation_scheme": "static"}, "fp8 with activation_scheme static"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
            "compressed-tensors mxfp4-pack-quantized",  # of kimi_k3 only
        ),
    ],
)
def test_a_quantization_that_is_not_known_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = json.loads((fp8("qwen3_moe") / "config.json").read_text())
    changed = {"quantization_config": config["quantization_config"] | changes}
    _refused(tmp_path, f"quantized as {named}, which reap cannot read", **changed)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bits": 4, "group_size": 32, "mode": "mxfp5"}, "mxfp5 with 4 bits and groups of 32"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "mxfp4 with 8 bits"),
        ({"bits": 7, "group_size": 64}, "affine with 7 bits"),
        (
            {"bits": 4, "group_size": 64, "lm_head": {"bits": 16, "group_size": 1, "mode": "x"}},
            r"x with 16 bits and groups of 1 \(lm_head\)",
        ),
    ],
)
def test_an_unknown_mode_of_mlx_is_refused(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _refused(tmp_path, f"quantized as {named}", quantization_config=None, quantization=settings)


def test_quantized_activations_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path, "MLX with quantized activations", quantize_activations=True)


def test_a_scale_per_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "source"
    origin = exports.source_checkpoint("qwen3_moe")
    mlx_lm.convert(str(origin), str(path), quantize=True, q_mode="nvfp4")
    name = "model.layers.0.mlp.switch_mlp.up_proj.global_scale"
    copy = models.copy_checkpoint(path, tmp_path / "c", lambda t: t | {name: mx.ones(12)})
    with pytest.raises(CheckpointError, match="nvfp4 with a scale per tensor"):
        open_source(str(copy))


def test_settings_in_a_file_of_their_own_are_refused(tmp_path: Path) -> None:
    path = models.write_qwen3_moe(tmp_path / "m")
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json says"):
        open_source(str(path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {n: a for n, a in t.items() if n != f"{EXPERT}_scale_inv"}, "lacks .*scale_inv"),
        (
            lambda t: t | ({f"{EXPERT}_scale_inv": mx.ones((1, 1))} if EXPERT in t else {}),
            r"scale_inv has shape \(1, 1\); .*\(192, 128\) needs \(2, 1\)",
        ),
        (
            lambda t: t | {"model.norm.weight_scale_inv": mx.ones((1, 1))},
            r"model\.norm\.weight_scale_inv has no FP8 matrix",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(
    edit: Callable[[models.Tensors], models.Tensors], message: str, tmp_path: Path
) -> None:
    _refused(tmp_path, message, edit)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "I8", "F8_E8M0"])
def test_an_unknown_type_of_tensor_is_named(dtype: str, tmp_path: Path) -> None:
    copy = models.copy_checkpoint(fp8("qwen3_moe"), tmp_path / "copy")
    for file in copy.glob("model*.safetensors"):
        models.relabel(file, {EXPERT}, dtype)
    with pytest.raises(CheckpointError, match=r"is stored as .*which config\.json does not"):
        open_source(str(copy))


def test_a_type_that_mlx_does_not_load_is_named_wherever_it_is(tmp_path: Path) -> None:
    name = "vision_tower.extra"
    copy = models.copy_checkpoint(
        exports.source_checkpoint("kimi_k3"),
        tmp_path / "copy",
        lambda shard: shard | {name: mx.zeros((2,), mx.int64)},
    )
    for file in copy.glob("model*.safetensors"):
        models.relabel(file, {name}, "F64")
    with pytest.raises(CheckpointError, match=f"{name} is stored as F64; MLX"):
        open_source(str(copy))


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_experts_of_several_types_are_refused(dtype: mx.Dtype, tmp_path: Path) -> None:
    """mlx-lm would widen them all; bytes of different types cannot be put one after the other."""
    other = "model.layers.2.mlp.experts.5.up_proj.weight"
    copy = models.copy_checkpoint(
        exports.source_checkpoint("qwen3_moe"),
        tmp_path / "copy",
        lambda shard: {n: a.astype(dtype) if n == other else a for n, a in shard.items()},
    )
    with pytest.raises(CheckpointError, match=rf"{other} has type F\d+, those .* have BF16"):
        open_source(str(copy)).spec()


def test_fused_experts_that_mlx_lm_does_not_take_apart_are_named(tmp_path: Path) -> None:
    """As transformers 5 holds Qwen3-MoE in memory; its files have experts apart."""

    def fuse(shard: models.Tensors) -> models.Tensors:
        at = "model.layers.1.mlp.experts"
        if f"{at}.0.up_proj.weight" not in shard:
            return shard
        whole = {
            name: mx.stack([shard.pop(f"{at}.{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        }
        fused = mx.concatenate([whole["gate"], whole["up"]], axis=1)
        return shard | {f"{at}.gate_up_proj": fused, f"{at}.down_proj": whole["down"]}

    plain = models.write_qwen3_moe(tmp_path / "plain", layers=2)
    source = open_source(str(models.copy_checkpoint(plain, tmp_path / "fused", fuse)))
    with pytest.raises(CheckpointError, match=r"lacks .*switch_mlp.* and has .*experts\.down_proj"):
        source.spec()


def test_fp8_without_a_word_in_the_config_is_refused(tmp_path: Path) -> None:
    copy = models.copy_checkpoint(fp8("qwen3_moe"), tmp_path / "copy", quantization_config=None)
    with pytest.raises(CheckpointError, match="it says nothing of a quantization"):
        open_source(str(copy))


def _refused(
    tmp_path: Path,
    message: str,
    edit: Callable[[models.Tensors], models.Tensors] = lambda shard: shard,
    **changes: Any,
) -> None:
    source = fp8("qwen3_moe")
    codes = {n for n, t in exports.raw_tensors(source).items() if t.dtype == "F8_E4M3"}
    copy = models.copy_checkpoint(source, tmp_path / "copy", edit, **changes)
    for file in copy.glob("model*.safetensors"):
        models.relabel(file, codes, "F8_E4M3")
    with pytest.raises(CheckpointError, match=message):
        open_source(str(copy))
