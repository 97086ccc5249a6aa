"""What reap knows about each architecture; everything else is read off mlx-lm's own modules.

An architecture that is not listed is refused: a guess about where the router or the experts are
would prune the wrong rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reap.errors import CheckpointError

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One mlx-lm architecture. Paths are relative to a decoder layer of the loaded model.

    `block` is the MoE block, `experts` its SwitchGLU, `router` every tensor with one row per
    expert. `source_expert` matches the name of one expert's tensor in a checkpoint that stores
    experts apart, with groups `layer` and `expert`; `source_rows` that of a tensor with one row per
    expert, of a router or of experts stored together, with group `layer`; `fused` is how many of
    the latter a layer has. Tensors whose names start with `carried` are copied to the export
    without being loaded. `packed` are the quantizations (formats of compressed-tensors, otherwise
    methods) that mlx-lm's `sanitize` maps onto MLX's own without loss. `state` gives the bytes of
    the KV and recurrent state as (fixed, per token) for one sequence.
    """

    model_type: str
    num_experts: str
    top_k: str
    router: tuple[str, ...]
    state: Callable[[Config], tuple[int, int]]
    n_group: str = ""
    topk_group: str = ""
    block: str = "mlp"
    experts: str = "mlp.switch_mlp"
    source_expert: re.Pattern[str] = re.compile(
        r"(?P<head>.*\blayers\.(?P<layer>\d+)\..*\bexperts\.)(?P<expert>\d+)(?P<tail>\..*)"
    )
    source_rows: re.Pattern[str] = re.compile(
        r".*\blayers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\."
        r"(?:gate\.weight|(?:gate\.)?e_score_correction_bias)"
    )
    fused: int = 0
    carried: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()


def text_config(config: Config) -> Config:
    """The part of config.json that describes the language model."""
    return dict(config.get("text_config") or config)


def _mla_state(config: Config) -> tuple[int, int]:
    """Latent and rotary key per layer and token, 16 bit."""
    per_layer = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return 0, 2 * per_layer * config["num_hidden_layers"]


def _gqa_state(config: Config) -> tuple[int, int]:
    """Keys and values per layer and token, 16 bit."""
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 0, 2 * 2 * heads * head_dim * config["num_hidden_layers"]


def _gpt_oss_state(config: Config) -> tuple[int, int]:
    """As _gqa_state, but half of the layers hold the last `sliding_window` tokens only."""
    kinds = config["layer_types"]
    per_layer = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    full = kinds.count("full_attention")
    return (len(kinds) - full) * config["sliding_window"] * per_layer, full * per_layer


def _kimi_k3_state(config: Config) -> tuple[int, int]:
    """KDA: float32 [heads, dim, dim] and the convolution's last inputs; MLA: latent and key.

    Activations are float32, because the released convolutions and norms are (K3 in mlx-lm).
    """
    linear = config["linear_attn_config"]
    projection = linear["num_heads"] * linear["head_dim"]
    recurrent = 4 * projection * linear["head_dim"]
    convolution = 4 * 3 * projection * (linear["short_conv_kernel_size"] - 1)
    fixed = len(linear["kda_layers"]) * (recurrent + convolution)
    per_layer = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return fixed, 4 * per_layer * len(linear["full_attn_layers"])


_FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="kimi_k3",
            num_experts="num_experts",
            top_k="num_experts_per_token",
            n_group="num_expert_group",
            topk_group="topk_group",
            router=("mlp.gate.weight", "mlp.e_score_correction_bias"),
            packed=("mxfp4-pack-quantized",),
            carried=("vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector."),
            state=_kimi_k3_state,
        ),
        Family(
            model_type="qwen3_moe",
            num_experts="num_experts",
            top_k="num_experts_per_tok",
            router=("mlp.gate.weight",),
            state=_gqa_state,
        ),
        Family(
            model_type="deepseek_v3",
            num_experts="n_routed_experts",
            top_k="num_experts_per_tok",
            n_group="n_group",
            topk_group="topk_group",
            router=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
            state=_mla_state,
        ),
        Family(
            model_type="glm4_moe",
            num_experts="n_routed_experts",
            top_k="num_experts_per_tok",
            n_group="n_group",
            topk_group="topk_group",
            router=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
            state=_gqa_state,
        ),
        Family(
            model_type="gpt_oss",
            num_experts="num_local_experts",
            top_k="num_experts_per_tok",
            experts="mlp.experts",
            router=("mlp.router.weight", "mlp.router.bias"),
            source_rows=re.compile(
                r".*\blayers\.(?P<layer>\d+)\.mlp\.(?:router\.(?:weight|bias)"
                r"|experts\.(?:gate_up|down)_proj_(?:blocks|scales|bias))"
            ),
            fused=6,
            packed=("mxfp4",),
            state=_gpt_oss_state,
        ),
    )
}


def family_of(config: Config) -> Family:
    """The family of a checkpoint's config.json.

    Raises CheckpointError for an architecture that reap does not know and for a dense model.
    """
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported.",
            f"supported: {', '.join(sorted(_FAMILIES))}",
        )
    if not text_config(config).get(family.num_experts):
        raise CheckpointError(
            f"this {model_type} model is dense: {family.num_experts} is missing or 0 in "
            "config.json, so there are no experts to prune.",
            "reap works on Mixture-of-Experts models",
        )
    return family
