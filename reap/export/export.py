"""Writing the pruned checkpoint: layer by layer, exactly as the plan says, then checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reap.artifacts import LayerPlan, ModelSpec, Plan
from reap.artifacts.files import recover, refuse_existing, remove, sha256
from reap.artifacts.manifest import MANIFEST, write_manifest
from reap.artifacts.partial import sync
from reap.errors import ReapError
from reap.export.card import model_card
from reap.export.content import Content
from reap.export.low_bank import LowBank
from reap.export.partial import PartialExport, fingerprint, partial_export
from reap.export.verify import verify
from reap.export.writer import Shard, shards, write_index, write_shards
from reap.models.checkpoint import ORIGIN
from reap.models.source import RUNTIME, SourceModel
from reap.progress import Progress, silent

# Weights and what describes them are written anew; everything else beside them is carried over.
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pth", ".pt", ".onnx")
_WRITTEN = ("config.json", "README.md", RUNTIME.name, MANIFEST, ORIGIN)

# A directory with more than that is no set of templates.
_SMALL_DIRECTORY = 64 * 2**20


@dataclass(frozen=True)
class ExportResult:
    """`nbytes` of all tensors, `loaded_bytes` without those that are only carried."""

    path: Path
    nbytes: int
    loaded_bytes: int
    tensors: int


@dataclass(frozen=True)
class Outline:
    """What an export writes: shards, and bytes of the files that are copied, by relative path.

    `read_bytes` are read of the source's tensors.
    """

    shards: Sequence[Shard]
    copied: dict[str, int]
    read_bytes: int

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def tensors(self) -> int:
        return sum(len(shard.tensors) for shard in self.shards)

    def need(self, done: Sequence[str] = ()) -> int:
        """Bytes still to be written when the shards `done` are there."""
        left = sum(shard.nbytes for shard in self.shards if shard.name not in done)
        return left + sum(self.copied.values())


def outline(source: SourceModel, plan: Plan, *, saliency: Path | None = None) -> Outline:
    """What `export` would write; reads headers only. Raises ReapError as `export` does."""
    spec = source.spec()
    check_plan(source, plan, spec)
    return _outline(Content(source, plan, spec, LowBank(plan, saliency)))


def _outline(content: Content) -> Outline:
    copied = copied_sizes(content.source.checkpoint.path)
    return Outline(shards(content.foreseen), copied, content.read_bytes())


def export(
    source: SourceModel,
    plan: Plan,
    out: Path,
    *,
    plan_file: Path,
    saliency: Path | None = None,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Write `plan` applied to `source` as a checkpoint directory `out`.

    The directory appears only when everything is written and has been loaded again and checked.
    An export that ends before leaves `<out>.partial` if a shard is done, which `resume` takes up
    and `force` removes. `saliency`: the file the plan was made from; needed if the plan has a low
    bank whose rounding is weighted or with feedback, else it makes the check of the low bank
    stricter.
    Raises ReapError if plan and model do not belong together, the disk is too small, a check fails
    or another process writes `out`.
    """
    recover(out)
    refuse_existing(out, force)
    check_target(out, source.checkpoint.path, plan_file)
    spec = source.spec()
    check_plan(source, plan, spec)
    low_bank = LowBank(plan, saliency)
    config = checkpoint_config(source, plan, spec, plan_file)
    content = Content(source, plan, spec, low_bank)
    made = _outline(content)
    made_of = fingerprint(source, plan_file, low_bank.sha256)
    loaded = made.nbytes - spec.carried_bytes
    if loaded != plan.waterfall.weights:
        raise ReapError(
            f"the export has {loaded:,} bytes of weights, the plan says "
            f"{plan.waterfall.weights:,}.",
            "this is a bug in reap; please report it with the plan",
        )
    with partial_export(out, made_of, resume=resume, force=force) as partial:
        check_space(out, made.need(list(partial.done)), begun=bool(partial.done))
        write_shards(content, made.shards, partial, progress)
        folder = partial.checkpoint
        write_rest(folder, source, made, config, model_card(plan, spec))
        progress("checking what was written", 0, 1)
        with checked(partial, out, source):
            tensors = verify(
                folder, source, plan, spec, saliency=low_bank.saliency, progress=progress
            )
    return ExportResult(out, made.nbytes, loaded, tensors)


