"""Writing a checkpoint: bytes and formats as planned, damage noticed, nothing lost on failure."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exports
import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import pytest
import yaml
from exports import CASES, Exported, exported
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from models import Tensors

from reap.artifacts import Format, LayerPlan, ModelSpec, Plan, Provenance, Saliency
from reap.artifacts.manifest import MANIFEST
from reap.cli.show import checkpoint_figures
from reap.errors import ArtifactError, CheckpointError, ReapError
from reap.export import outline
from reap.export.card import model_card
from reap.export.content import Content, Tensor
from reap.export.export import RUNTIME, check_plan
from reap.export.finite import check_finite
from reap.export.verify import verify
from reap.export.writer import shards
from reap.models.checkpoint import INDEX, open_checkpoint, read_ranges
from reap.models.source import open_source
from reap.planning import PlanSettings, make_plan
from reap.planning.planner import RECIPES, plain_plan

# The package gives the name `export` to the function.
exporting = importlib.import_module("reap.export.export")
writing = importlib.import_module("reap.export.writer")
verifying = importlib.import_module("reap.export.verify")

TRUNKS = ("8bit", "6bit", "4bit")
CARRIED = ("vision_tower.", "mm_projector.")
NEVER_QUANTIZED = ("norm", "res_proj", "conv", "A_log", "dt_bias", "e_score_correction_bias")


def is_router(name: str) -> bool:
    return ".mlp.gate." in name or name.endswith("e_score_correction_bias")


# Bytes


@pytest.mark.parametrize("trunk", ["source", "8bit", "4bit"])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_the_files_hold_exactly_the_planned_bytes(family: str, shape: str, trunk: str) -> None:
    made = exported(family, shape, trunk)
    water = made.plan.waterfall
    found: dict[str, int] = defaultdict(int)
    for name, tensor in exports.raw_tensors(made.path).items():
        found[_part(made.plan, name)] += len(tensor.data)
    assert dict(found) == {
        part: size
        for part in ("trunk", "router", "high", "low", "carried")
        if (size := getattr(water, part))
    }
    assert made.result.loaded_bytes == water.weights
    assert made.result.nbytes == water.weights + water.carried
    index = json.loads((made.path / INDEX).read_text())
    assert index["metadata"]["total_size"] == made.result.nbytes
    assert len(index["weight_map"]) == made.result.tensors


def _part(plan: Plan, name: str) -> str:
    if name.startswith(CARRIED):
        return "carried"
    if is_router(name):
        return "router"
    if ".switch_mlp." not in name:
        return "trunk"
    layer = next(p for p in plan.layers if name.startswith(plan.experts_path[p.layer] + "."))
    if layer.split:
        return "high" if ".switch_mlp.high." in name else "low"
    return "high" if layer.high else "low"


@pytest.mark.parametrize("trunk", ["source", "8bit", "4bit"])
@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "identity"])
def test_what_the_planner_makes_is_written_as_it_says(
    family: str, layout: Any, trunk: str, tmp_path: Path
) -> None:
    spec = exports.spec_of(family)
    source = exports.source_checkpoint(family)
    size = spec.trunk_bytes() // 4 + spec.experts_bytes // 2
    size += spec.trunk_bytes() // 2 if trunk == "source" else 0
    size += spec.trunk_bytes() // 4 if trunk != "4bit" else 0
    settings = PlanSettings(
        low_rounding="plain", size=size, layout=layout, trunk=trunk, min_experts=spec.min_experts
    )
    plan = make_plan(saliency(spec), settings, provenance=provenance(spec))
    result = exports.write(source, plan, tmp_path / "out")
    written = exports.raw_tensors(tmp_path / "out")
    loaded = sum(len(t.data) for n, t in written.items() if not n.startswith(CARRIED))
    assert loaded == result.loaded_bytes == plan.waterfall.weights <= size
    assert 0 < sum(plan.expert_counts) < spec.num_experts * len(plan.layers) or plan.low
    pruned = exports.logits(exports.load(tmp_path / "out"))
    if trunk == "source":
        wanted = exports.logits(exports.masked_source(source, plan))
        np.testing.assert_allclose(pruned, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_recipes_are_written_too(recipe: str, tmp_path: Path) -> None:
    spec = exports.spec_of("qwen3_moe")
    size = spec.trunk_bytes() + spec.experts_bytes // 2
    settings = PlanSettings(low_rounding="plain", size=size, min_experts=spec.min_experts)
    plan = plain_plan(saliency(spec), settings, recipe=recipe, provenance=provenance(spec))
    source = exports.source_checkpoint("qwen3_moe")
    exports.write(source, plan, tmp_path / "out")
    np.testing.assert_allclose(
        exports.logits(exports.load(tmp_path / "out")),
        exports.logits(exports.masked_source(source, plan)),
        rtol=0,
        atol=1e-4,
    )


def saliency(spec: ModelSpec) -> Saliency:
    """Random sums of the shapes that a calibration gives, layers of differing weight."""
    rng = np.random.default_rng(3)
    shape = (2, 1, len(spec.moe_layers), spec.num_experts)
    count = rng.integers(1, 200, shape)
    norm2 = rng.gamma(1.0, 1.0, shape) * count * rng.gamma(0.5, 1.0, (1, 1, shape[2], 1))
    gate = count * rng.uniform(0.1, 0.9, shape)
    norm = np.sqrt(norm2 * count)
    ones = np.ones(shape[:3])
    return Saliency(
        provenance=provenance(spec),
        spec=spec,
        domains=("all",),
        count=count,
        gate=gate,
        norm=norm,
        gate_norm=norm * gate / count,
        gate2_norm2=norm2 * (gate / count) ** 2,
        norm2=norm2,
        max_norm=np.sqrt(norm2),
        tokens=count.sum(axis=-1) // spec.top_k,
        residual_energy=ones * 1e4,
        output_energy=ones * norm2.sum(axis=-1),
    )


def provenance(spec: ModelSpec) -> Provenance:
    return Provenance("0.1.0", "reap plan", spec.model, "", spec.model_sha256, {"saliency": "s0"})


# Formats


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("family", exports.FAMILIES)
def test_the_trunk_is_what_mlx_lm_would_quantize_it_to(family: str, trunk: str) -> None:
    made = exported(family, "identity", trunk)
    model, _ = load_model(made.source)
    formats = made.plan.trunk

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        return formats[path].to_mlx() if path in formats else False

    nn.quantize(model, class_predicate=predicate)
    wanted = dict(tree_flatten(model.parameters()))
    found = dict(tree_flatten(load_model(made.path)[0].parameters()))
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and mx.array_equal(found[name], array), name


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_every_path_has_its_planned_bits(family: str, shape: str, trunk: str) -> None:
    made = exported(family, shape, trunk) if shape != "stock" else exported(family, shape)
    written = exports.raw_tensors(made.path)
    formats = made.plan.quantization
    quantized = {name.removesuffix(".scales") for name in written if name.endswith(".scales")}
    assert quantized == {path for path, format in formats.items() if format.mode != "dense"}
    config = json.loads((made.path / "config.json").read_text()).get("quantization", {})
    widths = {m.path: m.width for m in made.spec.modules}
    for path in quantized:
        format = formats[path]
        width = widths.get(path, 128)  # all experts here have 128 columns
        weight, scales = written[f"{path}.weight"], written[f"{path}.scales"]
        assert (weight.dtype, weight.shape[-1]) == ("U32", width * format.bits // 32), path
        assert scales.shape[-1] == width // format.group_size, path
        assert (f"{path}.biases" in written) == (format.mode == "affine"), path
        assert config[path] == vars(format), path
        assert not any(part in path.rpartition(".")[2] for part in NEVER_QUANTIZED), path
        if is_router(f"{path}."):
            assert format.bits >= 8, path
    if shape != "stock":
        bits = {formats[m.path].bits for m in made.spec.modules if m.role == "trunk"}
        assert bits == {int(trunk[0])}


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "e_score_correction_bias", "res_proj.weight"])
def test_k3s_delicate_tensors_stay_as_they_are(name: str) -> None:
    made = exported("kimi_k3", "identity", "4bit")
    before, after = exports.raw_tensors(made.source), exports.raw_tensors(made.path)
    found = 0
    for key, tensor in after.items():
        if key.endswith(name):
            theirs = before[key.replace("mlp.e_score", "block_sparse_moe.gate.e_score")]
            # The released A_log is padded behind the heads, which mlx-lm cuts off.
            wanted = theirs.data[: len(tensor.data)] if name == "A_log" else theirs.data
            assert tensor.data == wanted and tensor.dtype == theirs.dtype, key
            found += 1
    assert found >= 5


# Files beside the weights


@pytest.mark.parametrize("shape", ["stock", "two-bank"])
def test_carried_tensors_and_files_are_untouched(shape: str) -> None:
    made = exported("kimi_k3", shape)
    before, after = exports.raw_tensors(made.source), exports.raw_tensors(made.path)
    carried = {name for name in before if name.startswith(CARRIED)}
    assert len(carried) == 8
    assert {name for name in after if name.startswith(CARRIED)} == carried
    assert all(after[name] == before[name] for name in carried)
    kept = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    kept |= exports.EXTRA_FILES.keys()
    own = {"README.md", "config.json", INDEX, MANIFEST} | (
        {RUNTIME.name} if shape == "two-bank" else set()
    )
    shards = {file.name for file in made.path.glob("model-*-of-*.safetensors")}
    assert {file.name for file in made.path.iterdir()} == kept | own | shards
    for name in kept:
        assert (made.path / name).read_bytes() == (made.source / name).read_bytes(), name
    if shape == "two-bank":
        assert (made.path / RUNTIME.name).read_bytes() == RUNTIME.read_bytes()


def test_carried_tensors_of_any_kind_are_untouched(tmp_path: Path) -> None:
    """Also of types that MLX has under another name, and called as scales of its own are."""
    more = {
        "mm_projector.scales": mx.full((4, 4), 255, mx.uint8),
        "mm_projector.codes": mx.full((6,), 7, mx.uint8),
        "mm_projector.complex": mx.ones((3,), mx.complex64),
        "mm_projector.empty": mx.zeros((0, 4)),
    }
    first = "mm_projector.post_norm.weight"
    source = models.copy_checkpoint(
        exports.source_checkpoint("kimi_k3"),
        tmp_path / "source",
        lambda shard: shard | more if first in shard else shard,
    )
    for file in source.glob("model*.safetensors"):
        models.relabel(file, {"mm_projector.codes"}, "F8_E4M3")
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    exports.write(source, plan, tmp_path / "out")
    before, after = exports.raw_tensors(source), exports.raw_tensors(tmp_path / "out")
    assert all(after[name] == before[name] for name in more)


@pytest.mark.parametrize("trunk", ["source", "8bit"])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_config_says_what_was_kept(family: str, shape: str, trunk: str) -> None:
    made = exported(family, shape, trunk)
    before = json.loads((made.source / "config.json").read_text())
    after = json.loads((made.path / "config.json").read_text())
    counts, splits = [0] * made.spec.num_layers, [0] * made.spec.num_layers
    for layer in made.plan.layers:
        counts[layer.layer] = len(layer.kept)
        splits[layer.layer] = layer.high if layer.high < len(layer.kept) else 0
    assert after.pop("expert_counts") == counts
    assert after.pop("expert_bank_split") == splits
    assert after.pop("model_file", None) == (
        RUNTIME.name if shape in ("per-layer", "two-bank") else None
    )
    about = after.pop("reap")
    assert (about["layout"], about["source_num_experts"]) == (
        made.plan.layout,
        made.spec.num_experts,
    )
    assert about["plan_sha256"] and about["source_model_sha256"] == made.spec.model_sha256
    quantization = after.pop("quantization", {})
    modes = {key: quantization.pop(key) for key in ("bits", "group_size", "mode") if quantization}
    assert bool(modes) == bool(quantization)
    assert quantization == {
        path: vars(format)
        for path, format in made.plan.quantization.items()
        if format.mode != "dense"
    }
    names = {"kimi_k3": "num_experts", "qwen3_moe": "num_experts"}
    name = names.get(made.spec.model_type, "n_routed_experts")
    text_before, text_after = before.get("text_config", before), after.get("text_config", after)
    assert text_after.pop(name) == max(counts)
    text_before.pop(name)
    text_before.pop("quantization_config", None)
    assert after == before  # nothing else is added, lost or changed


def test_a_plan_that_changes_nothing_of_a_plain_model_needs_no_quantization() -> None:
    config = json.loads((exported("qwen3_moe", "identity").path / "config.json").read_text())
    assert "quantization" not in config


@pytest.mark.parametrize(
    ("family", "shape", "high"),
    [
        ("kimi_k3", "two-bank", "mxfp4"),
        ("qwen3_moe", "two-bank", "as stored"),
        ("qwen3_moe", "identity", "16-bit"),
    ],
)
def test_inspection_names_the_banks_formats(family: str, shape: str, high: str) -> None:
    made = exported(family, shape)
    found = checkpoint_figures(open_source(str(made.path)))["expert_formats"]
    assert found == {
        layer.layer: [high] * (layer.high > 0) + ["2-bit g128"] * (layer.high < len(layer.kept))
        for layer in made.plan.layers
    }


def test_the_card_names_the_plan(tmp_path: Path) -> None:
    made = exported("kimi_k3", "two-bank")
    card = (made.path / "README.md").read_text()
    kept, high = sum(made.plan.expert_counts), sum(p.high for p in made.plan.layers)
    assert f"{kept:,} of {64 * 5:,} routed experts are kept, {high:,} of them as mxfp4" in card
    assert f"and {kept - high:,} as 2-bit g128. Layout: two-bank." in card
    assert f"**{made.plan.waterfall.weights:,}**" in card
    assert made.spec.model_sha256 in card
    # A directory is no repository that the hub could link to.
    assert "/" not in made.spec.model and "base_model" not in card
    hub = model_card(made.plan, replace(made.spec, model="org/name"))
    assert yaml.safe_load(hub.split("---\n")[1])["base_model"] == "org/name"


# Verification

Damage = Callable[[Tensors], Tensors]


def _edited(name: str, change: Callable[[mx.array], mx.array]) -> Damage:
    def edit(shard: Tensors) -> Tensors:
        return {n: change(a) if n == name else a for n, a in shard.items()}

    return edit


def _dropped(name: str) -> Damage:
    return lambda shard: {n: a for n, a in shard.items() if n != name}


def _added(name: str, beside: str) -> Damage:
    return lambda shard: shard | ({name: mx.zeros((4, 4))} if beside in shard else {})


def _flipped(array: mx.array) -> mx.array:
    """One bit of the last element changed."""
    raw = np.array(array.view(mx.uint8))
    raw.reshape(-1)[-1] ^= 1
    return mx.array(raw).view(array.dtype)


def _with(value: float, index: int = -1) -> Callable[[mx.array], mx.array]:
    def change(array: mx.array) -> mx.array:
        flat = mx.array(array).flatten()
        flat[index] = value
        return flat.reshape(array.shape)

    return change


def _swapped(array: mx.array) -> mx.array:
    return array[mx.array([1, 0, *range(2, array.shape[0])])]


L = "language_model.model.layers."
HIGH, LOW = f"{L}1.mlp.switch_mlp.high.up_proj", f"{L}1.mlp.switch_mlp.low.up_proj"
BIAS = f"{L}2.mlp.e_score_correction_bias"
EMBEDDING = "language_model.model.embed_tokens"

DAMAGES: dict[str, tuple[str, Damage]] = {
    "norm missing": (f"{L}3.input_layernorm", _dropped(f"{L}3.input_layernorm.weight")),
    "bank missing": (f"{HIGH}", _dropped(f"{HIGH}.weight")),
    "bias missing": ("e_score_correction_bias", _dropped(BIAS)),
    "trunk missing": ("norm.weight", _dropped("language_model.model.norm.weight")),
    "carried missing": ("mm_projector.proj.0", _dropped("mm_projector.proj.0.weight")),
    "layer tensor too many": ("extra", _added(f"{L}1.mlp.extra.weight", BIAS.replace("2", "1"))),
    "layer too many": ("layers.77", _added(f"{L}77.mlp.gate.weight", BIAS)),
    "trunk tensor too many": ("extra", _added("language_model.extra.weight", BIAS)),
    "carried too many": ("vision_tower.extra", _added("vision_tower.extra.weight", BIAS)),
    "NaN scale, high bank": ("not finite", _edited(f"{HIGH}.scales", _with(255))),
    "NaN scale, one bank": (
        "not finite",
        _edited(f"{L}2.mlp.switch_mlp.down_proj.scales", _with(255)),
    ),
    "infinite scale, low bank": ("not finite", _edited(f"{LOW}.scales", _with(np.inf))),
    "NaN bias, low bank": ("not finite", _edited(f"{LOW}.biases", _with(np.nan))),
    "NaN in a router bias": ("e_score_correction_bias", _edited(BIAS, _with(np.nan))),
    "NaN in a dense layer": (
        "not finite",
        _edited(f"{L}0.mlp.down_proj.scales", _with(np.nan)),
    ),
    "NaN in a token's embedding": (
        "not finite",
        _edited(f"{EMBEDDING}.scales", _with(np.nan, 3 * 700 + 1)),
    ),
    "bit of a high expert": ("differs", _edited(f"{HIGH}.weight", _flipped)),
    "bit of a high expert's scale": ("differs", _edited(f"{HIGH}.scales", _flipped)),
    "bit of an expert in one bank": (
        "differs",
        _edited(f"{L}2.mlp.switch_mlp.down_proj.weight", _flipped),
    ),
    "high experts swapped": ("differs", _edited(f"{HIGH}.weight", _swapped)),
    "router biases swapped": ("differs", _edited(BIAS, _swapped)),
    "bit of a norm": ("differs", _edited(f"{L}4.mlp_res_norm.weight", _flipped)),
    "bit of the final norm": ("differs", _edited("language_model.model.norm.weight", _flipped)),
    "bit of a carried tensor": ("differs", _edited("mm_projector.proj.0.weight", _flipped)),
}


@pytest.fixture(scope="module")
def quantized() -> Exported:
    return exported("kimi_k3", "two-bank", "8bit")


def check(directory: Path, made: Exported, plan: Plan | None = None) -> int:
    source = open_source(str(made.source))
    return verify(directory, source, plan or made.plan, made.spec)


def test_an_undamaged_copy_passes(quantized: Exported, tmp_path: Path) -> None:
    copy = exports.damaged(quantized.path, tmp_path / "copy", lambda shard: shard)
    assert check(copy, quantized) == quantized.result.tensors


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(damage: str, quantized: Exported, tmp_path: Path) -> None:
    message, edit = DAMAGES[damage]
    copy = exports.damaged(quantized.path, tmp_path / "copy", edit)
    assert exports.raw_tensors(copy) != exports.raw_tensors(quantized.path)
    with pytest.raises(ReapError, match=message):
        check(copy, quantized)


@pytest.mark.parametrize(
    "path",
    [HIGH, LOW, f"{L}2.mlp.gate", EMBEDDING, f"{L}0.mlp.down_proj", f"{L}3.self_attn.embed_q"],
)
def test_a_path_left_in_another_format_is_noticed(
    path: str, quantized: Exported, tmp_path: Path
) -> None:
    """mlx-lm loads such a checkpoint without a word: it goes by the tensors."""
    planned = quantized.plan.quantization[path]

    def edit(shard: Tensors) -> Tensors:
        if f"{path}.weight" not in shard:
            return shard
        parts = [shard.pop(f"{path}.{leaf}", None) for leaf in ("weight", "scales", "biases")]
        weight = mx.dequantize(*parts, planned.group_size, planned.bits, mode=planned.mode)
        return shard | {f"{path}.weight": weight.astype(mx.bfloat16)}

    _noticed(path, edit, quantized, tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_path_with_other_bits_is_noticed(bits: int, quantized: Exported, tmp_path: Path) -> None:
    path = f"{L}2.mlp.gate"
    planned = quantized.plan.quantization[path]

    def edit(shard: Tensors) -> Tensors:
        if f"{path}.weight" not in shard:
            return shard
        parts = [shard[f"{path}.{leaf}"] for leaf in ("weight", "scales", "biases")]
        weight = mx.dequantize(*parts, planned.group_size, planned.bits, mode=planned.mode)
        packed = mx.quantize(weight, planned.group_size, bits)
        return shard | {
            f"{path}.{leaf}": array for leaf, array in zip(("weight", "scales", "biases"), packed)
        }

    _noticed(path, edit, quantized, tmp_path)


@pytest.mark.parametrize("path", [f"{L}2.mlp.gate", f"{L}2.mlp_res_proj", f"{L}3.self_attn.o_proj"])
def test_a_path_that_was_to_stay_dense_is_noticed(path: str, tmp_path: Path) -> None:
    made = exported("kimi_k3", "two-bank")

    def edit(shard: Tensors) -> Tensors:
        if f"{path}.weight" not in shard:
            return shard
        packed = mx.quantize(shard[f"{path}.weight"], 64, 8)
        return shard | {
            f"{path}.{leaf}": array for leaf, array in zip(("weight", "scales", "biases"), packed)
        }

    _noticed(path, edit, made, tmp_path)


def _noticed(path: str, edit: Damage, made: Exported, tmp_path: Path) -> None:
    copy = exports.damaged(made.path, tmp_path / "copy", edit)
    config = json.loads((copy / "config.json").read_text())
    config["quantization"].pop(path, None)
    (copy / "config.json").write_text(json.dumps(config))
    exports.load(copy)
    with pytest.raises(ReapError, match=f"{re.escape(path)} is not stored as"):
        check(copy, made)


@pytest.mark.parametrize(("format", "nan", "fine"), [("nvfp4", 127, 126), ("mxfp4", 255, 127)])
def test_every_formats_own_nan_is_noticed(format: str, nan: int, fine: int, tmp_path: Path) -> None:
    """E4M3 scales (nvfp4) and E8M0 scales (mxfp4) have different codes for it."""
    spec, source = exports.spec_of("qwen3_moe"), exports.source_checkpoint("qwen3_moe")
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"), high=format)
    result = exports.write(source, plan, tmp_path / "out")
    made = Exported(source, spec, plan, tmp_path / "out", result)
    name = "model.layers.0.mlp.switch_mlp.up_proj.scales"
    try:
        check(exports.damaged(made.path, tmp_path / "fine", _edited(name, _with(fine))), made)
    except ReapError as error:  # a number, but perhaps too wrong a one
        assert "off by" in error.message
    with pytest.raises(ReapError, match=f"{name} holds a value that is not finite"):
        check(exports.damaged(made.path, tmp_path / "bad", _edited(name, _with(nan))), made)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name",
    ["mlp.experts.10.up_proj", "mlp.experts.6.up_proj", "self_attn.q_proj"],
    ids=["high", "low", "trunk"],
)
def test_what_rounding_would_hide_is_noticed(name: str, value: float, tmp_path: Path) -> None:
    """mx.quantize makes numbers of a NaN; neither expert is a sample or chosen by a token."""
    name = f"model.layers.0.{name}.weight"
    source = models.copy_checkpoint(
        exports.source_checkpoint("qwen3_moe"),
        tmp_path / "source",
        _edited(name, _with(value, 700)),
    )
    spec = open_source(str(source)).spec()
    kept = exports.kept_experts(spec, "two-bank")
    assert kept[0][0][:6] == [2, 10, 8, 1, 6, 9] and kept[0][1] == 3
    plan = exports.hand_plan(spec, kept, high="mxfp4", trunk="8bit")
    with pytest.raises(CheckpointError, match=r"\.0\..*[uq]\w*_proj\.weight holds .* not finite"):
        exports.write(source, plan, tmp_path / "out")
    assert not list(tmp_path.glob("out"))


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("leaf", ["weight", "scales"])
def test_codes_that_are_not_finite_are_noticed(kind: str, leaf: str) -> None:
    """By what MLX makes of every code, which is a number times another."""
    packed, scales = mx.quantize(mx.full((256, 32), float(leaf == "weight")), mode=kind)
    codes = mx.broadcast_to(mx.arange(256, dtype=mx.uint32)[:, None] * 0x01010101, packed.shape)
    if leaf == "scales":
        codes = mx.broadcast_to(mx.arange(256, dtype=mx.uint8)[:, None], scales.shape)
    made = {"weight": packed, "scales": scales} | {leaf: mx.contiguous(codes)}
    values = mx.isfinite(mx.dequantize(*made.values(), mode=kind).astype(mx.float32))
    for code in range(256):
        rows = {name: array[code : code + 1] for name, array in made.items()}
        for prefix in ("", "path."):
            if mx.all(values[code]).item():
                check_finite({f"{prefix}{name}": array for name, array in rows.items()})
            else:
                with pytest.raises(CheckpointError, match=f"{prefix}{leaf} holds"):
                    check_finite({f"{prefix}{name}": array for name, array in rows.items()})


def test_experts_of_another_precision_than_the_sources_are_not_compared(tmp_path: Path) -> None:
    """A high bank may be requantized, too: then only its format and finiteness are checked."""
    spec = exports.spec_of("qwen3_moe")
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"), high="4bit-g64")
    exports.write(exports.source_checkpoint("qwen3_moe"), plan, tmp_path / "out")
    tensor = exports.raw_tensors(tmp_path / "out")["model.layers.0.mlp.switch_mlp.up_proj.weight"]
    assert (tensor.dtype, tensor.shape[-1]) == ("U32", 128 * 4 // 32)


# Safety


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An output directory with something in it, alone in its parent."""
    out = tmp_path / "parent" / "out"
    out.mkdir(parents=True)
    (out / "config.json").write_text("old")
    (out / "model-00001-of-00001.safetensors").write_text("old")
    return out


