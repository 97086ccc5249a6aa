"""Opening checkpoints: what is damaged is refused by name, and the spec has the real bytes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from reap.errors import CheckpointError
from reap.models.checkpoint import open_checkpoint
from reap.models.hooks import hooked
from reap.models.source import open_source

Write = Callable[..., Path]
WRITERS = [models.write_qwen3_moe, models.write_deepseek_v3, models.write_glm4_moe]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint; do not write to it."""
    return models.write_qwen3_moe(tmp_path_factory.mktemp("source") / "qwen", layers=2)


@pytest.fixture
def damaged(qwen: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(qwen, tmp_path / "damaged"))


def shard(path: Path, number: int) -> Path:
    return sorted(path.glob("model*.safetensors"))[number - 1]


def without(*names: str) -> Callable[[models.Tensors], models.Tensors]:
    """An edit that leaves tensors out."""
    return lambda tensors: {n: a for n, a in tensors.items() if n not in names}


def reshaped(name: str, array: mx.array) -> Callable[[models.Tensors], models.Tensors]:
    """An edit that puts another array in the place of a tensor."""
    return lambda tensors: {n: array if n == name else a for n, a in tensors.items()}


# Files


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory\."):
        open_checkpoint(str(tmp_path / "nowhere"))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"], ids=["cut", "a list", "not UTF-8"])
def test_a_config_that_is_no_object_is_refused(damaged: Path, text: str) -> None:
    (damaged / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json is not"):
        open_checkpoint(str(damaged))


def test_a_missing_shard_is_named(damaged: Path) -> None:
    lost = shard(damaged, 2)
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards are missing .*{lost.name}"):
        open_checkpoint(str(damaged))


@pytest.mark.parametrize("end", [0, 5, 300, -1])
def test_a_truncated_shard_is_named_with_its_size(damaged: Path, end: int) -> None:
    file = shard(damaged, 1)
    file.write_bytes(file.read_bytes()[:end])
    size = f"{file.stat().st_size:,} bytes"
    with pytest.raises(CheckpointError, match=f"{file.name} .*{size}"):
        open_checkpoint(str(damaged))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 4096,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        struct.pack("<Q", 9) + b'{"a":"b"}',
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        struct.pack("<Q", 2) + b"[]",
    ],
    ids=["noise", "git-lfs pointer", "no tensors", "not UTF-8", "a list"],
)
def test_a_garbage_header_is_refused(damaged: Path, content: bytes) -> None:
    file = shard(damaged, 3)
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=f"{file.name} is truncated or not a safetensors file"
    ):
        open_checkpoint(str(damaged))


def test_an_index_entry_that_no_shard_has_is_named(damaged: Path) -> None:
    index = json.loads((damaged / models.INDEX).read_text())
    index["weight_map"]["model.layers.1.mlp.gate.bias"] = shard(damaged, 2).name
    (damaged / models.INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"1 tensors .* in no shard, first .*1\.mlp\.gate\.bias"
    ):
        open_checkpoint(str(damaged))


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_refused(damaged: Path, text: str) -> None:
    (damaged / models.INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is damaged"):
        open_checkpoint(str(damaged))


def test_without_an_index_all_shards_are_read(qwen: Path, damaged: Path) -> None:
    (damaged / models.INDEX).unlink()
    assert open_checkpoint(str(damaged)).tensors == open_checkpoint(str(qwen)).tensors


# Architectures and formats


@pytest.mark.parametrize("model_type", ["llama", None])
def test_an_unknown_architecture_is_refused(qwen: Path, tmp_path: Path, model_type: Any) -> None:
    path = models.copy_checkpoint(qwen, tmp_path / "copy", model_type=model_type)
    with pytest.raises(
        CheckpointError, match=f"model_type {model_type!r} is not supported"
    ) as found:
        open_source(str(path))
    assert "qwen3_moe" in str(found.value.hint)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1]}], ids=["none", "in no layer"]
)
def test_a_dense_model_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = models.write_qwen3_moe(tmp_path / "dense", layers=2, mlp_only_layers=[0, 1])
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="dense"):
        open_source(str(path))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "compressed-tensors float-quantized",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_quantization_that_cannot_be_read_is_named(
    qwen: Path, tmp_path: Path, quantization: dict[str, Any], named: str, nested: bool
) -> None:
    changes: dict[str, Any] = {"quantization_config": quantization}
    if nested:
        config = json.loads((qwen / "config.json").read_text())
        changes = {"text_config": config | changes}
    path = models.copy_checkpoint(qwen, tmp_path / "copy", **changes)
    with pytest.raises(CheckpointError, match=f"quantized as {named}, which reap cannot read"):
        open_source(str(path))


