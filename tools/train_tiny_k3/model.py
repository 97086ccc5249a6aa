"""Kimi-K3's language model in torch, for training on a CPU.

Parameters carry the names of the released checkpoint without its `language_model.` prefix, except
that the experts of a layer are stacked into one tensor per projection. There is no cache and no
generation: mlx-lm does that once the model is packed.

Shapes are written with B: sequences, T: tokens, N: B x T, H: hidden size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig

LORA_NORM_EPS = 1e-6
"""Epsilon of the two MLA bottleneck norms, which do not follow `norm_eps`."""

L2_NORM_EPS = 1e-6
"""Epsilon below the square root of the KDA query and key normalisation."""

KDA_CHUNK = 16
"""Tokens per KDA chunk. exp(-cumulated log decay) stays below exp(5 x 16), within float32."""


def situ(gate: Tensor, up: Tensor, config: ModelConfig) -> Tensor:
    """SiTU activation of equally shaped `gate` and `up`: both factors are softly bounded."""
    bounded_gate = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate)
    bounded_up = config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)
    return bounded_gate * bounded_up


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias, weight [outputs, inputs]."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02 if inputs > 64 else 0.5 / math.sqrt(inputs))
    return layer


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, followed by SiLU."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, size) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, channels] to the same shape."""
        padded = F.pad(x.transpose(1, 2), (self.weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=x.shape[-1]).transpose(1, 2))


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Gated delta rule with a decay per channel, computed in chunks of `KDA_CHUNK` tokens.

    The recurrence, per head, with a state S [D, D] that starts at zero:

        S   = exp(log_decay_t)[:, None] * S
        S  += beta_t * outer(key_t, value_t - S^T key_t)
        out = S^T query_t

    Args:
        query, key, value, log_decay: [B, T, heads, D]; log_decay in [-5, 0].
        beta: [B, T, heads], the step size in (0, 1).

    Returns:
        [B, T, heads, D].
    """
    batch, length, heads, _ = query.shape
    padding = -length % KDA_CHUNK
    chunks = (length + padding) // KDA_CHUNK

    def by_chunk(x: Tensor) -> Tensor:
        # Padding tokens have key, beta and log decay 0: they leave the state as it is.
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
        return x.reshape(batch, chunks, KDA_CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    query, key, value, log_decay = map(by_chunk, (query, key, value, log_decay))
    beta = by_chunk(beta.unsqueeze(-1))  # [B, heads, chunks, KDA_CHUNK, 1]

    cumulated = log_decay.cumsum(-2)
    decayed_key = key * cumulated.exp()
    decayed_query = query * cumulated.exp()
    grown_key = key * (-cumulated).exp()
    final_key = key * (cumulated[..., -1:, :] - cumulated).exp()
    final_decay = cumulated[..., -1, :].exp().unsqueeze(-1)

    # Within a chunk the updates depend on each other: solve (I + lower triangle) once for all.
    interaction = torch.tril(beta * (decayed_key @ grown_key.mT), -1)
    identity = torch.eye(KDA_CHUNK, dtype=interaction.dtype)
    inverse = torch.linalg.solve_triangular(
        identity + interaction, identity.expand_as(interaction), upper=False
    )
    inverse = inverse * beta.mT
    state_correction = inverse @ decayed_key
    corrected_value = inverse @ value
    within = torch.tril(decayed_query @ grown_key.mT)

    state = query.new_zeros(batch, heads, key.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(chunks):
        update = corrected_value[:, :, chunk] - state_correction[:, :, chunk] @ state
        outputs.append(decayed_query[:, :, chunk] @ state + within[:, :, chunk] @ update)
        state = state * final_decay[:, :, chunk] + final_key[:, :, chunk].mT @ update
    output = torch.stack(outputs, 2).permute(0, 2, 3, 1, 4)
    return output.reshape(batch, length + padding, heads, -1)[:, :length]


class DeltaAttention(nn.Module):
    """Kimi Delta Attention: short convolutions, gated delta rule, full-rank output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.projection_size
        self.q_proj = linear(hidden, size)
        self.k_proj = linear(hidden, size)
        self.v_proj = linear(hidden, size)
        self.q_conv1d = ShortConvolution(size, config.convolution_size)
        self.k_conv1d = ShortConvolution(size, config.convolution_size)
        self.v_conv1d = ShortConvolution(size, config.convolution_size)
        self.f_a_proj = linear(hidden, config.head_dim)
        self.f_b_proj = linear(config.head_dim, size)
        self.b_proj = linear(hidden, config.heads)
        self.g_proj = linear(hidden, size)
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(0.5, 2.0).log())
        self.dt_bias = nn.Parameter(torch.full((size,), -3.0))
        self.o_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.o_proj = linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, H] to the same shape."""
        per_head = (*x.shape[:2], self.config.heads, self.config.head_dim)
        query = self._unit(self.q_conv1d(self.q_proj(x)).view(per_head))
        key = self._unit(self.k_conv1d(self.k_proj(x)).view(per_head))
        value = self.v_conv1d(self.v_proj(x)).view(per_head)

        decay_input = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).view(per_head)
        rate = self.A_log.exp().unsqueeze(-1)  # one per head
        log_decay = self.config.gate_lower_bound * torch.sigmoid(rate * decay_input)
        beta = torch.sigmoid(self.b_proj(x))

        output = delta_rule(query * self.config.head_dim**-0.5, key, value, log_decay, beta)
        output = self.o_norm(output) * torch.sigmoid(self.g_proj(x)).view(per_head)
        return self.o_proj(output.flatten(2))

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        """Divide the last axis of x by its length."""
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


class LatentAttention(nn.Module):
    """Multi-head latent attention without rotary embedding (NoPE), with an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.heads
        query_dim = config.nope_dim + config.rope_dim
        self.q_a_proj = linear(hidden, config.query_rank)
        self.q_a_layernorm = nn.RMSNorm(config.query_rank, eps=LORA_NORM_EPS)
        self.q_b_proj = linear(config.query_rank, heads * query_dim)
        self.kv_a_proj_with_mqa = linear(hidden, config.key_value_rank + config.rope_dim)
        self.kv_a_layernorm = nn.RMSNorm(config.key_value_rank, eps=LORA_NORM_EPS)
        self.kv_b_proj = linear(config.key_value_rank, heads * (config.nope_dim + config.value_dim))
        self.o_proj = linear(heads * config.value_dim, hidden)
        self.g_proj = linear(hidden, heads * config.value_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, H] to the same shape."""
        config = self.config
        batch, length, _ = x.shape
        split = (batch, length, config.heads, -1)
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(split).transpose(1, 2)
        compressed, shared_key = self.kv_a_proj_with_mqa(x).split(
            [config.key_value_rank, config.rope_dim], -1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(split).transpose(1, 2)
        key, value = expanded.split([config.nope_dim, config.value_dim], -1)
        shared_key = shared_key.unsqueeze(1).expand(-1, config.heads, -1, -1)
        key = torch.cat([key, shared_key], -1)
        # The default scale is (nope_dim + rope_dim)^-0.5, as it should be.
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(output.transpose(1, 2).flatten(2) * torch.sigmoid(self.g_proj(x)))


class MLP(nn.Module):
    """Gated feed-forward network with the SiTU activation."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., H] to the same shape."""
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))


