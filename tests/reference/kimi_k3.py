"""Independent float64 forward pass of the Kimi-K3 language model, in numpy.

The arithmetic is written from the formulas collected in docs/K3.md (in the shared material), which
cites Moonshot's `modeling_kimi_linear.py` and flash-linear-attention; the activation and the
projections that it leaves implicit follow the training code of tiny-k3. None of it comes from
mlx-lm, so that agreement between the two means something. It reads checkpoints in the released
layout, keeps no cache, ignores the vision tower and makes no attempt to be fast or small.

The functions below are looked up in this module at call time: a test replaces one of them, or a
constant, by a known wrong variant with `monkeypatch.setattr` to show that the comparison notices.

T: tokens, V: vocabulary, H: heads, D: KDA head dimension, K: experts per token.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Observe = Callable[[int, int, Indices, Array, Array], None]
"""Called as observe(layer, token_index, expert_ids[K], weights[K], outputs[K, latent])."""

PREFIX = "language_model."
LORA_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: KimiRMSNorm's default, not rms_norm_eps."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
"""The value of each 4-bit code; bit 3 is the sign."""
MXFP4_GROUP = 32


@dataclass(frozen=True)
class Config:
    """The fields of `text_config` that the forward pass depends on."""

    num_hidden_layers: int
    num_attention_heads: int
    num_experts_per_token: int
    first_k_dense_replace: int
    moe_layer_freq: int
    moe_renormalize: bool
    routed_scaling_factor: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    attn_res_block_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    kda_layers: frozenset[int]
    kda_heads: int
    kda_head_dim: int
    gate_lower_bound: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Config":
        """Read a checkpoint's config.json. `kda_layers` counts from 1 there, from 0 here."""
        text = config["text_config"]
        linear = text["linear_attn_config"]
        expected = {
            "hidden_act": "situ",
            "moe_router_activation_func": "sigmoid",
            "latent_moe_use_norm": True,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "num_expert_group": 1,
        }
        for name, value in expected.items():
            if text[name] != value:
                raise ValueError(f"{name} is {text[name]!r}: only {value!r} is implemented")
        own = {"kda_layers", "kda_heads", "kda_head_dim", "gate_lower_bound"}
        return cls(
            **{name: text[name] for name in cls.__dataclass_fields__ if name not in own},
            kda_layers=frozenset(layer - 1 for layer in linear["kda_layers"]),
            kda_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            gate_lower_bound=linear["gate_lower_bound"],
        )

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's MLP is routed rather than dense."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


@dataclass(frozen=True)
class Model:
    """A checkpoint decoded to float64, by tensor name without the `language_model.` prefix.

    An mxfp4 pair `X.weight_packed` and `X.weight_scale` is held as the one tensor `X.weight`.
    """

    config: Config
    tensors: dict[str, Array]

    def layer(self, index: int, *path: str) -> "Weights":
        """The tensors of one layer, or of a module inside it."""
        return Weights(self.tensors, ".".join(["model.layers", str(index), *path]))


@dataclass(frozen=True)
class Weights:
    """The tensors below one module path: `weights["q_proj"]` is `<path>.q_proj.weight`."""

    tensors: Mapping[str, Array]
    path: str

    def __getitem__(self, module: str) -> Array:
        return self.tensors[f"{self.path}.{module}.weight"]

    def parameter(self, name: str) -> Array:
        """A tensor that is not called `weight`."""
        return self.tensors[f"{self.path}.{name}"]

    def inside(self, module: str) -> "Weights":
        """The tensors of a submodule."""
        return Weights(self.tensors, f"{self.path}.{module}")


def decode_bf16(data: bytes) -> Array:
    """bfloat16 is the upper half of a float32."""
    upper = np.frombuffer(data, dtype="<u2").astype(np.uint32)
    return np.asarray((upper << 16).view(np.float32), dtype=np.float64)


def decode_mxfp4(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Array:
    """Decode mxfp4 [rows, columns / 2] with scales [rows, columns / 32] to [rows, columns].

    Element 2i is the low nibble of byte i and 2i+1 the high one, each an E2M1 code; a group of 32
    along the row shares the E8M0 scale 2^(byte - 127), 255 being NaN (OCP Microscaling Formats
    v1.0; K3.md 2g).
    """
    rows, width = packed.shape
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 2 * width)
    scale = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    return cast(Array, E2M1[codes] * np.repeat(scale, MXFP4_GROUP, axis=1))


