"""Writes a trained model in the layout of the released Kimi-K3 checkpoint, and reads it back.

Experts become compressed-tensors mxfp4, everything else bfloat16 or, where the release has it,
float32. There is one shard per layer, then one for head and embeddings, one for the projector and
one for the vision tower; the last two hold random stand-ins that no language model reads.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from .config import ModelConfig
from .model import KimiK3
from .tokens import SPECIAL_TOKENS

PREFIX = "language_model."

MXFP4_GROUP = 32
MXFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values that three of the four bits stand for; the fourth is the sign."""

FLOAT32 = re.compile(
    r"_conv1d\.weight$|\.A_log$|\.dt_bias$|\.o_norm\.weight$|\.e_score_correction_bias$"
)
"""Tensors that the release keeps in float32."""

EXPERTS = re.compile(r"(.*\.block_sparse_moe\.experts)\.(w[123])")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [..., out, in] to mxfp4: codes uint8 [..., out, in/2], scales [..., out, in/32].

    A byte holds two neighbours along the input, the first in its low nibble. The scale of a group
    of 32 is 2^(byte - 127). Two powers of two are tried and the one with the smaller squared error
    kept: the smaller uses the finer grid but cuts off magnitudes above 6 scales, the larger holds
    everything. No other can be better: below, more is cut off; above, the grid is a subset.
    """
    groups = weight.float().unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    floor = torch.where(largest > 0, torch.floor(torch.log2(largest / 6)), 0.0).clamp(-126, 126)
    magnitudes = torch.tensor(MXFP4_MAGNITUDES)

    def rounded(exponent: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.exp2(exponent)
        nearest = ((groups.abs() / scale).unsqueeze(-1) - magnitudes).abs().argmin(-1)
        error = (magnitudes[nearest] * scale - groups.abs()).square().sum(-1, keepdim=True)
        return nearest + 8 * (groups < 0), error

    fine_codes, fine_error = rounded(floor)
    wide_codes, wide_error = rounded(floor + 1)
    wide = wide_error < fine_error
    codes = torch.where(wide, wide_codes, fine_codes).flatten(-2).to(torch.uint8)
    exponents = torch.where(wide, floor + 1, floor).squeeze(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def unpack_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight [..., out, in] that `pack_mxfp4`'s codes and scales stand for."""
    values = torch.tensor([*MXFP4_MAGNITUDES, *(-value for value in MXFP4_MAGNITUDES)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    groups = values[codes.long()].unflatten(-1, (-1, MXFP4_GROUP))
    return (groups * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def pack(model: KimiK3, tokenizer: Tokenizer, directory: Path) -> int:
    """Write the checkpoint to `directory`, which must not exist; return the bytes of its tensors.

    The directory appears under its name only once it is complete.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    shards = _shards(model)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        (partial / name).write_bytes(save(tensors, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(partial / "model.safetensors.index.json", index)
    _write_json(partial / "config.json", checkpoint_config(model.config))
    _write_json(partial / "generation_config.json", {"eos_token_id": 2, "bos_token_id": 0})
    _write_json(partial / "tokenizer_config.json", tokenizer_config())
    tokenizer.save(str(partial / "tokenizer.json"))
    os.replace(partial, directory)
    return total


def load_packed(directory: Path, config: ModelConfig) -> KimiK3:
    """The model in `directory` as float32 torch weights, experts unpacked."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        stored.update(load_file(shard))
    model = KimiK3(config)
    state = {}
    for name in model.state_dict():
        if experts := EXPERTS.fullmatch(name):
            path, projection = experts.groups()
            keys = [f"{PREFIX}{path}.{expert}.{projection}" for expert in range(config.experts)]
            state[name] = unpack_mxfp4(
                torch.stack([stored[f"{key}.weight_packed"] for key in keys]),
                torch.stack([stored[f"{key}.weight_scale"] for key in keys]),
            )
        else:
            state[name] = stored[PREFIX + name].float()
            if name.endswith(".A_log"):
                state[name] = state[name][: config.heads]
    model.load_state_dict(state)
    return model.eval()


def _shards(model: KimiK3) -> list[dict[str, Tensor]]:
    """The tensors of every file: layers, head and embeddings, projector, vision tower."""
    layers: list[dict[str, Tensor]] = [{} for _ in range(model.config.layers)]
    top: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        shard = layers[int(layer[1])] if layer else top
        shard.update(_stored(name, tensor, model.config))
    return [*layers, top, *_vision_stand_ins(model.config)]


def _stored(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """What the checkpoint holds for one tensor of the model."""
    if experts := EXPERTS.fullmatch(name):
        path, projection = experts.groups()
        tensors = {}
        for expert, (packed, scales) in enumerate(zip(*pack_mxfp4(tensor), strict=True)):
            key = f"{PREFIX}{path}.{expert}.{projection}"
            tensors[f"{key}.weight_packed"] = packed.clone()
            tensors[f"{key}.weight_scale"] = scales.clone()
        return tensors
    if name.endswith(".A_log"):
        # One value per head; the release pads them with zeros to the head dimension.
        padded = torch.zeros(config.head_dim)
        padded[: config.heads] = tensor
        return {PREFIX + name: padded}
    dtype = torch.float32 if FLOAT32.search(name) else torch.bfloat16
    return {PREFIX + name: tensor.to(dtype).contiguous()}


def _vision_stand_ins(config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors under the names of the projector and of a one-block vision tower."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden = config.hidden_size
    projector = {
        "mm_projector.proj.0.weight": noise(64, 128),
        "mm_projector.proj.2.weight": noise(hidden, 64),
        "mm_projector.post_norm.weight": ones(hidden),
    }
    tower = {
        "vision_tower.patch_embed.proj.weight": noise(32, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": noise(8, 8, 32),
        "vision_tower.encoder.blocks.0.wqkv.weight": noise(96, 32),
        "vision_tower.encoder.blocks.0.wo.weight": noise(32, 32),
        "vision_tower.encoder.final_layernorm.weight": ones(32),
    }
    return projector, tower


def checkpoint_config(config: ModelConfig) -> dict[str, Any]:
    """The content of config.json; the release counts KDA and MLA layers from 1."""
    text = {
        "model_type": "kimi_linear",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "intermediate_size": config.dense_width,
        "moe_intermediate_size": config.expert_width,
        "num_experts": config.experts,
        "num_experts_per_token": config.experts_per_token,
        "num_shared_experts": config.shared_experts,
        "routed_expert_hidden_size": config.latent_size,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": config.dense_layers,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.key_value_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": config.norm_eps,
        "attn_res_block_size": config.attention_residual_block,
        "hidden_act": "situ",
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "linear_attn_config": {
            "num_heads": config.heads,
            "head_dim": config.head_dim,
            "short_conv_kernel_size": config.convolution_size,
            "gate_lower_bound": config.gate_lower_bound,
            "use_full_rank_gate": True,
            "full_attn_layers": [layer + 1 for layer in config.mla_layers],
            "kda_layers": [layer + 1 for layer in range(config.layers) if not config.is_mla(layer)],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "group_size": MXFP4_GROUP,
                        "strategy": "group",
                        "symmetric": True,
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"vt_hidden_size": 32, "num_hidden_layers": 1, "patch_size": 14},
    }


def tokenizer_config() -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    end_of_text, _, end_of_message = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_message,
        "pad_token": end_of_text,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
