"""The shape of a model as planning needs it: exact bytes without the weights or mlx."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Role = Literal["router", "trunk", "embedding", "fixed"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "uint32": 4, "int32": 4}


@dataclass(frozen=True)
class Format:
    """How a weight matrix is stored: dense (`mode` "dense", 16 or 32 bits) or quantized by MLX.

    Quantized modes are those of `mx.quantize`: affine (a scale and a bias per group in the
    weight's own dtype), mxfp4 / mxfp8 (group 32, one E8M0 byte per group), nvfp4 (group 16, one
    E4M3 byte per group).
    """

    bits: int
    group_size: int
    mode: str

    def bytes(self, elements: int, dtype: str) -> int:
        """Stored bytes of `elements` weights whose unquantized dtype is `dtype`."""
        if self.mode == "dense":
            return elements * self.bits // 8
        per_group = 2 * DTYPE_BYTES[dtype] if self.mode == "affine" else 1
        return elements * self.bits // 8 + elements // self.group_size * per_group

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight including scales (16-bit scales and biases for affine)."""
        return 8 * self.bytes(1 << 20, "bfloat16") / (1 << 20)

    @property
    def known(self) -> bool:
        """Whether MLX can store weights like that."""
        if self.mode == "dense":
            return self.bits in (16, 32)
        if self.mode == "affine":
            return self.bits in (2, 3, 4, 5, 6, 8) and self.group_size in (32, 64, 128)
        fixed = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
        return fixed.get(self.mode) == (self.bits, self.group_size)

    @property
    def label(self) -> str:
        if self.mode == "dense":
            return {16: "16-bit", 32: "32-bit"}[self.bits]
        if self.mode == "affine":
            return f"{self.bits}-bit g{self.group_size}"
        return self.mode

    def to_mlx(self) -> dict[str, Any]:
        """The entry of a checkpoint's config["quantization"] for this format."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @classmethod
    def parse(cls, text: str) -> Format:
        """Parse "mxfp4", "2bit", "3bit-g64", "8bit" (affine, default group 128 below 4 bits, else
        64) or a label. Raises ValueError."""
        name = text.strip().lower().replace(" ", "-")
        fixed = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
        if name in fixed:
            return cls(*fixed[name], name)
        bits_text, _, group_text = name.replace("-bit", "bit").partition("-g")
        bits = int(bits_text.removesuffix("bit")) if bits_text.endswith("bit") else 0
        group_size = int(group_text) if group_text else (128 if bits < 4 else 64)
        if bits not in (2, 3, 4, 5, 6, 8) or group_size not in (32, 64, 128):
            raise ValueError(f"unknown format {text!r}")
        return cls(bits, group_size, "affine")


@dataclass(frozen=True)
class ModuleSpec:
    """One leaf module outside the routed experts.

    `path` is mlx-lm's module path after loading. `elements` counts the weights of the matrix that
    a quantizer may touch (0 if the module has none), `width` is its last dimension, `other_bytes`
    is what never changes (biases, norms).
    """

    path: str
    layer: int | None
    role: Role
    elements: int
    width: int
    dtype: str
    format: Format
    other_bytes: int

    def bytes(self, format: Format | None = None) -> int:
        chosen = format or self.format
        return (chosen.bytes(self.elements, self.dtype) if self.elements else 0) + self.other_bytes

    def accepts(self, format: Format) -> bool:
        """Whether MLX can store this module's matrix in `format` without padding."""
        return self.elements > 0 and self.width % format.group_size == 0


@dataclass(frozen=True)
class Projection:
    """One matrix of every expert of a layer, as `[experts, rows, columns]` after loading."""

    name: str
    rows: int
    columns: int
    dtype: str
    format: Format
    bias_bytes: int = 0

    def bytes(self, format: Format) -> int:
        """Bytes of one expert's matrix (and bias) in `format`."""
        return format.bytes(self.rows * self.columns, self.dtype) + self.bias_bytes


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: `experts` is the path of the experts module; `router_row_bytes` are the bytes
    per expert of router tensors that are not a quantizable module (e.g. a correction bias);
    `router_modules` are quantizable router matrices, one row of `columns` per expert."""

    layer: int
    experts: str
    projections: tuple[Projection, ...]
    router_row_bytes: int


@dataclass(frozen=True)
class ModelSpec:
    """Everything planning needs to know of a model; stored inside the saliency file.

    Router matrices appear in `modules` with role "router" and one row per expert.
    `state_bytes_fixed` + `state_bytes_per_token` × context is the KV and recurrent state of one
    sequence. `carried_bytes` are tensors that are copied but not loaded (vision towers),
    `prediction_layers` and `prediction_bytes` are multi-token-prediction layers, which are neither.
    """

    model: str
    revision: str
    model_sha256: str
    model_type: str
    parameters: int
    num_layers: int
    num_experts: int
    top_k: int
    n_group: int
    topk_group: int
    modules: tuple[ModuleSpec, ...]
    moe_layers: tuple[MoeLayer, ...]
    state_bytes_fixed: int
    state_bytes_per_token: int
    carried_bytes: int
    prediction_layers: int = 0
    prediction_bytes: int = 0

    def trunk_bytes(self, formats: dict[str, Format] | None = None) -> int:
        """Bytes of everything but routed experts and router rows; `formats` by module path."""
        chosen = formats or {}
        return sum(m.bytes(chosen.get(m.path)) for m in self.modules if m.role != "router")

    def router_row_bytes(self, layer: MoeLayer, formats: dict[str, Format] | None = None) -> int:
        """Bytes of one expert's rows in the router tensors of `layer`."""
        chosen = formats or {}
        modules = (m for m in self.modules if m.layer == layer.layer and m.role == "router")
        rows = sum(m.bytes(chosen.get(m.path)) // self.num_experts for m in modules)
        return rows + layer.router_row_bytes

    def expert_bytes(self, layer: MoeLayer, formats: dict[str, Format] | None = None) -> int:
        """Bytes of one expert; `formats` by projection name, default as in the source."""
        chosen = formats or {}
        return sum(p.bytes(chosen.get(p.name, p.format)) for p in layer.projections)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts as the source stores them."""
        return sum(self.num_experts * self.expert_bytes(layer) for layer in self.moe_layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are loaded, as the source stores them."""
        routers = sum(self.num_experts * self.router_row_bytes(layer) for layer in self.moe_layers)
        return self.trunk_bytes() + routers + self.experts_bytes

    def state_bytes(self, context: int) -> int:
        return self.state_bytes_fixed + self.state_bytes_per_token * context

    @property
    def min_experts(self) -> int:
        """Fewest experts a layer can route to: top_k, and whole shares of the router's groups."""
        if self.n_group == 1:
            return self.top_k
        # Group scores are sums of a group's two best, hence at least two in each group.
        return self.n_group * max(2, math.ceil(self.top_k / self.topk_group))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        def fmt(value: dict[str, Any]) -> dict[str, Any]:
            return {**value, "format": Format(**value["format"])}

        modules = tuple(ModuleSpec(**fmt(m)) for m in data["modules"])
        layers = tuple(
            MoeLayer(**{**m, "projections": tuple(Projection(**fmt(p)) for p in m["projections"])})
            for m in data["moe_layers"]
        )
        return cls(**{**data, "modules": modules, "moe_layers": layers})