def load(path: Path | str) -> Model:
    """Read a checkpoint directory in the released layout (K3.md 1), text part only."""
    path = Path(path)
    tensors: dict[str, Array] = {}
    coded: dict[str, npt.NDArray[np.uint8]] = {}
    for shard in sorted(path.glob("model*.safetensors")):
        for name, stored in safetensors.deserialize(shard.read_bytes()):
            if not name.startswith(PREFIX):
                continue
            name = name.removeprefix(PREFIX)
            data, shape, dtype = stored["data"], stored["shape"], stored["dtype"]
            if dtype == "U8":
                coded[name] = np.frombuffer(data, dtype=np.uint8).reshape(shape)
            elif dtype == "BF16":
                tensors[name] = decode_bf16(data).reshape(shape)
            elif dtype == "F32":
                tensors[name] = np.frombuffer(data, dtype="<f4").astype(np.float64).reshape(shape)
            else:
                raise ValueError(f"{name}: unexpected dtype {dtype}")
    for name, packed in coded.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix("_packed")
            tensors[module] = decode_mxfp4(packed, coded[f"{module}_scale"])
    return Model(Config.from_dict(json.loads((path / "config.json").read_text())), tensors)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), written with tanh so that it never overflows."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def situ(gate: Array, up: Array, config: Config) -> Array:
    """SiTU: b tanh(gate / b) * sigmoid(gate) * l tanh(up / l) (tiny-k3 train/phase1.py)."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def softmax(x: Array, axis: int) -> Array:
    """e^x / sum e^x along an axis; -inf entries get weight 0."""
    exponent = np.exp(x - x.max(axis=axis, keepdims=True))
    return cast(Array, exponent / exponent.sum(axis=axis, keepdims=True))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean x^2 + eps) * weight over the last axis."""
    return cast(Array, x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def l2norm(x: Array) -> Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis (fla modules/l2norm.py; K3.md 2c)."""
    return cast(Array, x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6))


def short_conv(x: Array, weight: Array) -> Array:
    """Causal depthwise convolution, then SiLU: silu(sum_j w[c, j] x[t - size + 1 + j, c]).

    x is [T, channels], weight [channels, 1, size]; tokens before the first count as zero.
    """
    size = weight.shape[-1]
    padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
    return silu(sum(weight[:, 0, j] * padded[j : j + len(x)] for j in range(size)))


def log_decay(raw: Array, a_log: Array, lower_bound: float) -> Array:
    """KDA's log decay: lower_bound * sigmoid(exp(A_log_h) * raw) (fla ops/kda/gate.py; K3.md 2a-b).

    raw is f_b(f_a x) + dt_bias, [T, H, D]. A_log holds one value per head; the released tensor is
    padded behind the heads and the padding is never read. The bound shapes the gate smoothly, it is
    not a clamp.
    """
    heads = raw.shape[1]
    return lower_bound * sigmoid(np.exp(a_log[:heads])[:, None] * raw)


def gated_delta_rule(query: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    """The gated delta rule as a plain recurrence (fla ops/kda/naive.py).

    S <- Diag(decay_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = S^T q_t, with S [H, D, D]
    starting at zero. query, key, value and decay are [T, H, D], beta is [T, H].
    """
    tokens, heads, dim = query.shape
    state = np.zeros((heads, dim, value.shape[-1]))
    output = np.empty_like(value)
    for t in range(tokens):
        state = state * decay[t, :, :, None]
        predicted = np.einsum("hk,hkv->hv", key[t], state)
        correction = beta[t, :, None] * (value[t] - predicted)
        state = state + key[t, :, :, None] * correction[:, None, :]
        output[t] = np.einsum("hk,hkv->hv", query[t], state)
    return output


def kda_attention(x: Array, weights: Weights, config: Config) -> Array:
    """Kimi Delta Attention (K3.md 1, 2a-c): [T, hidden] to [T, hidden].

    q, k, v = silu(conv(W x)), q and k l2-normalised per head, q also times D^-0.5;
    beta = sigmoid(W_b x); output W_o (o_norm(o) * sigmoid(W_g x)).
    """
    shape = (len(x), config.kda_heads, config.kda_head_dim)
    query, key, value = (
        short_conv(x @ weights[f"{name}_proj"].T, weights[f"{name}_conv1d"]).reshape(shape)
        for name in "qkv"
    )
    query = l2norm(query) * config.kda_head_dim**-0.5
    key = l2norm(key)
    raw = x @ weights["f_a_proj"].T @ weights["f_b_proj"].T + weights.parameter("dt_bias")
    a_log = weights.parameter("A_log")
    decay = np.exp(log_decay(raw.reshape(shape), a_log, config.gate_lower_bound))
    beta = sigmoid(x @ weights["b_proj"].T)
    output = gated_delta_rule(query, key, value, decay, beta)
    output = rms_norm(output, weights["o_norm"], config.rms_norm_eps)
    gate = sigmoid(x @ weights["g_proj"].T)
    return (output.reshape(len(x), -1) * gate) @ weights["o_proj"].T


def mla_attention(x: Array, weights: Weights, config: Config) -> Array:
    """Gated multi-head latent attention without positions, uncompressed (K3.md 2i).

    q = W_qb norm(W_qa x); [c, k_pe] = W_kva x; [k_nope, v] = W_kvb norm(c); k = [k_nope, k_pe] with
    k_pe shared by the heads and never rotated; causal softmax(q k / sqrt(nope + rope)) v, then
    W_o (o * sigmoid(W_g x)).
    """
    tokens, heads = len(x), config.num_attention_heads
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    query = rms_norm(x @ weights["q_a_proj"].T, weights["q_a_layernorm"], LORA_NORM_EPS)
    query = (query @ weights["q_b_proj"].T).reshape(tokens, heads, nope + rope)
    compressed = x @ weights["kv_a_proj_with_mqa"].T
    latent, shared_key = np.split(compressed, [config.kv_lora_rank], axis=1)
    latent = rms_norm(latent, weights["kv_a_layernorm"], LORA_NORM_EPS)
    key_value = (latent @ weights["kv_b_proj"].T).reshape(tokens, heads, nope + config.v_head_dim)
    key, value = np.split(key_value, [nope], axis=2)
    shared_key = np.broadcast_to(shared_key[:, None, :], (tokens, heads, rope))
    key = np.concatenate([key, shared_key], axis=2)
    scores = np.einsum("qhd,khd->hqk", query, key) * (nope + rope) ** -0.5
    scores = np.where(np.tril(np.ones((tokens, tokens), dtype=bool)), scores, -np.inf)
    output: Array = np.einsum("hqk,khd->qhd", softmax(scores, axis=2), value)
    output = output.reshape(tokens, -1)
    return (output * sigmoid(x @ weights["g_proj"].T)) @ weights["o_proj"].T


def mlp(x: Array, weights: Weights, config: Config) -> Array:
    """W_down situ(W_gate x, W_up x): layer 0's dense MLP and the shared experts."""
    gate, up = x @ weights["gate_proj"].T, x @ weights["up_proj"].T
    return situ(gate, up, config) @ weights["down_proj"].T


def route(
    logits: Array, bias: Array, config: Config, allowed: Sequence[int]
) -> tuple[Indices, Array]:
    """Choose one token's experts and their weights (KimiMoEGate; K3.md 2e).

    s = sigmoid(logits); the K largest of s + bias among `allowed` are chosen; their weights are the
    unbiased s, divided by their sum + 1e-20, times routed_scaling_factor.
    """
    scores = sigmoid(logits)
    candidates = np.array(sorted(allowed), dtype=np.int64)
    if len(candidates) < config.num_experts_per_token:
        raise ValueError(
            f"{len(candidates)} experts to choose from, {config.num_experts_per_token} needed"
        )
    order = np.argsort(-(scores + bias)[candidates], kind="stable")
    experts = candidates[order[: config.num_experts_per_token]]
    weights = scores[experts]
    if config.moe_renormalize:
        weights = weights / (weights.sum() + 1e-20)
    return experts, weights * config.routed_scaling_factor


def combine(outputs: Array, weights: Array, norm_weight: Array, eps: float) -> Array:
    """Latent MoE: rms_norm(sum_k weights_k outputs_k), the norm after the sum (K3.md 2e)."""
    return rms_norm(weights @ outputs, norm_weight, eps)


def moe(
    x: Array,
    weights: Weights,
    config: Config,
    layer: int,
    keep: Sequence[int] | None,
    observe: Observe | None,
) -> Array:
    """Latent mixture of experts: W_up norm(sum_k w_k E_k(W_down x)) + shared(x), [T, hidden].

    E_k(z) = w2 situ(w1 z, w3 z). Only experts in `keep` exist for the router, all if it is None.
    """
    logits = x @ weights["gate"].T
    bias = weights.parameter("gate.e_score_correction_bias")
    latent = x @ weights["routed_expert_down_proj"].T
    allowed = range(len(bias)) if keep is None else keep
    routed = np.empty_like(latent)
    for token, z in enumerate(latent):
        experts, routing = route(logits[token], bias, config, allowed)
        outputs = np.empty((len(experts), latent.shape[1]))
        for k, expert in enumerate(experts):
            own = weights.inside(f"experts.{expert}")
            outputs[k] = own["w2"] @ situ(own["w1"] @ z, own["w3"] @ z, config)
        if observe is not None:
            observe(layer, token, experts, routing, outputs)
        norm_weight = weights["routed_expert_norm"]
        routed[token] = combine(outputs, routing, norm_weight, config.rms_norm_eps)
    shared = mlp(x, weights.inside("shared_experts"), config)
    return routed @ weights["routed_expert_up_proj"].T + shared


def mix(stack: Sequence[Array], prefix: Array, norm: Array, proj: Array, eps: float) -> Array:
    """Attention residual over candidates c = stack + [prefix] (K3.md 2h).

    sum_i softmax_i(rms_norm(c_i) . (norm * proj)) c_i: normalised scores, raw sum.
    """
    candidates = np.stack([*stack, prefix])
    scores = np.sum(rms_norm(candidates, norm, eps) * proj[0], axis=-1, keepdims=True)
    return cast(Array, np.sum(softmax(scores, axis=0) * candidates, axis=0))


def attention_residual(
    stack: list[Array],
    prefix: Array,
    starts_block: bool,
    attend: Callable[[list[Array], Array], Array],
) -> tuple[list[Array], Array]:
    """One attention sublayer: the stack and the prefix sum after it (K3.md 2h).

    Attention sees the stack and the prefix sum as they were. A layer that starts a block then
    moves that prefix sum onto the stack, so that the new sum holds the attention output alone.
    """
    output = attend(stack, prefix)
    if starts_block:
        return [*stack, prefix], output
    return stack, prefix + output


def decoder_layer(
    stack: list[Array],
    prefix: Array,
    model: Model,
    layer: int,
    keep: Sequence[int] | None,
    observe: Observe | None,
) -> tuple[list[Array], Array]:
    """One layer: attention, then prefix <- prefix + mlp(norm(mix(stack, prefix))) (K3.md 2h)."""
    config, weights, eps = model.config, model.layer(layer), model.config.rms_norm_eps
    attention = kda_attention if layer in config.kda_layers else mla_attention

    def attend(stack: list[Array], prefix: Array) -> Array:
        norm, proj = weights["self_attention_res_norm"], weights["self_attention_res_proj"]
        h = rms_norm(mix(stack, prefix, norm, proj, eps), weights["input_layernorm"], eps)
        return attention(h, weights.inside("self_attn"), config)

    starts_block = layer % config.attn_res_block_size == 0
    stack, prefix = attention_residual(stack, prefix, starts_block, attend)
    h = mix(stack, prefix, weights["mlp_res_norm"], weights["mlp_res_proj"], eps)
    h = rms_norm(h, weights["post_attention_layernorm"], eps)
    if config.is_moe(layer):
        output = moe(h, weights.inside("block_sparse_moe"), config, layer, keep, observe)
    else:
        output = mlp(h, weights.inside("mlp"), config)
    return stack, prefix + output


def forward(
    model: Model,
    tokens: npt.ArrayLike,
    *,
    keep: Mapping[int, Sequence[int]] | None = None,
    observe: Observe | None = None,
) -> Array:
    """Logits [T, V] of one sequence of token ids [T].

    `keep` restricts the router of the layers it names to the given experts, as if the others did
    not exist. `observe(layer, token_index, expert_ids, weights, outputs)` is called for each token
    of each MoE layer with the final routing weights (renormalised and scaled) and the experts'
    outputs in the latent space before weighting.
    """
    config, tensors, eps = model.config, model.tensors, model.config.rms_norm_eps
    stack: list[Array] = []
    prefix = tensors["model.embed_tokens.weight"][np.asarray(tokens, dtype=np.int64)]
    for layer in range(config.num_hidden_layers):
        kept = None if keep is None else keep.get(layer)
        stack, prefix = decoder_layer(stack, prefix, model, layer, kept, observe)
    norm, proj = (tensors[f"model.output_attn_res_{name}.weight"] for name in ("norm", "proj"))
    h = rms_norm(mix(stack, prefix, norm, proj, eps), tensors["model.norm.weight"], eps)
    return h @ tensors["lm_head.weight"].T
