"""Exports in the source's Hugging Face layout: byte slices that other libraries load."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import mlx_lm
import models
import numpy as np
import pytest
from exports import ROOT, Raw, exported
from mlx_lm.utils import load_model

from reap.artifacts import Evaluation, Format, Plan
from reap.artifacts.manifest import check_manifest
from reap.cli import main
from reap.errors import CheckpointError, ReapError
from reap.export import ExportResult, export, export_hf, hf, outline_hf
from reap.models.source import open_source

FAMILIES = (*exports.FAMILIES, "fp8")

EXPERT = {
    "kimi_k3": "language_model.model.layers.{}.block_sparse_moe.experts.{}.",
    "qwen3_moe": "model.layers.{}.mlp.experts.{}.",
    "deepseek_v3": "model.layers.{}.mlp.experts.{}.",
    "glm4_moe": "model.layers.{}.mlp.experts.{}.",
}
ROUTERS = {
    "kimi_k3": [
        "language_model.model.layers.{}.block_sparse_moe.gate.weight",
        "language_model.model.layers.{}.block_sparse_moe.gate.e_score_correction_bias",
    ],
    "qwen3_moe": ["model.layers.{}.mlp.gate.weight"],
    "deepseek_v3": [
        "model.layers.{}.mlp.gate.weight",
        "model.layers.{}.mlp.gate.e_score_correction_bias",
    ],
}
ROUTERS["glm4_moe"] = ROUTERS["deepseek_v3"]


@functools.cache
def source_of(family: str) -> Path:
    if family != "fp8":
        return exports.source_checkpoint(family)
    original = exports.source_checkpoint("deepseek_v3")
    return models.fp8_copy(original, ROOT / "source-fp8")


@functools.cache
def plan_of(family: str) -> Plan:
    """Three quarters of the experts of every layer, shuffled."""
    if family != "fp8":
        return exported(family, "stock").plan
    spec = open_source(str(source_of(family))).spec()
    return exports.hand_plan(spec, exports.kept_experts(spec, "stock"))


def write(source: Path, plan: Plan, out: Path, **options: Any) -> ExportResult:
    plan_file = out.with_name(f"{out.name}.plan.json")
    plan.save(plan_file, force=True)
    return export_hf(open_source(str(source)), plan, out, plan_file=plan_file, **options)


@functools.cache
def written(family: str) -> Path:
    """Do not write to it."""
    out = ROOT / f"hf-{family}"
    write(source_of(family), plan_of(family), out)
    return out


def sources_tensors(family: str) -> dict[str, Raw]:
    """What the export must hold, worked out from the names of the released checkpoints."""
    plan, tensors = plan_of(family), exports.raw_tensors(source_of(family))
    wanted = dict(tensors)
    for layer in plan.layers:
        for name in tensors:
            if name.startswith(EXPERT[plan.model_type].format(layer.layer, "")[:-1]):
                del wanted[name]
        for slot, expert in enumerate(layer.kept):
            old = EXPERT[plan.model_type].format(layer.layer, expert)
            new = EXPERT[plan.model_type].format(layer.layer, slot)
            for name, tensor in tensors.items():
                if name.startswith(old):
                    wanted[name.replace(old, new)] = tensor
        for router in ROUTERS[plan.model_type]:
            tensor = tensors[router.format(layer.layer)]
            wanted[router.format(layer.layer)] = Raw(
                tensor.dtype,
                (len(layer.kept), *tensor.shape[1:]),
                b"".join(tensor.row(expert) for expert in layer.kept),
            )
    return wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_a_slice_of_the_source(family: str) -> None:
    found, wanted = exports.raw_tensors(written(family)), sources_tensors(family)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name] == tensor, name
    assert len(found) < len(exports.raw_tensors(source_of(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_number_of_experts_changes_in_the_config(family: str) -> None:
    before, after = (
        json.loads((path / "config.json").read_text())
        for path in (source_of(family), written(family))
    )
    name = {"kimi_k3": "num_experts", "qwen3_moe": "num_experts"}.get(family, "n_routed_experts")
    text = before.get("text_config", before)
    assert text[name] > len(plan_of(family).layers[0].kept)
    text[name] = len(plan_of(family).layers[0].kept)
    assert after == before
    assert list(after) == list(before)


@pytest.mark.parametrize("family", exports.FAMILIES)
def test_files_beside_the_weights_are_the_sources(family: str) -> None:
    source, out = source_of(family), written(family)
    for name in (*exports.EXTRA_FILES, *models.TOKENIZER):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "reap_model.py").exists()
    card = (out / "README.md").read_text()
    assert "library_name: transformers" in card and "trust-remote-code" not in card
    assert "| experts, high bank |" in card and "| experts, low bank |" not in card
    origin = json.loads((out / "reap.json").read_text())
    assert origin["source"] == plan_of(family).provenance.model
    kept = {str(layer.layer): list(layer.kept) for layer in plan_of(family).layers}
    assert origin["kept"] == kept


def padding(source: Path) -> int:
    """Bytes of a source that mlx-lm does not keep."""
    spec = open_source(str(source)).spec()
    routers = sum(spec.num_experts * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    size = sum(len(tensor.data) for tensor in exports.raw_tensors(source).values())
    return size - spec.trunk_bytes() - spec.experts_bytes - routers - spec.carried_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_bytes_are_written(family: str) -> None:
    """Plans count what mlx-lm makes of the source: two bytes for a weight in FP8, and K3's A_log
    without its padding."""
    size = sum(len(tensor.data) for tensor in exports.raw_tensors(written(family)).values())
    water = plan_of(family).waterfall
    index = json.loads((written(family) / models.INDEX).read_text())
    assert index["metadata"]["total_size"] == size
    if family == "fp8":
        assert size < water.weights
    else:
        assert size == water.weights + water.carried + padding(source_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_mlx_lm_computes_what_the_mlx_export_computes(family: str, tmp_path: Path) -> None:
    if family == "fp8":
        exports.write(source_of(family), plan_of(family), tmp_path / "mlx")
        ours = tmp_path / "mlx"
    else:
        ours = exported(family, "stock").path
    found, wanted = models.load_plain(written(family)), models.load_plain(ours)
    tokens = mx.array([exports.TOKENS])
    assert mx.array_equal(found(tokens), wanted(tokens))


def test_shards_are_limited_and_indexed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 300_000
    monkeypatch.setattr(hf, "SHARD_BYTES", limit)
    monkeypatch.setattr("reap.models.checkpoint._CHUNK", 1000)
    write(source_of("kimi_k3"), plan_of("kimi_k3"), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 10
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert exports.raw_tensors(tmp_path / "out") == exports.raw_tensors(written("kimi_k3"))
    index = json.loads((tmp_path / "out" / models.INDEX).read_text())["weight_map"]
    layers: list[int] = []
    for file in files:
        tensors = mx.load(str(file))
        assert all(index[name] == file.name for name in tensors)
        if len(tensors) > 1:
            assert sum(array.nbytes for array in tensors.values()) <= limit
        layers += sorted({int(n.split(".layers.")[1].split(".")[0]) for n in tensors if "rs." in n})
    assert layers == sorted(layers)
    assert len(index) == len(exports.raw_tensors(written("kimi_k3")))


def test_an_export_that_was_cut_off_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 300_000)
    source, plan = source_of("kimi_k3"), plan_of("kimi_k3")
    write(source, plan, tmp_path / "whole")
    foreseen = outline_hf(open_source(str(source)), plan)
    write_shard, names = hf.Writer.write, [shard.name for shard in foreseen.shards]

    def stopped(self: Any, name: str, *more: Any) -> None:
        if name == names[4]:
            raise KeyboardInterrupt
        write_shard(self, name, *more)

    monkeypatch.setattr(hf.Writer, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(source, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again: list[str] = []

    def counted(self: Any, name: str, *more: Any) -> None:
        again.append(name)
        write_shard(self, name, *more)

    monkeypatch.setattr(hf.Writer, "write", counted)
    with pytest.raises(ReapError, match="holds an export that was not finished"):
        write(source, plan, tmp_path / "out")
    plan_file = tmp_path / "out.plan.json"
    with pytest.raises(ReapError, match="the layout has changed"):
        export(open_source(str(source)), plan, tmp_path / "out", plan_file=plan_file, resume=True)
    write(source, plan, tmp_path / "out", resume=True)
    assert again == names[4:]
    files = [f.name for f in (tmp_path / "whole").iterdir() if f.name != "__pycache__"]
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {check.status for check in check_manifest(tmp_path / "out")} == {"ok"}
    assert {*foreseen.copied, *names} <= {*files}
    sizes = exports.raw_tensors(tmp_path / "out")
    assert foreseen.nbytes == sum(len(tensor.data) for tensor in sizes.values())


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Of a shard with an odd number of bytes before wider types."""

    def odd(shard: models.Tensors) -> models.Tensors:
        extra = {"vision_tower.a": mx.zeros(3, mx.uint8), "vision_tower.z": mx.zeros(5)}
        return extra | shard if "language_model.model.norm.weight" in shard else shard

    source = models.copy_checkpoint(source_of("kimi_k3"), tmp_path / "s", odd)
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    write(source, plan, tmp_path / "out")
    for file in (tmp_path / "out").glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0
        header = json.loads(content[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        size = {"F32": 4, "BF16": 2, "U8": 1}
        assert all(t["data_offsets"][0] % size[t["dtype"]] == 0 for t in header.values())
    carried = exports.raw_tensors(tmp_path / "out")["vision_tower.z"]
    assert carried == exports.raw_tensors(source)["vision_tower.z"]


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    source = models.with_prediction_layers(
        source_of("deepseek_v3"), tmp_path / "s", 1, num_nextn_predict_layers=1
    )
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    write(source, plan, tmp_path / "out")
    assert exports.raw_tensors(tmp_path / "out").keys() == sources_tensors("deepseek_v3").keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


def test_experts_that_the_quantization_names_are_renumbered(tmp_path: Path) -> None:
    source, plan = source_of("fp8"), plan_of("fp8")
    layer = plan.layers[1]
    dropped = next(e for e in range(plan.num_experts) if e not in layer.kept)
    last = layer.kept[-1]
    at = f"model.layers.{layer.layer}.mlp.experts."
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    names = ["lm_head", "re:.*mlp\\.gate$", f"{at}{last}.up_proj", f"{at}{dropped}", f"{at}{last}"]
    codes = {n for n, t in exports.raw_tensors(source).items() if t.dtype == "F8_E4M3"}

    def copy(name: str, ignored: list[str]) -> Path:
        path = models.copy_checkpoint(
            source, tmp_path / name, quantization_config=quantization | {"ignore": ignored}
        )
        for file in path.glob("model*.safetensors"):
            models.relabel(file, codes, "F8_E4M3")
        return path

    path = copy("named", names)
    made_for = open_source(str(path)).spec()
    plan = exports.hand_plan(made_for, exports.kept_experts(made_for, "stock"))
    write(path, plan, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    slot = len(layer.kept) - 1
    assert config["quantization_config"] == quantization | {
        "ignore": ["lm_head", "re:.*mlp\\.gate$", f"{at}{slot}.up_proj", f"{at}{slot}"]
    }
    path = copy("pattern", ["re:.*experts\\.(3|4)\\.up_proj"])
    made_for = open_source(str(path)).spec()
    plan = exports.hand_plan(made_for, exports.kept_experts(made_for, "stock"))
    with pytest.raises(CheckpointError, match="names experts by a pattern"):
        write(path, plan, tmp_path / "no")


def test_pruning_an_export_again_is_pruning_once(tmp_path: Path) -> None:
    once, plan = written("qwen3_moe"), plan_of("qwen3_moe")
    again = exports.hand_plan(
        open_source(str(once)).spec(), {p.layer: ((6, 1, 4), 3) for p in plan.layers}
    )
    direct = exports.hand_plan(
        open_source(str(source_of("qwen3_moe"))).spec(),
        {p.layer: ([p.kept[i] for i in (6, 1, 4)], 3) for p in plan.layers},
    )
    write(once, again, tmp_path / "again")
    write(source_of("qwen3_moe"), direct, tmp_path / "direct")
    assert exports.raw_tensors(tmp_path / "again") == exports.raw_tensors(tmp_path / "direct")
    exports.write(once, again, tmp_path / "mlx")
    assert not (tmp_path / "mlx" / "reap.json").exists()


# Refusals


def refused(family: str, plan: Plan, tmp_path: Path, message: str, hint: str = "") -> None:
    with pytest.raises(ReapError, match=message) as found:
        write(source_of(family), plan, tmp_path / "out")
    assert hint in (found.value.hint or "")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))


def test_a_low_bank_is_refused(tmp_path: Path) -> None:
    plan = exported("kimi_k3", "two-bank").plan
    low, kept = sum(p.low for p in plan.layers), sum(len(p.kept) for p in plan.layers)
    message = rf"has {low} of {kept} experts in the low bank \(2-bit g128\)"
    refused("kimi_k3", plan, tmp_path, message, "--layout stock --low none")


def test_counts_that_differ_are_refused_with_the_counts(tmp_path: Path) -> None:
    plan = plan_of("kimi_k3")
    layers = (replace(plan.layers[0], kept=plan.layers[0].kept[:20], high=20), *plan.layers[1:])
    plan = replace(plan, layers=layers, layout="per-layer")
    message = "the plan keeps 20 in 1 layers, 48 in 4 layers"
    refused("kimi_k3", plan, tmp_path, message, "--layout stock --low none")


def test_another_trunk_is_refused(tmp_path: Path) -> None:
    spec = exports.spec_of("kimi_k3")
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"), trunk="8bit")
    refused("kimi_k3", plan, tmp_path, r"matrices outside the experts anew, .* as 8-bit", "--trunk")


def test_another_high_bank_is_refused(tmp_path: Path) -> None:
    spec = exports.spec_of("qwen3_moe")
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"), high="mxfp8")
    refused("qwen3_moe", plan, tmp_path, "is 16-bit, the plan stores it as mxfp8", "--high source")


@pytest.mark.parametrize("quantize", [True, False])
def test_an_mlx_source_is_refused(quantize: bool, tmp_path: Path) -> None:
    source = exports.source_checkpoint("qwen3_moe")
    mlx_lm.convert(str(source), str(tmp_path / "mlx"), quantize=quantize, q_group_size=32)
    spec = open_source(str(tmp_path / "mlx")).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    with pytest.raises(ReapError, match="mlx is an MLX checkpoint with stacked experts"):
        write(tmp_path / "mlx", plan, tmp_path / "out")


def test_another_models_plan_is_refused(tmp_path: Path) -> None:
    plan = plan_of("qwen3_moe")
    other = replace(plan, provenance=replace(plan.provenance, model_sha256="0" * 64))
    refused("qwen3_moe", other, tmp_path, "the plan was made for")


def test_a_router_that_is_not_where_it_should_be_is_refused(tmp_path: Path) -> None:
    def elsewhere(shard: models.Tensors) -> models.Tensors:
        return {n.replace("gate.e_score", "gate.extra.e_score"): a for n, a in shard.items()}

    source = models.copy_checkpoint(source_of("deepseek_v3"), tmp_path / "s", elsewhere)
    with pytest.raises(CheckpointError, match=r"layer 1 of .* has 1 tensors of routers .* 2 are"):
        hf._pieces(open_source(str(source)), plan_of("deepseek_v3"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**4})())
    refused("qwen3_moe", plan_of("qwen3_moe"), tmp_path, "free|room|space")