def test_a_config_that_mlx_lm_cannot_use_is_refused(qwen: Path, tmp_path: Path) -> None:
    path = models.copy_checkpoint(qwen, tmp_path / "copy", hidden_size="wide")
    with pytest.raises(CheckpointError, match=r"mlx-lm cannot build copy from its config\.json"):
        open_source(str(path))


def test_a_layer_without_tensors_is_named(qwen: Path, tmp_path: Path) -> None:
    path = models.copy_checkpoint(qwen, tmp_path / "copy", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="has no tensors for layer 2"):
        open_source(str(path))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("write", [models.write_deepseek_v3, models.write_glm4_moe])
def test_prediction_layers_are_left_out_and_counted(
    tmp_path: Path, write: Write, count: int
) -> None:
    plain = write(tmp_path / "plain")
    path = models.with_prediction_layers(
        plain, tmp_path / "more", count, num_nextn_predict_layers=count
    )
    source, bare = open_source(str(path)), open_source(str(plain))
    spec = source.spec()
    more = source.checkpoint.nbytes - bare.checkpoint.nbytes
    assert more > 0 and (spec.prediction_layers, spec.prediction_bytes) == (count, more)
    assert source.loaded_names() == bare.loaded_names()
    assert bare.spec() == replace(
        spec,
        model="plain",
        model_sha256=bare.checkpoint.model_sha256,
        prediction_layers=0,
        prediction_bytes=0,
    )


@pytest.mark.parametrize(
    ("announced", "said"), [(None, 0), (0, 0), (1, 1)], ids=["not", "none", "too few"]
)
def test_layers_that_the_config_does_not_announce_are_refused(
    qwen: Path, tmp_path: Path, announced: int | None, said: int
) -> None:
    changes = {} if announced is None else {"num_nextn_predict_layers": announced}
    path = models.with_prediction_layers(qwen, tmp_path / "copy", 2, **changes)
    message = f"has tensors of layer 3, .* announces 2 layers and {said} for multi-token prediction"
    with pytest.raises(CheckpointError, match=message) as raised:
        open_source(str(path))
    assert "num_hidden_layers" in str(raised.value.hint)


@pytest.mark.parametrize("value", ["one", 1.5])
def test_a_number_of_prediction_layers_that_is_none_is_named(
    value: object, qwen: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"num_nextn_predict_layers": value}
    path = models.with_prediction_layers(qwen, tmp_path / "copy", 1, **changes)
    with pytest.raises(CheckpointError, match=f"num_nextn_predict_layers is {value!r}, not a"):
        open_source(str(path))


# Tensors. Whatever is wrong with them is found by spec(), which reads headers only.

EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        EXPERT,
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(qwen: Path, tmp_path: Path, name: str) -> None:
    source = open_source(str(models.copy_checkpoint(qwen, tmp_path / "copy", without(name))))
    with pytest.raises(CheckpointError, match=f"copy.*lacks .*{name.removeprefix('model.')}"):
        source.spec()


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (EXPERT, (64, 128), (128, 128)),
        ("model.layers.1.mlp.gate.weight", (4, 128), (8, 128)),
        ("model.layers.0.input_layernorm.weight", (64,), (128,)),
        ("model.embed_tokens.weight", (100, 128), (2048, 128)),
        ("lm_head.weight", (2048, 64), (2048, 128)),
    ],
)
def test_a_wrong_shape_is_named(
    qwen: Path, tmp_path: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    edit = reshaped(name, mx.zeros(shape))
    source = open_source(str(models.copy_checkpoint(qwen, tmp_path / "copy", edit)))
    with pytest.raises(CheckpointError) as found:
        source.spec()
    for part in (name, str(shape), str(wanted)):
        assert part in found.value.message


def test_a_wrong_shape_that_mlx_lm_reshapes_is_refused(tmp_path: Path) -> None:
    """kv_b_proj is cut into heads on loading."""
    whole = models.write_deepseek_v3(tmp_path / "whole", layers=2)
    edit = reshaped("model.layers.1.self_attn.kv_b_proj.weight", mx.zeros((100, 64)))
    source = open_source(str(models.copy_checkpoint(whole, tmp_path / "copy", edit)))
    with pytest.raises(CheckpointError, match=r"copy: model\.layers\.1"):
        source.spec()


@pytest.mark.parametrize("experts", [4, 16])
def test_another_number_of_experts_than_the_config_says_is_refused(
    qwen: Path, tmp_path: Path, experts: int
) -> None:
    path = models.copy_checkpoint(qwen, tmp_path / "copy", num_experts=experts)
    with pytest.raises(CheckpointError, match=f"model.layers.0 .*8 .*{experts}"):
        open_source(str(path)).spec()


def test_an_unexpected_tensor_is_named(qwen: Path, tmp_path: Path) -> None:
    def add(tensors: models.Tensors) -> models.Tensors:
        name = "model.layers.1.mlp.gate.bias"
        return tensors | (
            {name: mx.zeros(8)} if "model.layers.1.mlp.gate.weight" in tensors else {}
        )

    source = open_source(str(models.copy_checkpoint(qwen, tmp_path / "copy", add)))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.1\.mlp\.gate\.bias"):
        source.spec()


# Bytes and parameters


def checkpoints(tmp_path: Path) -> dict[str, Path]:
    k3 = models.embedded_model()
    return {
        "kimi_k3": k3,
        "qwen3_moe": models.write_qwen3_moe(tmp_path / "q", dtype=mx.bfloat16),
        "qwen3_moe tied": models.write_qwen3_moe(tmp_path / "t", tied=True, mlp_only_layers=[1]),
        "deepseek_v3": models.write_deepseek_v3(tmp_path / "d", dtype=mx.bfloat16),
        "deepseek_v3 groups": models.write_deepseek_v3(tmp_path / "g", n_group=4, topk_group=2),
        "glm4_moe": models.write_glm4_moe(tmp_path / "glm", dtype=mx.bfloat16),
    }


def test_the_spec_has_the_bytes_that_mlx_lm_loads(tmp_path: Path) -> None:
    for name, path in checkpoints(tmp_path).items():
        source = open_source(str(path))
        spec = source.spec()
        model, _ = load_model(path, lazy=True)
        loaded = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        rows = sum(spec.num_experts * spec.router_row_bytes(moe) for moe in spec.moe_layers)
        assert spec.trunk_bytes() + spec.experts_bytes + rows == loaded, name
        vision = [t for n, t in source.checkpoint.tensors.items() if "vision" in n or "mm_" in n]
        assert spec.carried_bytes == sum(tensor.nbytes for tensor in vision), name


def test_headers_alone_give_the_spec(tmp_path: Path) -> None:
    """Not even one layer's bytes are read."""
    path = models.write_qwen3_moe(tmp_path / "model", layers=3)
    source = open_source(str(path))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    source.spec()
    assert mx.get_peak_memory() - before < 100_000


def state_nbytes(path: Path, tokens: int) -> int:
    """Of stock mlx-lm's cache after some tokens, with activations as on a GPU.

    The CPU multiplies experts in float32 only; their outputs go back to the block's own dtype.
    """
    model = models.load_plain(path)
    cache = make_prompt_cache(model)

    def narrow(original: Any, x: mx.array, indices: mx.array) -> mx.array:
        return original(x.astype(mx.float32), indices).astype(x.dtype)

    with ExitStack() as hooks:
        for layer in model.layers:
            if hasattr(layer.mlp, "switch_mlp"):
                hooks.enter_context(hooked(layer.mlp.switch_mlp, narrow))
        mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=cache))
    return sum(part.nbytes for part in cache)


@pytest.mark.parametrize("tokens", [256, 512])
def test_the_state_has_the_bytes_of_a_real_cache(tmp_path: Path, tokens: int) -> None:
    """In bfloat16, and in the float32 of K3's released convolutions. (Caches grow by 256.)"""
    for write in WRITERS:
        path = write(tmp_path / write.__name__, dtype=mx.bfloat16, layers=2)
        assert open_source(str(path)).spec().state_bytes(tokens) == state_nbytes(path, tokens)
    k3 = models.embedded_model()
    config = json.loads((k3 / "config.json").read_text())["text_config"]["linear_attn_config"]
    # The first layer's convolution sees the bfloat16 embeddings, all others float32.
    narrower = 2 * 3 * config["num_heads"] * config["head_dim"] * 3
    spec = open_source(str(k3)).spec()
    assert spec.state_bytes(tokens) - state_nbytes(k3, tokens) == narrower


@pytest.mark.parametrize("kind", ["gate.weight", "norm.weight", "q_proj.weight", "experts"])
def test_a_model_is_known_by_its_weights_too(tmp_path: Path, kind: str) -> None:
    """In every layer: a sample that knows nothing of tensors missed whole routers."""
    model = models.write_qwen3_moe(tmp_path / "model", layers=3)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    mine = open_checkpoint(str(model)).model_sha256
    assert open_checkpoint(str(copy)).model_sha256 == mine
    for layer in range(3):
        tuned = tmp_path / f"tuned{layer}"
        shutil.copytree(model, tuned)
        changed = 0
        for file in tuned.glob("*.safetensors"):
            tensors = dict(mx.load(str(file)))
            for name, array in tensors.items():
                if f"layers.{layer}." in name and kind in name:
                    tensors[name] = array + 1
                    changed += 1
            mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
        assert changed
        assert open_checkpoint(str(tuned)).model_sha256 != mine
