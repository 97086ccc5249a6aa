"""Plans made by hand, exports of them made once, and what stock mlx-lm says of a checkpoint."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import numpy.typing as npt
import safetensors
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from reap.artifacts import Format, LayerPlan, ModelSpec, Plan, Provenance, Waterfall
from reap.data import embedded_model
from reap.export import ExportResult, export
from reap.models.source import SourceModel, open_source
from reap.planning import PlanSettings
from reap.planning.precision import choose_precision
from reap.progress import Progress, silent

Floats = npt.NDArray[np.float32]
Kept = Mapping[int, tuple[Sequence[int], int]]
"""By MoE layer: the kept ids in bank order, and how many of them are in the high bank."""

FAMILIES = ("kimi_k3", "qwen3_moe", "deepseek_v3", "deepseek_v3-groups", "glm4_moe")
SHAPES = ("identity", "stock", "per-layer", "two-bank")
CASES = [
    (family, shape)
    for family in FAMILIES
    for shape in SHAPES
    if (family, shape) != ("deepseek_v3-groups", "two-bank")
]
TRUSTED = {"per-layer", "two-bank"}
TOKENS = (5, 77, 1, 300, 12, 9, 60, 33, 2, 41, 1800, 7, 7, 250)
EXTRA_FILES = {
    "LICENSE": "Permission is granted.\n",
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "tokenization_custom.py": "raise SystemExit('never run')\n",
    "special_tokens_map.json": '{"pad_token":   "<pad>"}',
}

_DIRECTORY = tempfile.TemporaryDirectory(prefix="reap-tests-")
ROOT = Path(_DIRECTORY.name)


@dataclass(frozen=True)
class Exported:
    """A plan and the checkpoint it became; do not write to either directory."""

    source: Path
    spec: ModelSpec
    plan: Plan
    path: Path
    result: ExportResult


@functools.cache
def source_checkpoint(family: str) -> Path:
    """A checkpoint in the family's released layout, with the files that usually lie beside it."""
    path = ROOT / family / "source"
    if family == "kimi_k3":
        shutil.copytree(embedded_model(), path)
    elif family == "qwen3_moe":
        models.write_qwen3_moe(path, dtype=mx.bfloat16, experts=12, mlp_only_layers=[1], layers=4)
    elif family == "glm4_moe":
        models.write_glm4_moe(path, dtype=mx.bfloat16, layers=4)
    else:
        groups = {"n_group": 4, "topk_group": 2} if family.endswith("groups") else {}
        dtype = mx.bfloat16 if groups else mx.float32
        models.write_deepseek_v3(path, dtype=dtype, experts=16, layers=4, **groups)
    for name, text in EXTRA_FILES.items():
        (path / name).write_text(text)
    return path


@functools.cache
def spec_of(family: str) -> ModelSpec:
    return open_source(str(source_checkpoint(family))).spec()


def exported(family: str, shape: str, trunk: str = "source") -> Exported:
    """The export of `kept_experts(spec, shape)`, made once."""
    return _exported(family, shape, trunk)


@functools.cache
def _exported(family: str, shape: str, trunk: str) -> Exported:
    source, spec = source_checkpoint(family), spec_of(family)
    plan = hand_plan(spec, kept_experts(spec, shape), trunk=trunk)
    out = ROOT / family / f"{shape}-{trunk}"
    return Exported(source, spec, plan, out, write(source, plan, out))


