"""Writing the pruned checkpoint: layer by layer, exactly as the plan says, then checked."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from reap.artifacts import LayerPlan, ModelSpec, Plan
from reap.artifacts.files import refuse_existing, sha256, written_whole
from reap.errors import ReapError
from reap.export.card import model_card
from reap.export.low_bank import LowBank
from reap.export.verify import verify
from reap.export.writer import ShardWriter
from reap.models.checkpoint import ORIGIN
from reap.models.quantize import dequantized, quantized, requantized
from reap.models.source import RUNTIME, SourceModel
from reap.progress import Progress, silent

# Weights and what describes them are written anew; everything else beside them is carried over.
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pth")


@dataclass(frozen=True)
class ExportResult:
    """`nbytes` of all tensors, `loaded_bytes` without those that are only carried."""

    path: Path
    nbytes: int
    loaded_bytes: int
    tensors: int


def export(
    source: SourceModel,
    plan: Plan,
    out: Path,
    *,
    plan_file: Path,
    saliency: Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Write `plan` applied to `source` as a checkpoint directory `out`.

    The directory appears only when everything is written and has been loaded again and checked.
    `saliency`: the file the plan was made from; only read if the plan has a low bank whose rounding
    is weighted or with feedback.
    Raises ReapError if plan and model do not belong together, the disk is too small or a check
    fails.
    """
    refuse_existing(out, force)
    _check_target(out, source.checkpoint.path, plan_file)
    spec = source.spec()
    check_plan(source, plan, spec)
    low_bank = LowBank(plan, saliency)
    config = checkpoint_config(source, plan, spec, plan_file)
    _check_space(out, plan.waterfall.weights + plan.waterfall.carried)
    with written_whole(out, force=force) as partial:
        partial.mkdir()
        writer = ShardWriter(partial)
        total = len(source.layers) + 1
        for index in range(len(source.layers)):
            progress(f"writing layer {index} ({index + 1} of {len(source.layers)})", index, total)
            writer.add(_layer_tensors(source, plan, spec, index, low_bank))
            writer.evaluate()
            mx.clear_cache()
        progress("writing the rest", len(source.layers), total)
        trunk = source.trunk_weights()
        writer.add(_with_formats(trunk, plan, spec))
        writer.add(source.checkpoint.load(source.carried_names()))
        writer.close()
        _copy_files(source.checkpoint.path, partial)
        if "model_file" in config:
            shutil.copyfile(RUNTIME, partial / RUNTIME.name)
        (partial / "README.md").write_text(model_card(plan, spec), encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        progress("checking what was written", total, total)
        tensors = verify(partial, source, plan, spec)
        loaded = writer.total_bytes - spec.carried_bytes
        if loaded != plan.waterfall.weights:
            raise ReapError(
                f"the export has {loaded:,} bytes of weights, the plan says "
                f"{plan.waterfall.weights:,}.",
                "this is a bug in reap; please report it with the plan",
            )
        return ExportResult(out, writer.total_bytes, loaded, tensors)


def check_plan(source: SourceModel, plan: Plan, spec: ModelSpec) -> None:
    """Raise ReapError unless `plan` was made for exactly this model and the model can have it."""
    made_for = plan.provenance
    checkpoint = source.checkpoint
    if made_for.config_sha256 != checkpoint.config_sha256:
        raise ReapError(
            f"the plan was made for {made_for.model} (config.json {made_for.config_sha256[:12]}), "
            f"not for {checkpoint.name} ({checkpoint.config_sha256[:12]}).",
            "calibrate and plan this model, or give the model the plan was made for",
        )
    if plan.num_experts != spec.num_experts:
        raise ReapError(
            f"the plan is for {plan.num_experts} experts, {checkpoint.name} has "
            f"{spec.num_experts} experts."
        )
    if plan.model_type != spec.model_type:
        raise ReapError(f"the plan is of a {plan.model_type}, the model a {spec.model_type}.")
    for moe in spec.moe_layers:
        if plan.experts_path.get(moe.layer, moe.experts) != moe.experts:
            raise ReapError(
                f"the plan has layer {moe.layer}'s experts at {plan.experts_path[moe.layer]}, the "
                f"model at {moe.experts}."
            )
    layers = [layer.layer for layer in plan.layers]
    if layers != source.moe_layers:
        raise ReapError(
            f"the plan has MoE layers {layers}, {checkpoint.name} has {source.moe_layers}."
        )
    for layer in plan.layers:
        _check_layer(spec, layer)
    _check_formats(spec, plan)
    _check_bytes(spec, plan)


def _check_layer(spec: ModelSpec, layer: LayerPlan) -> None:
    """The kept experts of a layer against what its router can choose from."""
    count, groups = len(layer.kept), spec.n_group
    if count < spec.min_experts:
        raise ReapError(
            f"layer {layer.layer} keeps {count} experts, its router needs {spec.min_experts}."
        )
    if groups == 1:
        return
    if layer.split:
        raise ReapError(
            f"layer {layer.layer} has two banks, but its router has {groups} groups of experts, "
            "which must stay together."
        )
    # mlx-lm's routers take a group to be the next of equal parts of the rows.
    size, share = spec.num_experts // groups, count // groups
    if [e // size for e in layer.kept] != [g for g in range(groups) for _ in range(share)]:
        raise ReapError(
            f"layer {layer.layer} must keep the same number of experts of each of the router's "
            f"{groups} groups, and list them group after group."
        )


def _check_formats(spec: ModelSpec, plan: Plan) -> None:
    """Every format against the matrix it is for, and the floor of the routers' precision."""
    matrices = {module.path: module for module in spec.modules if module.elements}
    for path, format in plan.trunk.items():
        module = matrices.get(path)
        if module is None:
            raise ReapError(f"the plan stores {path} as {format.label}: there is no such matrix.")
        if format.mode == "dense" or not module.accepts(format):
            raise ReapError(f"{path} ({module.width} columns) cannot be stored as {format.label}.")
        if module.role == "router" and format.bits < 8:
            raise ReapError(f"{path} is a router, which needs at least 8 bits, not {format.label}.")
    for layer, moe in zip(plan.layers, spec.moe_layers):
        for name, used, bank in (("high", layer.high, plan.high), ("low", layer.low, plan.low)):
            projections = {projection.name: projection for projection in moe.projections}
            if used and bank.keys() != projections.keys():
                raise ReapError(
                    f"the {name} bank has formats for {', '.join(sorted(bank)) or 'nothing'}; "
                    f"the experts have {', '.join(sorted(projections))}."
                )
            for part, format in bank.items() if used else ():
                columns = projections[part].columns
                if format != projections[part].format and (
                    format.mode == "dense" or columns % format.group_size
                ):
                    raise ReapError(
                        f"{moe.experts}.{part} ({columns} columns, "
                        f"{projections[part].format.label}) cannot be stored as {format.label}."
                    )


def _check_bytes(spec: ModelSpec, plan: Plan) -> None:
    """The plan's bytes against its layers, so that an edited plan fails before the writing."""
    pairs = list(zip(plan.layers, spec.moe_layers))
    found = {
        "trunk": spec.trunk_bytes(plan.trunk),
        "router": sum(len(p.kept) * spec.router_row_bytes(moe, plan.trunk) for p, moe in pairs),
        "high": sum(p.high * spec.expert_bytes(moe, plan.high) for p, moe in pairs),
        "low": sum(p.low * spec.expert_bytes(moe, plan.low) for p, moe in pairs),
        "carried": spec.carried_bytes,
    }
    for name, size in found.items():
        planned = getattr(plan.waterfall, name)
        if planned != size:
            raise ReapError(
                f"the plan's waterfall has {planned:,} bytes for {name}, its layers come to "
                f"{size:,}.",
                f"after editing a plan, set waterfall.{name} to {size}",
            )


def _check_target(out: Path, source: Path, plan_file: Path) -> None:
    """Keep --force from replacing anything but an earlier checkpoint."""
    target = out.resolve()
    for kind, path in (("source model", source.resolve()), ("plan", plan_file.resolve())):
        if path.is_relative_to(target):
            raise ReapError(f"{out} holds the {kind}: it is not overwritten.", "name another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ReapError(f"{out} is not a checkpoint: it is not overwritten.", "name another --out")


def _check_space(out: Path, need: int) -> None:
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < need:
        raise ReapError(
            f"the checkpoint needs {need:,} bytes, {parent} has {free:,} free.",
            "free space, or choose another place with --out",
        )


def _layer_tensors(
    source: SourceModel, plan: Plan, spec: ModelSpec, index: int, low_bank: LowBank
) -> dict[str, mx.array]:
    """All tensors of one decoder layer by full module path."""
    layer = next((entry for entry in plan.layers if entry.layer == index), None)
    weights = source.layer_weights(index, layer.kept if layer else None)
    prefix = source.layer_prefix(index)
    experts = f"{source.family.experts}."
    tensors = {n: a for n, a in weights.items() if layer is None or not n.startswith(experts)}
    out = _with_formats({f"{prefix}.{n}": a for n, a in tensors.items()}, plan, spec)
    if layer is not None:
        stacked = {n.removeprefix(experts): a for n, a in weights.items() if n.startswith(experts)}
        out |= _expert_tensors(stacked, layer, plan, spec, low_bank)
    return out


def _expert_tensors(
    stacked: dict[str, mx.array],
    layer: LayerPlan,
    plan: Plan,
    spec: ModelSpec,
    low_bank: LowBank,
) -> dict[str, mx.array]:
    """The banks of one layer from its kept experts, which are in bank order already."""
    moe = next(moe for moe in spec.moe_layers if moe.layer == layer.layer)
    formats = plan.quantization
    banks = {".high": slice(0, layer.high), ".low": slice(layer.high, None)}
    if not layer.split:
        banks = {"": slice(0, None)}
    out: dict[str, mx.array] = {}
    for bank, rows in banks.items():
        is_low = bank == ".low" or (not bank and not layer.high)
        for projection in moe.projections:
            path = f"{moe.experts}{bank}.{projection.name}"
            arrays = {
                name.removeprefix(f"{projection.name}."): array[rows]
                for name, array in stacked.items()
                if name.startswith(f"{projection.name}.")
            }
            quantize = low_bank.quantizer(layer.layer, projection.name) if is_low else quantized
            stored = requantized(arrays, projection.format, formats[path], quantize)
            out |= {f"{path}.{name}": array for name, array in stored.items()}
    return out


def _with_formats(tensors: dict[str, mx.array], plan: Plan, spec: ModelSpec) -> dict[str, mx.array]:
    """Store the matrices outside the experts as planned; the rest stays as it is."""
    out = dict(tensors)
    stored = {module.path: module.format for module in spec.modules}
    for path, format in plan.trunk.items():
        if f"{path}.weight" not in out:
            continue
        parts = {
            leaf: out.pop(f"{path}.{leaf}")
            for leaf in ("weight", "scales", "biases")
            if f"{path}.{leaf}" in out
        }
        made = quantized(dequantized(parts, stored[path]), format)
        out |= {f"{path}.{leaf}": array for leaf, array in made.items()}
    return out


def checkpoint_config(
    source: SourceModel, plan: Plan, spec: ModelSpec, plan_file: Path
) -> dict[str, Any]:
    """config.json of the export: the source's, with counts, banks and formats by module path."""
    config = json.loads((source.checkpoint.path / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    for part in (config, text):
        part.pop("quantization_config", None)
        part.pop("quantization", None)
    text[source.family.num_experts] = max(plan.expert_counts)
    stored = {m.path: m.format for m in spec.modules if m.format.mode != "dense"}
    stored |= {path: fmt for path, fmt in plan.quantization.items() if fmt.mode != "dense"}
    if stored:
        first = next(iter(plan.high.values()), next(iter(stored.values())))
        default = first if first.mode != "dense" else next(iter(stored.values()))
        config["quantization"] = default.to_mlx() | {
            path: format.to_mlx() for path, format in sorted(stored.items())
        }
    config["expert_counts"] = plan.expert_counts
    config["expert_bank_split"] = plan.expert_bank_split
    config["reap"] = {
        "version": plan.provenance.reap_version,
        "layout": plan.layout,
        "source": spec.model,
        "source_revision": spec.revision,
        "source_num_experts": spec.num_experts,
        "source_config_sha256": spec.config_sha256,
        "plan_sha256": sha256(plan_file),
        "experts": source.family.experts,
        "router": list(source.family.router),
    }
    config.pop("model_file", None)
    if plan.layout != "stock":
        config["model_file"] = RUNTIME.name
    return config


def _copy_files(source: Path, out: Path) -> None:
    """Tokenizer, templates, generation config, custom code and licences, untouched."""
    for file in sorted(source.iterdir()):
        written = file.name in ("config.json", "README.md", ORIGIN, RUNTIME.name)
        if file.is_file() and not written and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, out / file.name)
