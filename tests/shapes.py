"""Shapes of public models from their config.json, and saliency of the published shape for them.

Numbers only: no weights, no mlx. Sources: moonshotai/Kimi-K3 (tensor index and config), configs of
Qwen/Qwen3-Coder-480B-A35B-Instruct, zai-org/GLM-4.5-Air and openai/gpt-oss-120b.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reap.artifacts import (
    Format,
    Measurement,
    ModelSpec,
    ModuleSpec,
    MoeLayer,
    Projection,
    Provenance,
    Saliency,
)
from reap.planning.damage import rank

BF16 = Format(16, 0, "dense")
MXFP4 = Format(4, 32, "mxfp4")
TWO, THREE = Format(2, 128, "affine"), Format(3, 128, "affine")


class _Modules:
    """Collects the modules outside the experts."""

    def __init__(self) -> None:
        self.found: list[ModuleSpec] = []

    def matrix(
        self, path: str, rows: int, columns: int, role: str = "trunk", bias: int = 0
    ) -> None:
        layer = int(path.split(".")[2]) if ".layers." in path else None
        self.found.append(
            ModuleSpec(
                path,
                layer,
                role,
                rows * columns,
                columns,
                "bfloat16",
                BF16,
                bias,  # type: ignore
            )
        )

    def fixed(self, path: str, size: int) -> None:
        """`size` bytes that never change."""
        layer = int(path.split(".")[2]) if ".layers." in path else None
        self.found.append(ModuleSpec(path, layer, "fixed", 0, 0, "bfloat16", BF16, size))


def _spec(
    model: str,
    model_type: str,
    modules: _Modules,
    *,
    layers: int,
    moe: range,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    source: Format,
    experts_path: str,
    router_row_bytes: int = 0,
    bias: bool = False,
    state: tuple[int, int],
    carried: int = 0,
) -> ModelSpec:
    projections = tuple(
        Projection(name, rows, columns, "bfloat16", source, 2 * rows if bias else 0)
        for name, rows, columns in (
            ("down_proj", hidden, inner),
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
        )
    )
    return ModelSpec(
        model=model,
        revision="",
        model_sha256=model,
        model_type=model_type,
        parameters=sum(m.elements for m in modules.found) + len(moe) * experts * 3 * hidden * inner,
        num_layers=layers,
        num_experts=experts,
        top_k=top_k,
        n_group=1,
        topk_group=1,
        modules=tuple(modules.found),
        moe_layers=tuple(
            MoeLayer(layer, experts_path.format(layer), projections, router_row_bytes)
            for layer in moe
        ),
        state_bytes_fixed=state[0],
        state_bytes_per_token=state[1],
        carried_bytes=carried,
    )


def kimi_k3() -> ModelSpec:
    """93 layers, all but the first with 896 experts; 24 of them MLA, the others KDA."""
    hidden, width = 7168, 12288
    mla = {*range(3, 92, 4), 92}
    m = _Modules()
    m.matrix("language_model.model.embed_tokens", 163840, hidden, "embedding")
    m.matrix("language_model.lm_head", 163840, hidden)
    m.fixed("language_model.model.norms", 3 * 2 * hidden)
    for layer in range(93):
        base = f"model.layers.{layer}"
        m.fixed(f"{base}.norms", 6 * 2 * hidden)
        m.matrix(f"{base}.o_proj", hidden, width)
        m.matrix(f"{base}.g_proj", width, hidden)
        if layer in mla:
            m.matrix(f"{base}.q_a_proj", 1536, hidden)
            m.matrix(f"{base}.q_b_proj", 18432, 1536)
            m.matrix(f"{base}.kv_a_proj", 576, hidden)
            m.matrix(f"{base}.kv_b_proj", 24576, 512)
            m.fixed(f"{base}.latent_norms", 2 * (1536 + 512))
        else:
            m.matrix(f"{base}.qkv_proj", 3 * width, hidden)
            m.matrix(f"{base}.f_a_proj", 128, hidden)
            m.matrix(f"{base}.f_b_proj", width, 128)
            m.matrix(f"{base}.b_proj", 96, hidden)
            m.fixed(f"{base}.kda", 4 * (3 * width * 4 + 128 + width + 128))
        if layer == 0:
            for name in ("gate_proj", "up_proj"):
                m.matrix(f"{base}.mlp.{name}", 33792, hidden)
            m.matrix(f"{base}.mlp.down_proj", hidden, 33792)
            continue
        m.matrix(f"{base}.mlp.gate", 896, hidden, "router")
        m.matrix(f"{base}.mlp.routed_expert_down_proj", 3584, hidden)
        m.matrix(f"{base}.mlp.routed_expert_up_proj", hidden, 3584)
        m.fixed(f"{base}.mlp.routed_expert_norm", 2 * 3584)
        for name in ("gate_proj", "up_proj"):
            m.matrix(f"{base}.mlp.shared_experts.{name}", 6144, hidden)
        m.matrix(f"{base}.mlp.shared_experts.down_proj", hidden, 6144)
    return _spec(
        "moonshotai/Kimi-K3",
        "kimi_k3",
        m,
        layers=93,
        moe=range(1, 93),
        experts=896,
        top_k=16,
        hidden=3584,
        inner=3072,
        source=MXFP4,
        experts_path="language_model.model.layers.{}.mlp.switch_mlp",
        router_row_bytes=4,
        state=(69 * (4 * width * 128 + 4 * 3 * width * 3), 4 * 576 * 24),
        carried=894_717_952,
    )


def _attention(
    m: _Modules, layer: int, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: int
) -> None:
    base = f"model.layers.{layer}"
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        rows = count * head_dim
        m.matrix(f"{base}.self_attn.{name}", rows, hidden, bias=bias * rows)
    m.matrix(f"{base}.self_attn.o_proj", hidden, heads * head_dim)
    m.fixed(f"{base}.norms", 2 * 2 * hidden)


def qwen3_coder_480b() -> ModelSpec:
    m = _Modules()
    m.matrix("model.embed_tokens", 151936, 6144, "embedding")
    m.matrix("lm_head", 151936, 6144)
    for layer in range(62):
        _attention(m, layer, 6144, 96, 8, 128, 0)
        m.matrix(f"model.layers.{layer}.mlp.gate", 160, 6144, "router")
    return _spec(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "qwen3_moe",
        m,
        layers=62,
        moe=range(62),
        experts=160,
        top_k=8,
        hidden=6144,
        inner=2560,
        source=BF16,
        experts_path="model.layers.{}.mlp.switch_mlp",
        state=(0, 2 * 2 * 8 * 128 * 62),
    )


def glm_4_5_air() -> ModelSpec:
    """Without the layer for multi-token prediction, which mlx-lm does not load."""
    m = _Modules()
    m.matrix("model.embed_tokens", 151552, 4096, "embedding")
    m.matrix("lm_head", 151552, 4096)
    for layer in range(46):
        base = f"model.layers.{layer}.mlp"
        _attention(m, layer, 4096, 96, 8, 128, 2)
        prefix, width = (base, 10944) if layer == 0 else (f"{base}.shared_experts", 1408)
        m.matrix(f"{prefix}.gate_proj", width, 4096)
        m.matrix(f"{prefix}.up_proj", width, 4096)
        m.matrix(f"{prefix}.down_proj", 4096, width)
    return _spec(
        "zai-org/GLM-4.5-Air",
        "glm4_moe",
        m,
        layers=46,
        moe=range(1, 46),
        experts=128,
        top_k=8,
        hidden=4096,
        inner=1408,
        source=BF16,
        experts_path="model.layers.{}.mlp.switch_mlp",
        router_row_bytes=2 * 4096 + 4,
        state=(0, 2 * 2 * 8 * 128 * 46),
    )


def gpt_oss_120b() -> ModelSpec:
    """Every other layer attends to the last 128 tokens only."""
    m = _Modules()
    m.matrix("model.embed_tokens", 201088, 2880, "embedding")
    m.matrix("lm_head", 201088, 2880)
    for layer in range(36):
        _attention(m, layer, 2880, 64, 8, 64, 2)
        m.matrix(f"model.layers.{layer}.mlp.router", 128, 2880, "router", bias=2 * 128)
    per_token = 2 * 2 * 8 * 64
    return _spec(
        "openai/gpt-oss-120b",
        "gpt_oss",
        m,
        layers=36,
        moe=range(36),
        experts=128,
        top_k=4,
        hidden=2880,
        inner=2880,
        source=MXFP4,
        experts_path="model.layers.{}.mlp.experts",
        bias=True,
        state=(18 * 128 * per_token, 18 * per_token),
    )


SHAPES: dict[str, Callable[[], ModelSpec]] = {
    "moonshotai/Kimi-K3": kimi_k3,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": qwen3_coder_480b,
    "zai-org/GLM-4.5-Air": glm_4_5_air,
    "openai/gpt-oss-120b": gpt_oss_120b,
}


def published_saliency(spec: ModelSpec, *, seed: int = 0, sensitivity: bool = True) -> Saliency:
    """Saliency as reports of large models describe it, with everything measured.

    Energies are lognormal with sigma .81 within a layer, which gives the published mass curve of
    Kimi-K3 (its best half carries 78 %), and layers differ 200-fold in scale. Two domains share a
    part of it. kappa rises from 1 to 1.5-3 as a layer is emptied; rho is nearly the same for all
    experts; the nats that an error costs vary by layer.
    """
    rng = np.random.default_rng(seed)
    layers, experts, tokens = len(spec.moe_layers), spec.num_experts, 65_536
    scale = rng.lognormal(0, 1.06, (layers, 1))
    both = rng.normal(0, 0.81 * 0.8**0.5, (1, layers, experts))
    own = rng.normal(0, 0.81 * 0.2**0.5, (2, layers, experts))
    energy = np.exp(both + own) * scale
    count = np.maximum(1, rng.lognormal(0, 0.5, energy.shape) * tokens * spec.top_k / experts)
    count = (count / 2).astype(np.int64)
    per_token = np.broadcast_to(energy * tokens / 2, (2, *energy.shape)).copy()
    gate = 1 / spec.top_k
    norm = np.sqrt(per_token / gate**2 * count)
    largest = norm / np.maximum(count, 1) * rng.lognormal(1.0, 0.2, norm.shape)
    seen = np.full((2, 2, layers), tokens // 2)
    output = energy.sum(axis=2)
    provenance = Provenance("0", "", spec.model, "", spec.model_sha256, {})
    total = energy.mean(axis=0)
    order = rank(total)
    ranked = np.take_along_axis(total, order, axis=1)
    kept = np.array(sorted({*(experts * k // 16 for k in (15, 14, 12, 10, 8, 6, 4))})[::-1])
    dropped = np.stack([ranked[:, n:].sum(axis=1) for n in kept], axis=1)
    worst = rng.uniform(1.5, 3.0, (layers, 1))
    kappa = 1 + (worst - 1) * (1 - kept / experts) ** 2
    probe = np.full(layers, 2048)
    rho = {TWO: 0.311, THREE: 0.093}
    spread = rng.uniform(0.95, 1.05, (layers, experts))
    errors = np.stack([r * total * spread * 2048 for r in rho.values()])
    at = int(np.flatnonzero(kept == experts // 2)[0])
    nats = rng.lognormal(-1, 0.7, layers) / total.sum(axis=1)
    measurement = Measurement(
        formats=tuple(rho),
        tokens=probe,
        kept=kept.astype(np.int64),
        order=order,
        output_energy=total.sum(axis=1) * 2048,
        drop_error=2048 * kappa * dropped,
        low_error=errors.sum(axis=2) * 1.05,
        low_expert_error=errors,
        kl_kept=kept[at : at + 1].astype(np.int64),
        drop_kl=nats * (kappa * dropped)[:, at] if sensitivity else np.zeros(0),
        low_kl=0.7 * nats * errors[0].sum(axis=1) / 2048 if sensitivity else np.zeros(0),
    )
    halves = np.broadcast_to(count, per_token.shape).copy()
    return Saliency(
        provenance=provenance,
        spec=spec,
        domains=("code", "prose"),
        count=halves,
        gate=gate * halves,
        norm=norm,
        gate_norm=gate * norm,
        gate2_norm2=per_token,
        norm2=per_token / gate**2,
        max_norm=largest,
        tokens=seen,
        residual_energy=3.0 * seen * output,
        output_energy=2.0 * seen * output,
        measurement=measurement,
    )
