"""Kimi-K3's real shape, from headers alone: sparse files of 1.56 TB that hold no data."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from reap.artifacts import Format
from reap.calibrate import CalibrationSettings
from reap.calibrate.probes import Probes, variant_passes
from reap.data import embedded_model
from reap.models.source import open_source
from reap.models.text import TokenSequence

HIDDEN, LATENT, LAYERS, EXPERTS, VOCABULARY = 7168, 3584, 93, 896, 163_840
FULL_ATTENTION = sorted({*range(4, 93, 4), 92, 93})  # 1-based
SIZES = {"BF16": 2, "F32": 4, "U8": 1}
FORMATS = (Format(2, 128, "affine"), Format(3, 128, "affine"))
Tensors = dict[str, tuple[str, list[int]]]

# Moonshot's index, less the vision tower and projector (see the sums in the released checkpoint).
EXPERT_BYTES = 1_446_456_066_048
OTHER_BYTES = 113_509_540_864


def test_real_shape_is_read_from_headers_alone(tmp_path: Path) -> None:
    try:
        write_k3_shape(tmp_path)
    except OSError as error:
        pytest.skip(f"this file system takes no sparse files of that size: {error}")
    source = open_source(str(tmp_path))
    assert source.checkpoint.nbytes == EXPERT_BYTES + OTHER_BYTES
    spec = source.spec()
    assert spec.experts_bytes == EXPERT_BYTES
    routers = sum(EXPERTS * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    padding = 4 * 32 * (LAYERS - len(FULL_ATTENTION))  # of A_log, cut by mlx-lm
    assert spec.trunk_bytes() + routers == OTHER_BYTES - padding
    assert spec.parameters == pytest.approx(2.78e12, rel=1e-3)
    assert len(spec.moe_layers) == 92
    # 69 KDA layers hold float32 [96, 128, 128] and 3 × 12288 × 3; 24 MLA layers 576 a token.
    assert spec.state_bytes_fixed == 69 * 4 * (96 * 128 * 128 + 3 * 12_288 * 3)
    assert spec.state_bytes_per_token == 24 * 4 * 576
    # Two kinds of variants from each of layers 1 to 92 on, which are 93 to 2 passes with the head.
    passes = 2 * sum(range(2, 94))
    assert variant_passes(source, FORMATS) == passes
    text = [TokenSequence(d, n, (1,) * 2048) for d in range(5) for n in range(13)]
    probes = Probes.choose(text, CalibrationSettings(), source, FORMATS, 5)
    assert len(probes.parts) == 5  # a sequence of each domain
    affordable = LAYERS * (65 + 5) * 2048 // passes
    assert [len(part.tokens) for part in probes.changed] == [affordable // 5] * 5 == [305] * 5


def write_k3_shape(directory: Path) -> None:
    """config.json, index and one sparse shard per layer, with the released names and shapes."""
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33_792,
        "moe_intermediate_size": 3072,
        "num_experts": EXPERTS,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": LATENT,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": FULL_ATTENTION,
            "kda_layers": [i for i in range(1, LAYERS + 1) if i not in FULL_ATTENTION],
        },
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shards = [_layer(index) for index in range(LAYERS)] + [_ends()]
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-000096.safetensors"
        _write_sparse(directory / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_sparse(path: Path, tensors: Tensors) -> None:
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def _layer(index: int) -> Tensors:
    prefix = f"language_model.model.layers.{index}."
    tensors: Tensors = {}

    def bf16(name: str, *shape: int) -> None:
        tensors[f"{prefix}{name}.weight"] = ("BF16", list(shape))

    for name in ("input_layernorm", "post_attention_layernorm"):
        bf16(name, HIDDEN)
    for name in ("self_attention_res", "mlp_res"):
        bf16(f"{name}_norm", HIDDEN)
        bf16(f"{name}_proj", 1, HIDDEN)
    bf16("self_attn.o_proj", HIDDEN, 12_288)
    bf16("self_attn.g_proj", 12_288, HIDDEN)
    if index + 1 in FULL_ATTENTION:
        bf16("self_attn.q_a_proj", 1536, HIDDEN)
        bf16("self_attn.q_a_layernorm", 1536)
        bf16("self_attn.q_b_proj", 18_432, 1536)
        bf16("self_attn.kv_a_proj_with_mqa", 576, HIDDEN)
        bf16("self_attn.kv_a_layernorm", 512)
        bf16("self_attn.kv_b_proj", 24_576, 512)
    else:
        for name in "qkv":
            bf16(f"self_attn.{name}_proj", 12_288, HIDDEN)
            tensors[f"{prefix}self_attn.{name}_conv1d.weight"] = ("F32", [12_288, 1, 4])
        bf16("self_attn.f_a_proj", 128, HIDDEN)
        bf16("self_attn.f_b_proj", 12_288, 128)
        bf16("self_attn.b_proj", 96, HIDDEN)
        tensors[f"{prefix}self_attn.A_log"] = ("F32", [128])
        tensors[f"{prefix}self_attn.dt_bias"] = ("F32", [12_288])
        tensors[f"{prefix}self_attn.o_norm.weight"] = ("F32", [128])
    if index == 0:
        bf16("mlp.gate_proj", 33_792, HIDDEN)
        bf16("mlp.up_proj", 33_792, HIDDEN)
        bf16("mlp.down_proj", HIDDEN, 33_792)
        return tensors
    moe = "block_sparse_moe."
    bf16(f"{moe}gate", EXPERTS, HIDDEN)
    tensors[f"{prefix}{moe}gate.e_score_correction_bias"] = ("F32", [EXPERTS])
    bf16(f"{moe}routed_expert_down_proj", LATENT, HIDDEN)
    bf16(f"{moe}routed_expert_up_proj", HIDDEN, LATENT)
    bf16(f"{moe}routed_expert_norm", LATENT)
    bf16(f"{moe}shared_experts.gate_proj", 6144, HIDDEN)
    bf16(f"{moe}shared_experts.up_proj", 6144, HIDDEN)
    bf16(f"{moe}shared_experts.down_proj", HIDDEN, 6144)
    for expert in range(EXPERTS):
        for name, rows, columns in (
            ("w1", 3072, LATENT),
            ("w3", 3072, LATENT),
            ("w2", LATENT, 3072),
        ):
            stem = f"{prefix}{moe}experts.{expert}.{name}"
            tensors[f"{stem}.weight_packed"] = ("U8", [rows, columns // 2])
            tensors[f"{stem}.weight_scale"] = ("U8", [rows, columns // 32])
    return tensors


def _ends() -> Tensors:
    prefix = "language_model."
    return {
        f"{prefix}lm_head.weight": ("BF16", [VOCABULARY, HIDDEN]),
        f"{prefix}model.embed_tokens.weight": ("BF16", [VOCABULARY, HIDDEN]),
        f"{prefix}model.norm.weight": ("BF16", [HIDDEN]),
        f"{prefix}model.output_attn_res_norm.weight": ("BF16", [HIDDEN]),
        f"{prefix}model.output_attn_res_proj.weight": ("BF16", [1, HIDDEN]),
    }
