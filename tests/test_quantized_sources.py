"""Sources that MLX has quantized already, as mlx_lm.convert writes them: experts are stacked."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from exports import ROOT, Raw

from reap.artifacts import Format, Plan
from reap.errors import ReapError
from reap.evaluate import EvaluationSettings, evaluate
from reap.models.source import open_source
from reap.models.text import TextSet
from reap.planning import PlanSettings
from reap.planning.precision import choose_precision

CONVERSIONS: dict[str, dict[str, Any]] = {
    "4bit": {"q_bits": 4, "q_group_size": 32},
    "8bit": {"q_bits": 8, "q_group_size": 64},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
}
SOURCES = [
    ("qwen3_moe", "4bit"),
    ("qwen3_moe", "8bit"),
    ("qwen3_moe", "mxfp4"),
    ("qwen3_moe", "nvfp4"),
    ("qwen3_moe", "mxfp8"),
    ("deepseek_v3-groups", "nvfp4"),
    ("deepseek_v3-groups", "4bit"),
    ("kimi_k3", "4bit"),
]
CASES = [
    (family, kind, shape)
    for family, kind in SOURCES
    for shape in exports.SHAPES
    if not (family.endswith("groups") and shape == "two-bank")
]


@functools.cache
def converted(family: str, kind: str) -> Path:
    """The family's checkpoint through mlx-lm's own converter."""
    path = ROOT / family / f"mlx-{kind}"
    source = exports.source_checkpoint(family)
    mlx_lm.convert(str(source), str(path), quantize=True, **CONVERSIONS[kind])
    return path


@functools.cache
def pruned(family: str, kind: str, shape: str) -> tuple[Path, Plan, Path]:
    """(source, plan, export)"""
    source = converted(family, kind)
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, shape))
    out = ROOT / family / f"mlx-{kind}-{shape}"
    exports.write(source, plan, out)
    return source, plan, out


@pytest.mark.parametrize(("family", "kind", "shape"), CASES)
def test_pruned_is_the_quantized_source_with_dropped_experts_masked(
    family: str, kind: str, shape: str
) -> None:
    source, plan, out = pruned(family, kind, shape)
    assert plan.layout == ("stock" if shape == "identity" else shape)
    found = exports.logits(exports.load(out))
    wanted = exports.logits(exports.masked_source(source, plan))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "kind", "shape"), CASES)
def test_rows_of_experts_and_routers_are_the_sources_bytes(
    family: str, kind: str, shape: str
) -> None:
    source, plan, out = pruned(family, kind, shape)
    before, after = exports.raw_tensors(source), exports.raw_tensors(out)
    routers = 0
    for layer in plan.layers:
        experts = plan.experts_path[layer.layer]
        block = experts.removesuffix("switch_mlp")
        for name in [n for n in before if n.startswith(f"{block}gate.") or "e_score" in n]:
            if not name.startswith(block):
                continue
            _same_rows(after[name], before[name], layer.kept, name)
            routers += 1
        bank = f"{experts}.high" if layer.split else experts
        for name, tensor in before.items():
            if name.startswith(f"{experts}.") and layer.high:
                ours = after[name.replace(experts, bank)]
                _same_rows(ours, tensor, layer.kept[: layer.high], name)
    leaves = {"qwen3_moe": 3, "deepseek_v3-groups": 2, "kimi_k3": 4}[family]
    if kind == "mxfp4":  # mlx-lm's quantizer makes the router 8 bit affine in this mode, too
        assert Format(8, 64, "affine") in {
            m.format for m in open_source(str(source)).spec().modules
        }
    assert routers == leaves * len(plan.layers)


def _same_rows(ours: Raw, theirs: Raw, kept: tuple[int, ...], name: str) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == (len(kept), *theirs.shape[1:]), name
    for row, expert in enumerate(kept):
        assert ours.row(row) == theirs.row(expert), (name, expert)


@pytest.mark.parametrize(("family", "kind"), SOURCES)
def test_identity_changes_no_byte(family: str, kind: str) -> None:
    source, _, out = pruned(family, kind, "identity")
    assert exports.raw_tensors(out) == {
        name: tensor for name, tensor in exports.raw_tensors(source).items()
    }
    before = json.loads((source / "config.json").read_text())["quantization"]
    after = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in after
    for path, own in after["quantization"].items():
        if isinstance(own, dict):  # every path is named, as the source's default or its exception
            theirs = before.get(path) or {k: before[k] for k in ("bits", "group_size", "mode")}
            assert own == {"mode": "affine"} | theirs, path


@pytest.mark.parametrize(("kind", "trunk", "bits"), [("8bit", "4bit", 4), ("8bit", "6bit", 6)])
def test_a_quantized_trunk_can_be_made_smaller(
    kind: str, trunk: str, bits: int, tmp_path: Path
) -> None:
    source = converted("qwen3_moe", kind)
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "two-bank"), trunk=trunk)
    result = exports.write(source, plan, tmp_path / "out")
    written = exports.raw_tensors(tmp_path / "out")
    assert sum(len(t.data) for t in written.values()) == plan.waterfall.weights
    assert result.loaded_bytes == plan.waterfall.weights < spec.trunk_bytes() + spec.experts_bytes
    theirs = mx.load(str(source / "model.safetensors"))
    path = "model.layers.0.self_attn.q_proj"
    assert plan.quantization[path].bits == bits
    parts = [theirs[f"{path}.{leaf}"] for leaf in ("weight", "scales", "biases")]
    dense = mx.dequantize(*parts, group_size=64, bits=8)
    wanted = mx.quantize(dense, 64, bits)
    for leaf, array in zip(("weight", "scales", "biases"), wanted):
        assert written[f"{path}.{leaf}"].data == bytes(memoryview(array.view(mx.uint8))), leaf
    assert "model.layers.0.mlp.gate" not in plan.trunk  # it is at 8 bits already
    assert np.isfinite(exports.logits(exports.load(tmp_path / "out"))).all()


def test_a_4_bit_source_does_not_grow() -> None:
    spec = open_source(str(converted("qwen3_moe", "4bit"))).spec()
    precision = choose_precision(spec, PlanSettings(size=1, trunk="8bit"))
    assert precision.trunk == {}
    with pytest.raises(ReapError, match="not smaller"):
        choose_precision(spec, PlanSettings(size=1, high="8bit"))


def test_an_export_of_a_quantized_source_is_evaluated() -> None:
    source, plan, out = pruned("qwen3_moe", "4bit", "two-bank")
    found = evaluate(
        open_source(str(out)),
        [TextSet("a", "a", "a0", ("One two three four.", "Five six seven eight."))],
        EvaluationSettings(),
        reference=open_source(str(source)),
    )
    assert found.weight_bytes == plan.waterfall.weights
    assert found.expert_bytes == plan.waterfall.high + plan.waterfall.low
    assert found.mean_kl.value > 0