Edit = Callable[[models.Tensors], models.Tensors]


@pytest.mark.parametrize(
    ("family", "name", "bits"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.9.up_proj.weight", 0x7FC0),
        ("fp8", "model.layers.2.mlp.experts.9.up_proj.weight", 0x7F),
        ("kimi_k3", EXPERT["kimi_k3"].format(1, 9) + "w2.weight_scale", 0xFF),
    ],
)
def test_what_is_not_finite_is_noticed_in_experts_that_no_token_chooses(
    family: str, name: str, bits: int, tmp_path: Path
) -> None:
    def edit(shard: models.Tensors) -> models.Tensors:
        for found in shard.keys() & {name}:
            values = np.array(shard[found].view(mx.uint8 if bits < 256 else mx.uint16))
            values[-1, -1] = bits
            shard[found] = mx.array(values).view(shard[found].dtype)
        return shard

    source = models.copy_checkpoint(source_of(family), tmp_path / "source", edit)
    raw = exports.raw_tensors(source_of(family))
    codes = {n for n, t in raw.items() if t.dtype == "F8_E4M3"}
    for file in source.glob("model*.safetensors"):
        models.relabel(file, codes, "F8_E4M3")
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "identity"))
    with pytest.raises(CheckpointError, match=rf"{name} holds a value that is not finite"):
        write(source, plan, tmp_path / "out")