def write(
    source: Path | SourceModel,
    plan: Plan,
    out: Path,
    *,
    saliency: Path | None = None,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Export, with the plan saved beside `out`."""
    plan_file = out.with_name(f"{out.name}.plan.json")
    plan.save(plan_file, force=True)
    model = source if isinstance(source, SourceModel) else open_source(str(source))
    return export(
        model,
        plan,
        out,
        plan_file=plan_file,
        saliency=saliency,
        force=force,
        resume=resume,
        progress=progress,
    )


def kept_experts(spec: ModelSpec, shape: str) -> Kept:
    """Shuffled experts; group after group, and as many of each, if the router has groups.

    identity: all, unshuffled. stock: 3/4 in every layer. per-layer: 3/4, then all, then 1/2 in the
    low bank. two-bank: 3/4 with a third of them high, then all high, then all low, and so on.
    """
    rng = np.random.default_rng(11)
    size = spec.num_experts // spec.n_group
    kept: dict[int, tuple[Sequence[int], int]] = {}
    for number, layer in enumerate(spec.moe_layers):
        if shape == "identity":
            kept[layer.layer] = range(spec.num_experts), spec.num_experts
            continue
        share = {"stock": (3, 3, 3), "per-layer": (3, 4, 2), "two-bank": (3, 4, 2)}[shape]
        count = size * share[number % 3] // 4
        ids = [
            int(group * size + expert)
            for group in range(spec.n_group)
            for expert in rng.permutation(size)[:count]
        ]
        high = {
            "stock": (len(ids),) * 3,
            "per-layer": (len(ids), len(ids), 0),
            "two-bank": (len(ids) // 3, len(ids), 0),
        }[shape][number % 3]
        kept[layer.layer] = ids, high
    return kept


def hand_plan(
    spec: ModelSpec, kept: Kept, *, trunk: str = "source", high: str = "source", low: str = "2bit"
) -> Plan:
    """A plan that keeps exactly `kept`, with the bytes that `spec` gives for it.

    The low bank is rounded as `mx.quantize` does it, so that tests can compare with that.
    """
    precision = choose_precision(spec, PlanSettings(size=1, trunk=trunk, high=high, low=low))
    layers = tuple(LayerPlan(index, tuple(ids), first) for index, (ids, first) in kept.items())
    counts = np.array([len(layer.kept) for layer in layers])
    highs = np.array([layer.high for layer in layers])
    water = Waterfall(
        budget=0,
        trunk=precision.trunk_bytes,
        router=int((counts * precision.router_bytes).sum()),
        high=int((highs * precision.high_bytes).sum()),
        low=int(((counts - highs) * precision.low_bytes).sum()),
        state=0,
        reserve=0,
        carried=spec.carried_bytes,
        context=0,
    )
    one_bank = not any(layer.split for layer in layers)
    even = len({(len(layer.kept), layer.high > 0) for layer in layers}) == 1
    return Plan(
        provenance=Provenance("0.1.0", "", spec.model, spec.revision, spec.model_sha256, {}),
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        layout="two-bank" if not one_bank else "stock" if even else "per-layer",
        layers=layers,
        high=precision.high,
        low=precision.low,
        trunk=precision.trunk,
        experts_path={layer.layer: layer.experts for layer in spec.moe_layers},
        waterfall=water,
        damage=0.0,
        lower_bound=0.0,
        low_rounding="plain",
    )


def load(path: Path, *, trust: bool = True) -> nn.Module:
    """The model as stock mlx-lm loads it, then with every 16-bit array widened to float32."""
    model, _ = load_model(path, trust_remote_code=trust)
    model.set_dtype(mx.float32)
    return model


def logits(model: nn.Module, tokens: Sequence[int] = TOKENS) -> Floats:
    """[T, V] of one sequence."""
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def masked_source(source: Path, plan: Plan) -> nn.Module:
    """The uncut model in mlx-lm: dropped experts are never chosen, low ones hold 2-bit values.

    Everything is worked out from the model that stock mlx-lm loads from the source.
    """
    model, _ = load_model(source)
    for layer in plan.layers:
        block = model.layers[layer.layer].mlp
        experts = block.switch_mlp if "switch_mlp" in block else block.experts
        for name, format in plan.low.items() if layer.low else ():
            experts[name] = _with_low(experts[name], layer.kept[layer.high :], format)
        dropped = sorted(set(range(plan.num_experts)) - set(layer.kept))
        if not dropped:
            continue
        if "e_score_correction_bias" in block:
            block.e_score_correction_bias[mx.array(dropped)] = -1e9
        elif "router" in block:
            block.router.bias[mx.array(dropped)] = -1e9
        elif "e_score_correction_bias" in block.gate:
            block.gate.e_score_correction_bias[mx.array(dropped)] = -1e9
        else:
            block.gate = _MaskedGate(block.gate, plan.num_experts, dropped)
    model.set_dtype(mx.float32)
    return model


class _MaskedGate(nn.Module):
    def __init__(self, gate: nn.Module, experts: int, dropped: Sequence[int]) -> None:
        super().__init__()
        self.gate = gate
        self.penalty = mx.zeros(experts)
        self.penalty[mx.array(dropped)] = -mx.inf

    def __call__(self, x: mx.array) -> mx.array:
        return self.gate(x) + self.penalty


def _dense(part: nn.Module, dtype: mx.Dtype | None = None) -> mx.array:
    """The matrices of a loaded layer; with `dtype`, from scales and biases in that dtype."""
    if "scales" not in part:
        return part.weight if dtype is None else part.weight.astype(dtype)
    scaling = [part[name] for name in ("scales", "biases") if name in part]
    if dtype is not None and part.mode == "affine":
        scaling = [array.astype(dtype) for array in scaling]
    return mx.dequantize(
        part.weight, *scaling, group_size=part.group_size, bits=part.bits, mode=part.mode
    )


def _with_low(part: nn.Module, low: Sequence[int], format: Format) -> nn.Module:
    """The layer with dense matrices, those of `low` requantized.

    Dense values are worked out in float32, as the matrix product does it: in bfloat16, scale *
    code + bias would be rounded once more. Requantizing starts from the rounded ones.
    """
    ids = mx.array(low)
    packed, *scaling = mx.quantize(
        _dense(part)[ids], format.group_size, format.bits, mode=format.mode
    )
    scaling = [array.astype(mx.float32) for array in scaling]
    weight = _dense(part, mx.float32).astype(mx.float32)
    weight[ids] = mx.dequantize(
        packed, *scaling, group_size=format.group_size, bits=format.bits, mode=format.mode
    )
    count, rows, columns = weight.shape
    out = SwitchLinear(columns, rows, count, bias=False)
    out.weight = weight
    if "bias" in part:
        out.bias = part.bias
    return out


def damaged(path: Path, target: Path, edit: Callable[[models.Tensors], models.Tensors]) -> Path:
    """A copy of an export whose shards are passed through `edit`; all other files are the same."""
    models.copy_checkpoint(path, target, edit)
    for file in path.iterdir():
        if not file.name.startswith("model"):
            shutil.copy(file, target / file.name)
    return target


@dataclass(frozen=True)
class Raw:
    """A tensor as a file holds it; `dtype` in safetensors' spelling."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def row(self, index: int) -> bytes:
        """The bytes of one entry of the first axis."""
        size = len(self.data) // self.shape[0]
        return self.data[index * size : (index + 1) * size]


def raw_tensors(path: Path) -> dict[str, Raw]:
    """All tensors of a checkpoint, read without mlx and without reap."""
    return {
        name: Raw(stored["dtype"], tuple(stored["shape"]), bytes(stored["data"]))
        for shard in sorted(path.glob("model*.safetensors"))
        for name, stored in safetensors.deserialize(shard.read_bytes())
    }