def write_rest(
    folder: Path, source: SourceModel, made: Outline, config: dict[str, Any], card: str
) -> None:
    """All files but the shards."""
    write_index(folder, made.shards)
    copy_files(source.checkpoint.path, folder)
    if config.get("model_file") == RUNTIME.name:
        shutil.copyfile(RUNTIME, folder / RUNTIME.name)
    (folder / "README.md").write_text(card, encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


@contextmanager
def checked(partial: PartialExport, out: Path, source: SourceModel) -> Iterator[None]:
    """Check the export inside; then it gets its manifest and its place, or is removed."""
    try:
        partial.check_source(source)
        yield
    except ReapError:
        partial.remove()  # taking it up again would end here again
        raise
    folder = partial.checkpoint
    remove(folder / "__pycache__")  # the check has run reap_model.py
    write_manifest(folder, partial.done | digests(folder, partial.done))
    partial.finish(out)


def digests(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """Have all files on the disk; sha256 of those that are not known, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name not in known:
            sync(path)
            if path.is_file():
                found[name] = sha256(path)
    return found


def check_plan(source: SourceModel, plan: Plan, spec: ModelSpec) -> None:
    """Raise ReapError unless `plan` was made for exactly this model and the model can have it."""
    made_for = plan.provenance
    checkpoint = source.checkpoint
    if made_for.model_sha256 != checkpoint.model_sha256:
        raise ReapError(
            f"the plan was made for {made_for.model} ({made_for.model_sha256[:12]}), "
            f"not for {checkpoint.name} ({checkpoint.model_sha256[:12]}).",
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


def check_target(out: Path, source: Path, plan_file: Path) -> None:
    """Keep --force from replacing anything but an earlier checkpoint."""
    target = out.resolve()
    for kind, path in (("source model", source.resolve()), ("plan", plan_file.resolve())):
        if path.is_relative_to(target):
            raise ReapError(f"{out} holds the {kind}: it is not overwritten.", "name another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ReapError(f"{out} is not a checkpoint: it is not overwritten.", "name another --out")


def free_space(out: Path) -> tuple[Path, int]:
    """The directory that `out` would be made in, or above it, and how many bytes are free there."""
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    return parent, shutil.disk_usage(parent).free


def check_space(out: Path, need: int, *, begun: bool = False) -> None:
    parent, free = free_space(out)
    if free < need:
        more = " more" if begun else ""
        raise ReapError(
            f"the checkpoint needs {need:,} bytes{more}, {parent} has {free:,} free.",
            "free space, or choose another place with --out",
        )


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
        "source_model_sha256": spec.model_sha256,
        "plan_sha256": sha256(plan_file),
        "experts": source.family.experts,
        "router": list(source.family.router),
    }
    config.pop("model_file", None)
    if plan.layout != "stock":
        config["model_file"] = RUNTIME.name
    return config


def copied_files(source: Path) -> list[Path]:
    """Tokenizer, templates, generation config, custom code and licences, to be left untouched.

    Of directories, the small ones without weights (additional_chat_templates): others hold the
    model once more, in another format (original, onnx), or a tool's own files (.cache).
    """
    found = []
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _WRITTEN and not path.name.endswith(_NOT_COPIED):
            found.append(path)
        elif path.is_dir() and not path.name.startswith("."):
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            small = sum(file.stat().st_size for file in files) <= _SMALL_DIRECTORY
            if small and not any(file.name.endswith(_NOT_COPIED) for file in files):
                found += files
    return found


def copied_sizes(source: Path) -> dict[str, int]:
    """Bytes of the files that are copied, by relative path."""
    return {str(file.relative_to(source)): file.stat().st_size for file in copied_files(source)}


def copy_files(source: Path, out: Path) -> None:
    for file in copied_files(source):
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