def flipped(name: str) -> Edit:
    """An edit that changes one bit of a tensor."""

    def edit(shard: models.Tensors) -> models.Tensors:
        if name in shard:
            array = shard[name]
            codes = array.view(mx.uint8).flatten()
            codes[-1] = codes[-1] ^ 1
            shard[name] = codes.reshape(*array.shape[:-1], -1).view(array.dtype)
        return shard

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (flipped("model.layers.2.mlp.experts.5.up_proj.weight"), "experts.5.up_proj.* differs"),
        (flipped("model.layers.2.mlp.gate.weight"), "gate.weight differs from the source"),
        (flipped("model.norm.weight"), "model.norm.weight differs"),
        (lambda t: {n: a for n, a in t.items() if n != "lm_head.weight"}, "lm_head.* not written"),
        (lambda t: t | {"more": mx.zeros(1)}, "more was written, but belongs to nothing"),
        (
            lambda t: {
                n: a[:4] if n == "model.layers.0.mlp.gate.weight" else a for n, a in t.items()
            },
            "layers.0.mlp.gate.weight differs",
        ),
    ],
)
def test_damage_is_found_after_the_writing(edit: Edit, message: str, tmp_path: Path) -> None:
    source = open_source(str(source_of("qwen3_moe")))
    pieces = hf._pieces(source, plan_of("qwen3_moe"))
    hf._verify(written("qwen3_moe"), source, plan_of("qwen3_moe"), pieces)
    exports.damaged(written("qwen3_moe"), tmp_path / "d", edit)
    with pytest.raises(CheckpointError, match=message):
        hf._verify(tmp_path / "d", source, plan_of("qwen3_moe"), pieces)