class Router(nn.Module):
    """Chooses the experts of a token by sigmoid score plus a correction bias.

    The bias takes part in the choice only, never in the gate weights, and is moved by the training
    loop instead of by gradients.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids and gate weights, both [N, experts_per_token], for x [N, H]."""
        scores = torch.sigmoid(F.linear(x, self.weight))
        chosen = (scores + self.e_score_correction_bias).topk(self.config.experts_per_token).indices
        gates = scores.gather(1, chosen)
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return chosen, gates * self.config.routed_scaling_factor


class Experts(nn.Module):
    """The routed experts of one layer: w1 is the gate, w3 the up and w2 the down projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts, width, latent = config.experts, config.expert_width, config.latent_size
        self.w1 = nn.Parameter(torch.randn(experts, width, latent) * 0.06)
        self.w3 = nn.Parameter(torch.randn(experts, width, latent) * 0.06)
        self.w2 = nn.Parameter(torch.randn(experts, latent, width) * 0.06)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map x [pairs, latent], sorted by expert with `counts` [experts] rows each.

        One small product per expert beats a padded batch: routing becomes uneven, and padding to
        the busiest expert would multiply the work.
        """
        rows = counts.tolist()
        busy = [
            (part, w1, w3)
            for part, w1, w3 in zip(x.split(rows), self.w1.unbind(), self.w3.unbind(), strict=True)
            if len(part)
        ]
        gate = torch.cat([part @ w1.T for part, w1, _ in busy])
        up = torch.cat([part @ w3.T for part, _, w3 in busy])
        inner = situ(gate, up, self.config).split(rows)
        return torch.cat(
            [part @ w2.T for part, w2 in zip(inner, self.w2.unbind(), strict=True) if len(part)]
        )