def left(out: Path) -> dict[str, str | bytes]:
    """Everything beside and below an output directory, without the plan."""
    files = (file for file in out.parent.rglob("*") if file.is_file())
    return {
        str(file.relative_to(out.parent)): file.read_bytes()
        for file in files
        if not file.name.endswith(".plan.json")
    }


def write(made: Exported, out: Path, *, plan: Plan | None = None, force: bool = False) -> Any:
    return exports.write(made.source, plan or made.plan, out, force=force)


QWEN = ("qwen3_moe", "two-bank")


def test_an_existing_output_is_refused(old: Path) -> None:
    before = left(old)
    with pytest.raises(ReapError, match="exists already"):
        write(exported(*QWEN), old)
    assert left(old) == before


def test_force_replaces_all_of_it(old: Path) -> None:
    (old / "model-00007-of-00007.safetensors").write_text("stale")
    made = exported(*QWEN)
    write(made, old, force=True)
    assert exports.raw_tensors(old) == exports.raw_tensors(made.path)
    assert {file.name for file in old.iterdir()} == {file.name for file in made.path.iterdir()}
    assert {file.name for file in old.parent.iterdir()} == {"out", "out.plan.json"}


FAULTS: dict[tuple[Any, str], BaseException] = {
    (writing, "sync"): OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    (exporting, "partial_export"): OSError(errno.EACCES, os.strerror(errno.EACCES)),
    (importlib.import_module("reap.export.content"), "stored_as"): RuntimeError("out of memory"),
    (exporting, "verify"): CheckpointError("damaged on the way"),
    (verifying, "check_forward"): CheckpointError("not finite"),
}