def test_the_routers_order_is_checked_against_what_mlx_lm_loads() -> None:
    """Rows that are the pieces', but not the plan's."""
    source, plan = open_source(str(source_of("qwen3_moe"))), plan_of("qwen3_moe")
    turned = replace(
        plan, layers=tuple(replace(p, kept=tuple(reversed(p.kept))) for p in plan.layers)
    )
    with pytest.raises(CheckpointError, match=r"gate\.weight is not in the plan's order"):
        hf._verify(written("qwen3_moe"), source, turned, hf._pieces(source, plan))


# Commands


def test_the_commands_make_and_measure_one(
    tmp_path: Path, tiny_k3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--tokens", "100", "--sequence-length", "32"]
    size = open_source(str(tiny_k3)).checkpoint.nbytes * 2 // 3
    plan = ["plan", "--size", str(size), "--layout", "stock"]
    for command in (
        ["calibrate", str(tiny_k3), "--calibration", "math", *short, "--probe-tokens", "32"],
        [*plan, "--low", "none"],
        ["export", "--format", "hf"],
        ["evaluate", "--text", "math", *short],
    ):
        assert main(command) == 0, command
    (run,) = Path("runs").iterdir()
    made = Plan.load(run / "plan.json")
    assert made.low == {} and made.waterfall.low == 0
    assert set(made.high.values()) == {Format(4, 32, "mxfp4")}
    found = Evaluation.load(run / "evaluation.json")
    assert found.weight_bytes == made.waterfall.weights + padding(tiny_k3)
    assert found.expert_bytes == made.waterfall.high
    assert found.label == "tiny-k3, hf" and "plan" in found.provenance.inputs
    assert 0 < found.mean_kl.value < 1
    assert "| math |" in (run / "checkpoint" / "README.md").read_text()


# transformers


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "groups", "glm4_moe", "fp8"])
def test_transformers_computes_the_masked_source_and_what_mlx_lm_computes(
    kind: str, tmp_path: Path
) -> None:
    """Needs PyTorch and transformers, which `pip install '.[torch]'` brings.

    Stock mlx-lm does not load Qwen3-MoE in FP8: its logits are those of the MLX export there.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    groups = {"n_group": 4, "topk_group": 2} if kind == "groups" else {}
    make = {
        "deepseek_v3": models.write_deepseek_v3,
        "groups": models.write_deepseek_v3,
        "glm4_moe": models.write_glm4_moe,
    }.get(kind, models.write_qwen3_moe)
    # FP8 is widened to 16 bits by both; all else is float32, so that sums can be compared.
    dtype = mx.bfloat16 if kind == "fp8" else mx.float32
    source = make(tmp_path / "source", layers=3, experts=12, dtype=dtype, **groups)
    if kind == "fp8":
        source = models.fp8_copy(source, tmp_path / "fp8")
    spec = open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    out = tmp_path / "out"
    write(source, plan, out)
    tokens = torch.tensor([exports.TOKENS])

    def load(path: Path) -> Any:
        options = {}
        if kind == "fp8":
            options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
        return model.float().eval()

    def of(model: Any) -> np.ndarray:
        with torch.no_grad():
            return np.array(model(tokens).logits[0])

    pruned = of(load(out))
    if kind == "fp8":
        exports.write(source, plan, tmp_path / "mlx")
        mlx = exports.logits(exports.load(tmp_path / "mlx"))
    else:
        mlx = exports.logits(load_model(out)[0])
    whole, masked = load(source), load(source)
    for layer in plan.layers:
        dropped = sorted(set(range(plan.num_experts)) - set(layer.kept))
        _mask(masked.model.layers[layer.layer].mlp.gate, dropped)
    wanted = of(masked)
    print(
        f"\n{kind}: from mlx-lm {np.abs(pruned - mlx).max():.2e}, from the masked source "
        f"{np.abs(pruned - wanted).max():.2e}, pruned by {np.abs(of(whole) - wanted).max():.2e}"
    )
    np.testing.assert_allclose(pruned, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(pruned, mlx, rtol=0, atol=1e-4)
    assert np.abs(of(whole) - wanted).max() > 0.01


def _mask(gate: Any, dropped: list[int]) -> None:
    """Let a router of transformers never choose some experts."""
    if hasattr(gate, "e_score_correction_bias"):
        gate.e_score_correction_bias.data[dropped] = -1e9
        return

    def choose_again(gate: Any, inputs: Any, output: Any) -> Any:
        logits = output[0].clone()
        logits[:, dropped] = -float("inf")
        weights, chosen = logits.softmax(-1).topk(gate.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    gate.register_forward_hook(choose_again)
