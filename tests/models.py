"""Tiny random checkpoints in the layout of the released ones, and ways to damage them.

The tokenizer is that of the embedded tiny-k3 (2,048 ids). Every writer takes the directory to make
and `changes` to config.json, and returns the directory; the same arguments give the same bytes.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model

from reap.data import embedded_model

VOCABULARY = 2048
HIDDEN = 128
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

Tensors = dict[str, mx.array]


def write_qwen3_moe(
    path: Path,
    *,
    dtype: mx.Dtype = mx.float32,
    experts: int = 8,
    top_k: int = 2,
    layers: int = 3,
    intermediate: int = 128,
    tied: bool = False,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Qwen3-MoE: softmax router, grouped-query attention, experts stored apart; a shard a layer."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        **changes,
    }
    make = _Random(seed, dtype)
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shards = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights = {
            f"{at}.input_layernorm.weight": make.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": make.norm(HIDDEN),
            f"{at}.self_attn.q_proj.weight": make.matrix(heads * dim, HIDDEN),
            f"{at}.self_attn.k_proj.weight": make.matrix(kv * dim, HIDDEN),
            f"{at}.self_attn.v_proj.weight": make.matrix(kv * dim, HIDDEN),
            f"{at}.self_attn.o_proj.weight": make.matrix(HIDDEN, heads * dim),
            f"{at}.self_attn.q_norm.weight": make.norm(dim),
            f"{at}.self_attn.k_norm.weight": make.norm(dim),
        }
        if layer in config["mlp_only_layers"]:
            weights |= make.mlp(f"{at}.mlp", config["intermediate_size"])
        else:
            weights[f"{at}.mlp.gate.weight"] = make.matrix(experts, HIDDEN)
            for expert in range(experts):
                weights |= make.mlp(f"{at}.mlp.experts.{expert}", intermediate)
        shards.append(weights)
    return _write(path, config, [*shards, _trunk(make, tied)])


def write_deepseek_v3(
    path: Path,
    *,
    dtype: mx.Dtype = mx.float32,
    experts: int = 16,
    top_k: int = 2,
    layers: int = 3,
    intermediate: int = 128,
    n_group: int = 1,
    topk_group: int = 1,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """DeepSeek-V3: sigmoid router with a positive bias and groups, MLA, a dense first layer."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        **changes,
    }
    make = _Random(seed, dtype)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shards = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        weights = {
            f"{at}.input_layernorm.weight": make.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": make.norm(HIDDEN),
            f"{attention}.q_a_proj.weight": make.matrix(config["q_lora_rank"], HIDDEN),
            f"{attention}.q_a_layernorm.weight": make.norm(config["q_lora_rank"]),
            f"{attention}.q_b_proj.weight": make.matrix(
                heads * (nope + rope), config["q_lora_rank"]
            ),
            f"{attention}.kv_a_proj_with_mqa.weight": make.matrix(rank + rope, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": make.norm(rank),
            f"{attention}.kv_b_proj.weight": make.matrix(heads * (nope + value), rank),
            f"{attention}.o_proj.weight": make.matrix(HIDDEN, heads * value),
        }
        weights |= _mlp_or_experts(make, layer, config)
        shards.append(weights)
    return _write(path, config, [*shards, _trunk(make, tied=False)])


def _mlp_or_experts(make: _Random, layer: int, config: dict[str, Any]) -> dict[str, mx.array]:
    """DeepSeek's: dense first layers, then a router with a bias, shared and routed experts."""
    at = f"model.layers.{layer}.mlp"
    if layer < config["first_k_dense_replace"]:
        return make.mlp(at, config["intermediate_size"])
    experts, intermediate = config["n_routed_experts"], config["moe_intermediate_size"]
    weights = {
        f"{at}.gate.weight": make.matrix(experts, HIDDEN),
        f"{at}.gate.e_score_correction_bias": make.bias(experts),
        **make.mlp(f"{at}.shared_experts", intermediate),
    }
    for expert in range(experts):
        weights |= make.mlp(f"{at}.experts.{expert}", intermediate)
    return weights


def write_glm4_moe(
    path: Path,
    *,
    dtype: mx.Dtype = mx.float32,
    experts: int = 12,
    top_k: int = 2,
    layers: int = 3,
    intermediate: int = 128,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """GLM-4.5: DeepSeek-V3's router without groups, grouped-query attention with biases and rotary
    embeddings of half the width, a dense first layer."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 128,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        **changes,
    }
    make = _Random(seed, dtype)
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shards = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights = {
            f"{at}.input_layernorm.weight": make.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": make.norm(HIDDEN),
            f"{at}.self_attn.o_proj.weight": make.matrix(HIDDEN, heads * dim),
        }
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = make.matrix(count * dim, HIDDEN)
            weights[f"{at}.self_attn.{name}_proj.bias"] = make.vector(count * dim)
        if config["use_qk_norm"]:
            weights[f"{at}.self_attn.q_norm.weight"] = make.norm(dim)
            weights[f"{at}.self_attn.k_norm.weight"] = make.norm(dim)
        weights |= _mlp_or_experts(make, layer, config)
        shards.append(weights)
    return _write(path, config, [*shards, _trunk(make, tied=False)])


def write_gpt_oss(
    path: Path,
    *,
    dtype: mx.Dtype = mx.float32,
    experts: int = 12,
    top_k: int = 2,
    layers: int = 4,
    intermediate: int = 128,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """gpt-oss: a router with a bias before the softmax; experts in mxfp4 with biases, all of a
    layer in one tensor, rows of gate and up alternating; every other layer has a sliding window."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "intermediate_size": intermediate,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default"},
        "max_position_embeddings": 4096,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        **changes,
    }
    make = _Random(seed, dtype)
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shards = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights = {
            f"{at}.input_layernorm.weight": make.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": make.norm(HIDDEN),
            f"{at}.self_attn.sinks": make.vector(heads),
            f"{at}.self_attn.o_proj.weight": make.matrix(HIDDEN, heads * dim),
            f"{at}.self_attn.o_proj.bias": make.vector(HIDDEN),
            f"{at}.mlp.router.weight": make.matrix(experts, HIDDEN),
            f"{at}.mlp.router.bias": make.vector(experts),
        }
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = make.matrix(count * dim, HIDDEN)
            weights[f"{at}.self_attn.{name}_proj.bias"] = make.vector(count * dim)
        for name, rows, columns in (
            ("gate_up_proj", 2 * intermediate, HIDDEN),
            ("down_proj", HIDDEN, intermediate),
        ):
            dense = mx.stack([make.matrix(rows, columns) for _ in range(experts)])
            packed, scales = mx.quantize(dense, mode="mxfp4", group_size=32, bits=4)
            blocks = packed.view(mx.uint8).reshape(experts, rows, columns // 32, 16)
            weights[f"{at}.mlp.experts.{name}_blocks"] = blocks
            weights[f"{at}.mlp.experts.{name}_scales"] = scales
            biases = [make.vector(rows) for _ in range(experts)]
            weights[f"{at}.mlp.experts.{name}_bias"] = mx.stack(biases)
        shards.append(weights)
    return _write(path, config, [*shards, _trunk(make, tied=False)])


def copy_checkpoint(
    source: Path,
    target: Path,
    edit: Callable[[Tensors], Tensors] = lambda shard: shard,
    **changes: Any,
) -> Path:
    """A checkpoint with `edit` applied to the tensors of every shard and `changes` to config.json.

    The index follows what the shards then hold.
    """
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    shards = [edit(dict(mx.load(str(file)))) for file in sorted(source.glob("model*.safetensors"))]
    return _write(target, config, [shard for shard in shards if shard])


def with_prediction_layers(source: Path, target: Path, count: int, **changes: Any) -> Path:
    """A copy with the last layer's tensors once more as `count` layers after it, where released
    models have their multi-token-prediction layers."""
    last = json.loads((source / "config.json").read_text())["num_hidden_layers"] - 1

    def add(shard: Tensors) -> Tensors:
        own = {name: array for name, array in shard.items() if f".layers.{last}." in name}
        for more in range(last + 1, last + 1 + count):
            shard |= {n.replace(f".{last}.", f".{more}.", 1): array for n, array in own.items()}
        return shard

    return copy_checkpoint(source, target, add, **changes)


def fp8_copy(
    source: Path, target: Path, block: tuple[int, int] = (128, 128), scale: mx.Dtype = mx.float32
) -> Path:
    """A checkpoint with the matrices of attention and MLPs in FP8, as DeepSeek-V3 and Qwen3 have
    them: E4M3 codes `x.weight` and one scale per block, `x.weight_scale_inv`."""
    codes: set[str] = set()

    def edit(shard: Tensors) -> Tensors:
        edited = dict(shard)
        for name, array in shard.items():
            if not name.endswith("_proj.weight") and not name.endswith("_mqa.weight"):
                continue
            weight = np.array(array.astype(mx.float32))
            scales = np.zeros([-(-side // size) for side, size in zip(weight.shape, block)])
            for row, column in np.ndindex(*scales.shape):
                part = weight[row * block[0] :, column * block[1] :][: block[0], : block[1]]
                scales[row, column] = np.abs(part).max() / 448
                part /= scales[row, column]
            edited[name] = mx.to_fp8(mx.array(weight))
            edited[f"{name}_scale_inv"] = mx.array(scales.astype(np.float32)).astype(scale)
            codes.add(name)
        return edited

    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    copy_checkpoint(source, target, edit, quantization_config=quantization)
    for file in target.glob("model*.safetensors"):
        relabel(file, codes, "F8_E4M3")
    return target


def relabel(file: Path, names: Container[str], dtype: str) -> None:
    """Let a shard's header say that the named tensors are of another type of the same size."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name in header.keys() - {"__metadata__"}:
        if name in names:
            header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def float32_k3(target: Path) -> Path:
    """The embedded K3 with float32 embeddings, so that all of its activations are float32."""

    def widen(shard: Tensors) -> Tensors:
        return {
            name: array.astype(mx.float32) if name.endswith("embed_tokens.weight") else array
            for name, array in shard.items()
        }

    return copy_checkpoint(embedded_model(), target, widen)


def load_plain(path: Path) -> nn.Module:
    """The model as stock mlx-lm loads it.

    On the CPU, MLX multiplies gathered matrices in float32 only: 16-bit experts are widened there.
    """
    model, _ = load_model(path)
    if mx.default_device() == mx.cpu:
        for name, module in model.named_modules():
            if ".switch_mlp." in name and "weight" in module and "scales" not in module:
                module.weight = module.weight.astype(mx.float32)
    return model


def file_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint by their names in the files, floating ones in float64."""
    tensors = {}
    for file in sorted(path.glob("model*.safetensors")):
        for name, array in mx.load(str(file)).items():
            floating = mx.issubdtype(array.dtype, mx.floating)
            tensors[name] = np.array(array.astype(mx.float32) if floating else array)
            if floating:
                tensors[name] = tensors[name].astype(np.float64)
    return tensors


class _Random:
    """Reproducible tensors of one dtype that keep activations near 1."""

    def __init__(self, seed: int, dtype: mx.Dtype) -> None:
        self._generator = np.random.default_rng(seed)
        self._dtype = dtype

    def _array(self, values: np.ndarray) -> mx.array:
        return mx.array(values.astype(np.float32)).astype(self._dtype)

    def matrix(self, rows: int, columns: int) -> mx.array:
        return self._array(self._generator.standard_normal((rows, columns)) / columns**0.5)

    def norm(self, width: int) -> mx.array:
        return self._array(1 + 0.1 * self._generator.standard_normal(width))

    def vector(self, width: int) -> mx.array:
        return self._array(0.1 * self._generator.standard_normal(width))

    def bias(self, count: int) -> mx.array:
        """Positive, and float32 as in the released checkpoints."""
        return mx.array(self._generator.uniform(0, 0.2, count).astype(np.float32))

    def embeddings(self) -> mx.array:
        return self._array(self._generator.standard_normal((VOCABULARY, HIDDEN)))

    def mlp(self, at: str, intermediate: int) -> Tensors:
        return {
            f"{at}.gate_proj.weight": self.matrix(intermediate, HIDDEN),
            f"{at}.up_proj.weight": self.matrix(intermediate, HIDDEN),
            f"{at}.down_proj.weight": self.matrix(HIDDEN, intermediate),
        }


def _trunk(make: _Random, tied: bool) -> Tensors:
    trunk = {
        "model.embed_tokens.weight": make.embeddings(),
        "model.norm.weight": make.norm(HIDDEN),
    }
    if not tied:
        trunk["lm_head.weight"] = make.matrix(VOCABULARY, HIDDEN)
    return trunk


def _write(path: Path, config: Mapping[str, Any], shards: list[Tensors]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(path / file), shard, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    size = sum(array.nbytes for shard in shards for array in shard.values())
    (path / INDEX).write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))})
    )
    for name in TOKENIZER:
        shutil.copy(embedded_model() / name, path / name)
    return path


def read_bytes() -> int:
    """Bytes that this process has read so far, also from the system's cache (Linux)."""
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])