@pytest.mark.parametrize("where", FAULTS, ids=[name for _, name in FAULTS])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_before_a_shard_is_done_or_of_a_check_leaves_nothing_behind(
    where: tuple[Any, str], force: bool, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported(*QWEN)
    if not force:
        shutil.rmtree(old)
    before = left(old)
    _fails(where, FAULTS[where], made, old, force, monkeypatch)
    assert left(old) == before
    assert not list(old.parent.glob("*.partial"))


LATER: dict[tuple[Any, str], BaseException] = {
    (exporting, "write_index"): OSError(errno.EACCES, os.strerror(errno.EACCES)),
    (exporting, "copy_files"): OSError(errno.EIO, os.strerror(errno.EIO)),
    (exporting, "sync"): OSError(errno.EIO, os.strerror(errno.EIO)),
    (exporting, "write_rest"): KeyError("a bug"),
    (verifying, "check_forward"): KeyboardInterrupt(),
}


@pytest.mark.parametrize("where", LATER, ids=[name for _, name in LATER])
@pytest.mark.parametrize("force", [False, True])
def test_a_later_failure_leaves_what_can_be_taken_up(
    where: tuple[Any, str], force: bool, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported(*QWEN)
    if not force:
        shutil.rmtree(old)
    before = left(old)
    _fails(where, LATER[where], made, old, force, monkeypatch)
    kept = {name: content for name, content in left(old).items() if ".partial" not in name}
    assert kept == before
    monkeypatch.undo()
    monkeypatch.setattr(Content, "modules", lambda *args: pytest.fail("a shard was written anew"))
    exports.write(made.source, made.plan, old, force=force, resume=True)
    assert files(old) == files(made.path)
    assert not list(old.parent.glob("*.partial"))


def _fails(
    where: tuple[Any, str],
    fault: BaseException,
    made: Exported,
    out: Path,
    force: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise fault

    owner, name = where
    monkeypatch.setattr(owner, name, fail)
    translated = isinstance(fault, OSError) and name != "partial_export"
    with pytest.raises(ReapError if translated else type(fault)) as caught:
        write(made, out, force=force)
    if translated:
        assert str(out) in str(caught.value) and str(fault.strerror) in str(caught.value)


def files(directory: Path) -> dict[str, bytes]:
    """Every file below, but for what names the plan's own file."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing.Writer.write

    def write_to_full_disk(self: Any, name: str, *args: Any) -> None:
        (self._partial.checkpoint / name).symlink_to("/dev/full")
        real(self, name, *args)

    monkeypatch.setattr(writing.Writer, "write", write_to_full_disk)
    with pytest.raises(ReapError, match=r"could not write .*out: No space left on device"):
        write(exported(*QWEN), tmp_path / "out")


def test_a_disk_that_is_too_small_is_named_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported("kimi_k3", "two-bank")
    need = made.plan.waterfall.weights + made.plan.waterfall.carried
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    copied |= exports.EXTRA_FILES.keys()
    need += sum((made.source / name).stat().st_size for name in copied)
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(Path(path))
        return SimpleNamespace(free=need - 1)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(ReapError, match=f"needs {need:,} bytes, .* has {need - 1:,} free"):
        write(made, out)
    assert asked == [out.parent] and not out.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_place_that_nothing_can_be_put_in_is_found_before_anything_is_written(
    force: bool, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for out, message in (link, "link is a link to nothing"), (tmp_path / ("x" * 244), "too long"):
        with pytest.raises(ReapError, match=message):
            write(exported(*QWEN), out, force=force)
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".json"}


def test_the_source_is_never_written_over(tmp_path: Path) -> None:
    source = shutil.copytree(exports.source_checkpoint("qwen3_moe"), tmp_path / "source")
    made = replace(exported(*QWEN), source=source)
    (tmp_path / "link").symlink_to(source)
    before = left(source)
    for out in (source, tmp_path / "link", tmp_path / "link" / ".." / "source", tmp_path):
        plan_file = tmp_path.parent / f"{tmp_path.name}.plan.json"
        made.plan.save(plan_file, force=True)
        with pytest.raises(ReapError, match="source"):
            exports.export(
                open_source(str(source)), made.plan, out, plan_file=plan_file, force=True
            )
    assert left(source) == before


def test_only_a_checkpoint_is_replaced_by_force(old: Path) -> None:
    (old / "config.json").rename(old / "thesis.tex")
    before = left(old)
    with pytest.raises(ReapError, match="is not a checkpoint"):
        write(exported(*QWEN), old, force=True)
    assert left(old) == before
    for file in old.iterdir():
        file.unlink()
    write(exported(*QWEN), old, force=True)


def test_the_plan_is_never_written_over(old: Path) -> None:
    made = exported(*QWEN)
    made.plan.save(old / "plan.json")
    before = left(old)
    source = open_source(str(made.source))
    with pytest.raises(ReapError, match="holds the plan"):
        exports.export(source, made.plan, old, plan_file=old / "plan.json", force=True)
    assert left(old) == before


def test_a_missing_plan_file_is_found_before_anything_is_written(tmp_path: Path) -> None:
    made = exported(*QWEN)
    source = open_source(str(made.source))
    told: list[str] = []
    with pytest.raises((ReapError, OSError), match=r"no\.json|No such file"):
        exports.export(
            source,
            made.plan,
            tmp_path / "out",
            plan_file=tmp_path / "no.json",
            progress=lambda doing, done, total: told.append(doing),
        )
    assert not told and not (tmp_path / "out").exists()


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    models.write_qwen3_moe(tmp_path / "other-model", experts=12, layers=4, mlp_only_layers=[1])
    made = exported(*QWEN)
    mine, other = made.spec.model_sha256[:12], None
    other = open_checkpoint(str(tmp_path / "other-model")).model_sha256[:12]
    with pytest.raises(ReapError, match=rf"{made.spec.model}.*{mine}.*other-model.*{other}"):
        exports.write(tmp_path / "other-model", made.plan, tmp_path / "out")


def _layers(plan: Plan, change: Callable[[LayerPlan], LayerPlan]) -> Plan:
    return replace(plan, layers=tuple(change(layer) for layer in plan.layers))


EDITS: dict[str, tuple[tuple[str, str], str, Callable[[Plan], Plan]]] = {
    "layer left out": (QWEN, "MoE layers", lambda p: replace(p, layers=p.layers[1:])),
    "too few for the router": (
        ("qwen3_moe", "stock"),
        "layer 0 keeps 1 .* 2",
        lambda p: _layers(p, lambda layer: replace(layer, kept=layer.kept[:1], high=1)),
    ),
    "none kept": (
        ("kimi_k3", "stock"),
        "layer 1 keeps 0",
        lambda p: _layers(p, lambda layer: replace(layer, kept=(), high=0)),
    ),
    "groups left unequal": (
        ("deepseek_v3-groups", "stock"),
        "group",
        lambda p: _layers(p, lambda x: replace(x, kept=x.kept[:-4], high=x.high - 4)),
    ),
    "groups mixed up": (
        ("deepseek_v3-groups", "stock"),
        "group",
        lambda p: _layers(p, lambda layer: replace(layer, kept=layer.kept[::-1])),
    ),
    "banks within groups": (
        ("deepseek_v3-groups", "per-layer"),
        "two banks",
        lambda p: replace(_layers(p, lambda x: replace(x, high=4)), layout="two-bank"),
    ),
    "bytes left as they were": (
        QWEN,
        "waterfall",
        lambda p: _layers(p, lambda layer: replace(layer, kept=layer.kept[:-1], high=1)),
    ),
    "more experts than there are": (
        QWEN,
        "12 experts",
        lambda p: replace(p, num_experts=16),
    ),
    "router at 4 bits": (
        QWEN,
        "mlp.gate.* 8 bit",
        lambda p: replace(p, trunk={"model.layers.0.mlp.gate": Format(4, 64, "affine")}),
    ),
    "norm quantized": (
        QWEN,
        "model.norm",
        lambda p: replace(p, trunk={"model.norm": Format(8, 64, "affine")}),
    ),
    "path that is nowhere": (
        QWEN,
        "model.nowhere",
        lambda p: replace(p, trunk={"model.nowhere": Format(8, 64, "affine")}),
    ),
    "group size that does not divide": (
        QWEN,
        "model.layers.0.self_attn.q_proj",
        lambda p: replace(p, trunk={"model.layers.0.self_attn.q_proj": Format(8, 256, "affine")}),
    ),
    "projection without a format": (
        QWEN,
        "up_proj",
        lambda p: replace(p, high={n: f for n, f in p.high.items() if n != "up_proj"}),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_plan_that_the_model_cannot_have_is_refused_before_writing(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, message, change = EDITS[edit]
    made = exported(*case)
    monkeypatch.setattr(Content, "modules", lambda *args: pytest.fail("it was written"))
    with pytest.raises(ReapError, match=message):
        write(made, tmp_path / "out", plan=change(made.plan))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["expert_counts", "expert_bank_split", "layers"])
def test_a_plan_edited_in_one_place_only_does_not_load(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    exported(*QWEN).plan.save(path)
    data = json.loads(path.read_text())
    if name == "layers":
        data["layers"][0]["kept"].pop()
    else:
        data[name][0] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=r"expert_(counts|bank_split)\[0\] is "):
        Plan.load(path)


def test_a_wrong_number_of_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cause: here a norm was widened, at first only when it is written."""
    made = exported(*QWEN)
    modules, foreseen = Content.modules, Content._foreseen

    def widened(self: Content, part: Any, wanted: Any) -> Any:
        for found in modules(self, part, wanted):
            yield {n: a.astype(mx.float32) if "norm" in n else a for n, a in found.items()}

    def more(self: Content, part: Any) -> dict[str, Tensor]:
        found = foreseen(self, part)
        return {n: replace(t, nbytes=2 * t.nbytes) if "norm" in n else t for n, t in found.items()}

    monkeypatch.setattr(Content, "modules", widened)
    with pytest.raises(ReapError, match=r"norm.* is not what was foreseen"):
        write(made, tmp_path / "out")
    monkeypatch.setattr(Content, "_foreseen", more)
    with pytest.raises(ReapError, match=r"the export has .* the plan says"):
        write(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Shards


def test_small_shards_are_indexed_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 200_000
    monkeypatch.setattr(exporting, "shards", functools.partial(shards, limit=limit))
    made = exported(*QWEN)
    out = tmp_path / "out"
    write(made, out)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 5
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    where = {}
    for file in files:
        shard = mx.load(str(file))
        assert sum(array.nbytes for array in shard.values()) <= limit or len(shard) == 1
        where |= dict.fromkeys(shard, file.name)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == made.result.nbytes
    assert exports.raw_tensors(out) == exports.raw_tensors(made.path)
    np.testing.assert_array_equal(
        exports.logits(exports.load(out)), exports.logits(exports.load(made.path))
    )


@pytest.mark.parametrize("family", ["kimi_k3", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_where_the_bytes_of_experts_are(family: str) -> None:
    model = open_source(str(exports.source_checkpoint(family)))
    index, ids = model.moe_layers[-1], (5, 0, 3)
    wanted = model.experts_of(model.layer_weights(index, ids))
    assert len(wanted) == 3
    for projection, leaves in wanted.items():
        found = model.expert_bytes(index, projection, ids)
        assert found.keys() == leaves.keys()
        for leaf, array in leaves.items():
            content = b"".join(read_ranges(found[leaf]))
            assert content == np.array(array.reshape(-1).view(mx.uint8)).tobytes()


@pytest.mark.parametrize("change", ["rows", "values"])
def test_experts_that_mlx_lm_changes_are_not_copied(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it turned one of the matrices, or scaled it."""
    model = open_source(str(exports.source_checkpoint("qwen3_moe")))
    real = model.model.sanitize

    def changed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {
            name: (array[:, ::-1] if change == "rows" else 2 * array)
            if name.endswith("switch_mlp.up_proj.weight")
            else array
            for name, array in real(weights).items()
        }

    monkeypatch.setattr(model.model, "sanitize", changed)
    index = model.moe_layers[0]
    assert not model.expert_bytes(index, "up_proj", (0,))
    assert model.expert_bytes(index, "down_proj", (0,))


def of_bytes(parts: dict[int | None, dict[str, int]]) -> dict[int | None, dict[str, Tensor]]:
    return {
        part: {name: Tensor("U8", (size,), size) for name, size in sizes.items()}
        for part, sizes in parts.items()
    }


def test_shards_end_with_layers_and_are_no_larger_than_the_largest() -> None:
    foreseen = of_bytes(
        {
            0: {"0.a.weight": 30, "0.b.weight": 20},
            1: {"1.a.weight": 20},
            2: {"2.a.weight": 20, "2.a.scales": 15, "2.b.weight": 35, "2.c.weight": 30},
            3: {"3.a.weight": 60},
            None: {"embed.weight": 130, "norm.weight": 1},
        }
    )

    def made(limit: int) -> list[tuple[int, list[int | None]]]:
        return [(shard.nbytes, list(shard.parts)) for shard in shards(foreseen, limit)]

    # The largest layer has 100: two layers go together, the rest needs files of its own.
    assert made(1000) == [(70, [0, 1]), (100, [2]), (60, [3]), (130, [None]), (1, [None])]
    assert made(70) == [(70, [0, 1]), (70, [2]), (30, [2]), (60, [3]), (130, [None]), (1, [None])]
    assert shards(foreseen)[0].name == "model-00001-of-00005.safetensors"
    assert {n for shard in shards(foreseen) for n in shard.tensors} == {
        name for part in foreseen.values() for name in part
    }


def test_what_is_larger_than_a_shard_is_divided_as_far_as_it_can_be() -> None:
    """A K3 layer with all experts: the codes of a projection alone are just below 5 GB."""
    foreseen = of_bytes(
        {1: {"up.weight": 4_932_501_504, "up.scales": 308_281_344, "gate.weight": 10}}
    )
    assert [list(shard.tensors) for shard in shards(foreseen)] == [
        ["up.weight"],
        ["up.scales", "gate.weight"],
    ]


@pytest.mark.parametrize("limit", [60_000, 5 * 10**9])
def test_a_module_is_let_go_once_it_is_written(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are in memory, one being written and the next one, however they are cut into files."""
    made, held, modules = exported("kimi_k3", "identity"), [], Content.modules
    sizes: dict[str, int] = {}
    for shard in outline(open_source(str(made.source)), made.plan).shards:
        for name, tensor in shard.tensors.items():
            module = name.rpartition(".")[0]
            sizes[module] = sizes.get(module, 0) + tensor.nbytes

    def measured(self: Content, part: Any, wanted: Any) -> Any:
        for found in modules(self, part, wanted):
            yield found
            held.append(mx.get_active_memory())

    mx.clear_cache()
    start = mx.get_active_memory()
    monkeypatch.setattr(exporting, "shards", functools.partial(shards, limit=limit))
    monkeypatch.setattr(Content, "modules", measured)
    write(made, tmp_path / "out")
    assert len(held) > 50 and max(held) - start < 2 * max(sizes.values()) + 2**16


def test_what_is_not_written_as_it_was_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = writing._write, exported("kimi_k3", "identity")
    projection = made.spec.moe_layers[0].projections[0]
    codes = projection.rows * projection.columns // 2

    def faulty(file: Any, buffer: Any) -> None:
        if isinstance(buffer, bytes) and len(buffer) == codes:  # copied
            buffer = bytearray(buffer)
            buffer[0] ^= 1
        real(file, buffer)

    monkeypatch.setattr(writing, "_write", faulty)
    with pytest.raises(CheckpointError, match=r"expert \d+ in .* differs from the source"):
        write(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_check_plan_accepts_what_fits() -> None:
    for case in CASES:
        made = exported(*case)
        check_plan(open_source(str(made.source)), made.plan, made.spec)