class MixtureOfExperts(nn.Module):
    """Latent mixture of experts: the routed experts work in a narrower space than the shared one.

    `pairs_per_expert` [experts] holds how many tokens the latest forward pass sent to each expert.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config)
        self.routed_expert_down_proj = linear(config.hidden_size, config.latent_size)
        self.routed_expert_up_proj = linear(config.latent_size, config.hidden_size)
        self.routed_expert_norm = nn.RMSNorm(config.latent_size, eps=config.norm_eps)
        self.shared_experts = MLP(config, config.expert_width * config.shared_experts)
        self.pairs_per_expert = torch.zeros(config.experts, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, H] to the same shape."""
        tokens = x.flatten(0, -2)
        chosen, gates = self.gate(tokens)
        self.pairs_per_expert = torch.bincount(chosen.flatten(), minlength=self.config.experts)

        order = chosen.flatten().argsort(stable=True)
        latent = self.routed_expert_down_proj(tokens)
        by_expert = latent[order // self.config.experts_per_token]
        outputs = self.experts(by_expert, self.pairs_per_expert)
        outputs = torch.empty_like(outputs).index_copy(0, order, outputs)

        mixed = (outputs.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(1)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(mixed))
        return (routed + self.shared_experts(tokens)).view_as(x)


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each fed by an attention residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.starts_block = layer % config.attention_residual_block == 0
        self.self_attn = LatentAttention(config) if config.is_mla(layer) else DeltaAttention(config)
        if config.is_dense(layer):
            self.mlp = MLP(config, config.dense_width)
        else:
            self.block_sparse_moe = MixtureOfExperts(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.self_attention_res_proj = residual_score(hidden)
        self.self_attention_res_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.mlp_res_proj = residual_score(hidden)
        self.mlp_res_norm = nn.RMSNorm(hidden, eps=config.norm_eps)

    def forward(self, blocks: list[Tensor], current: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the residual blocks and the running sum, all [B, T, H], after this layer."""
        x = mix(blocks, current, self.self_attention_res_proj, self.self_attention_res_norm)
        attended = self.self_attn(self.input_layernorm(x))
        if self.starts_block:
            blocks, current = [*blocks, current], attended
        else:
            current = current + attended
        x = mix(blocks, current, self.mlp_res_proj, self.mlp_res_norm)
        feed_forward = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return blocks, current + feed_forward(self.post_attention_layernorm(x))


def residual_score(hidden: int) -> nn.Linear:
    """The score projection [1, hidden] of an attention residual, zero to mix evenly at first."""
    layer = nn.Linear(hidden, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def mix(blocks: list[Tensor], current: Tensor, score: nn.Linear, norm: nn.RMSNorm) -> Tensor:
    """Attention residual: a softmax-weighted sum of the blocks and the running sum, [B, T, H].

    The scores come from the normalised candidates, the sum from the raw ones.
    """
    if not blocks:
        return current
    candidates = torch.stack([*blocks, current])
    return (score(norm(candidates)).softmax(0) * candidates).sum(0)


class Backbone(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocabulary_size, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.output_attn_res_proj = residual_score(hidden)
        self.output_attn_res_norm = nn.RMSNorm(hidden, eps=config.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, H]."""
        blocks: list[Tensor] = []
        current = self.embed_tokens(tokens)
        for layer in self.layers:
            blocks, current = layer(blocks, current)
        return self.norm(mix(blocks, current, self.output_attn_res_proj, self.output_attn_res_norm))


class KimiK3(nn.Module):
    """The language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = linear(config.hidden_size, config.vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to logits [B, T, vocabulary]."""
        return self.lm_head(self.model(tokens))

    def mixtures(self) -> list[MixtureOfExperts]:
        """The expert layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
