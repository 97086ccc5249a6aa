"""K3-layout checkpoints with random weights, and what a process has read and held."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from reap.data import embedded_model

SMALL = {"hidden": 512, "experts": 64, "inner": 512}
VOCABULARY = 2048


def write_checkpoint(
    path: Path,
    layers: int,
    *,
    hidden: int,
    experts: int,
    inner: int,
    latent: int | None = None,
    top_k: int = 4,
) -> Path:
    """K3's names, types and layout: mxfp4 experts apart, KDA and MLA, attention residuals.

    An expert has three matrices of `inner` × `latent` (default: half of `hidden`).
    """
    path.mkdir(parents=True)
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    heads, dim, latent = hidden // 64, 64, latent or hidden // 2
    full = sorted({*range(4, layers, 4), layers - 1, layers})
    config["text_config"] |= {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "num_shared_experts": 1,
        "routed_expert_hidden_size": latent,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": dim,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        },
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, path / name)
    random = np.random.default_rng(0)
    map_: dict[str, str] = {}

    def matrix(rows: int, columns: int) -> mx.array:
        values = random.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        return mx.array(values).astype(mx.bfloat16)

    def ones(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.ones(shape, dtype=dtype)

    def packed(rows: int, columns: int) -> dict[str, mx.array]:
        exponent = 127 - 2 - round(np.log2(columns) / 2)
        codes = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        return {
            "weight_packed": mx.array(codes),
            "weight_scale": mx.full((rows, columns // 32), exponent, dtype=mx.uint8),
        }

    wide = heads * dim

    def layer(index: int) -> dict[str, mx.array]:
        at = f"language_model.model.layers.{index}."
        t = {f"{n}.weight": ones(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        for name in ("self_attention_res", "mlp_res"):
            t[f"{name}_norm.weight"] = ones(hidden)
            t[f"{name}_proj.weight"] = matrix(1, hidden)
        a = "self_attn."
        t[f"{a}o_proj.weight"] = matrix(hidden, wide)
        t[f"{a}g_proj.weight"] = matrix(wide, hidden)
        if index + 1 in full:
            t[f"{a}q_a_proj.weight"] = matrix(128, hidden)
            t[f"{a}q_a_layernorm.weight"] = ones(128)
            t[f"{a}q_b_proj.weight"] = matrix(heads * 96, 128)
            t[f"{a}kv_a_proj_with_mqa.weight"] = matrix(160, hidden)
            t[f"{a}kv_a_layernorm.weight"] = ones(128)
            t[f"{a}kv_b_proj.weight"] = matrix(heads * (64 + dim), 128)
        else:
            for name in "qkv":
                t[f"{a}{name}_proj.weight"] = matrix(wide, hidden)
                t[f"{a}{name}_conv1d.weight"] = ones(wide, 1, 4, dtype=mx.float32) / 4
            t[f"{a}f_a_proj.weight"] = matrix(dim, hidden)
            t[f"{a}f_b_proj.weight"] = matrix(wide, dim)
            t[f"{a}b_proj.weight"] = matrix(heads, hidden)
            t[f"{a}A_log"] = mx.zeros((heads,), dtype=mx.float32)
            t[f"{a}dt_bias"] = mx.zeros((wide,), dtype=mx.float32)
            t[f"{a}o_norm.weight"] = ones(dim, dtype=mx.float32)
        if index == 0:
            for name in ("gate_proj", "up_proj"):
                t[f"mlp.{name}.weight"] = matrix(4 * hidden, hidden)
            t["mlp.down_proj.weight"] = matrix(hidden, 4 * hidden)
        else:
            m = "block_sparse_moe."
            t[f"{m}gate.weight"] = matrix(experts, hidden)
            t[f"{m}gate.e_score_correction_bias"] = mx.zeros((experts,), dtype=mx.float32)
            t[f"{m}routed_expert_down_proj.weight"] = matrix(latent, hidden)
            t[f"{m}routed_expert_up_proj.weight"] = matrix(hidden, latent)
            t[f"{m}routed_expert_norm.weight"] = ones(latent)
            for name in ("gate_proj", "up_proj"):
                t[f"{m}shared_experts.{name}.weight"] = matrix(inner, hidden)
            t[f"{m}shared_experts.down_proj.weight"] = matrix(hidden, inner)
            for expert in range(experts):
                for name, rows, columns in (
                    ("w1", inner, latent),
                    ("w3", inner, latent),
                    ("w2", latent, inner),
                ):
                    for key, array in packed(rows, columns).items():
                        t[f"{m}experts.{expert}.{name}.{key}"] = array
        return {at + name: array for name, array in t.items()}

    def save(number: int, tensors: dict[str, mx.array]) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        mx.save_safetensors(str(path / file), tensors)
        map_.update(dict.fromkeys(tensors, file))

    for index in range(layers):
        save(index + 1, layer(index))
    prefix = "language_model."
    save(
        layers + 1,
        {
            f"{prefix}lm_head.weight": matrix(VOCABULARY, hidden),
            f"{prefix}model.embed_tokens.weight": matrix(VOCABULARY, hidden) * 8,
            f"{prefix}model.norm.weight": ones(hidden),
            f"{prefix}model.output_attn_res_norm.weight": ones(hidden),
            f"{prefix}model.output_attn_res_proj.weight": matrix(1, hidden),
        },
    )
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": map_}), encoding="utf-8")
    return path


def start_measuring() -> None:
    """Linux keeps the peak of the process that started this one (it is taken over by fork)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def read_bytes() -> Any:
    """Bytes through read calls, also from the system's cache; None where no one counts them."""
    with suppress(OSError):
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("rchar:") + 1])
    return None
