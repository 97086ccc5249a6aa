"""Export in the source's own Hugging Face layout: fewer experts, every byte that stays as it was.

Whatever loads the source loads the result (tested: mlx-lm and transformers). A config knows one
number of experts and one encoding, so the plan must keep as many experts in every layer, all in the
source's format, and change nothing else. Tensors are copied as bytes: experts under their new
numbers, router tensors and fused experts row by row, in the order of the plan. config.json gets
the new number and nothing of reap's, lest a loader stumble over it; where the checkpoint comes
from stands in README.md and reap.json.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from reap.artifacts import ModelSpec, Plan
from reap.artifacts.files import recover, refuse_existing, sha256, write_json
from reap.errors import CheckpointError, ReapError
from reap.export.card import model_card
from reap.export.content import Tensor
from reap.export.export import (
    ExportResult,
    Outline,
    check_plan,
    check_space,
    check_target,
    checked,
    copied_sizes,
    write_rest,
)
from reap.export.partial import PartialExport, fingerprint, partial_export
from reap.export.verify import check_forward
from reap.export.writer import SHARD_BYTES, Shard, Writer, copied_bytes
from reap.models.checkpoint import (
    ORIGIN,
    Checkpoint,
    Range,
    TensorInfo,
    open_checkpoint,
    same_bytes,
)
from reap.models.formats import SCALE_SUFFIX
from reap.models.source import SourceModel
from reap.progress import Progress, silent

_WAY_OUT = "plan with --layout stock --low none, which keeps as many experts in every layer"


@dataclass(frozen=True)
class Piece:
    """A tensor to write: the tensor `source`, or its `rows` along the first axis in that order."""

    name: str
    source: str
    rows: tuple[int, ...] | None = None

    def shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.shape if self.rows is None else (len(self.rows), *info.shape[1:])

    def ranges(self, checkpoint: Checkpoint) -> list[Range]:
        """In the source's file."""
        if self.rows is None:
            return checkpoint.ranges([self.source])
        return checkpoint.row_ranges(self.source, self.rows)

    def tensor(self, checkpoint: Checkpoint) -> Tensor:
        info = checkpoint.tensors[self.source]
        nbytes = sum(size for _, _, size in self.ranges(checkpoint))
        return Tensor(info.dtype, self.shape(info), nbytes)


def outline_hf(source: SourceModel, plan: Plan) -> Outline:
    """What `export_hf` would write; reads headers only. Raises ReapError as `export_hf` does."""
    return _outline(source, _pieces_of(source, plan, source.spec()))


def _pieces_of(source: SourceModel, plan: Plan, spec: ModelSpec) -> list[Piece]:
    """Raises ReapError for a plan that is not of this model or that the layout cannot hold."""
    _check_uniform(plan)
    pieces = _pieces(source, plan)
    check_plan(source, plan, spec)
    _check_bank(plan, spec)
    return pieces


def _outline(source: SourceModel, pieces: Sequence[Piece]) -> Outline:
    """The pieces in files of at most SHARD_BYTES, their order kept from file to file."""
    files: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for piece in pieces:
        tensor = piece.tensor(source.checkpoint)
        if files[-1] and tensor.nbytes > room:
            files.append({})
            room = SHARD_BYTES
        files[-1][piece.name] = tensor
        room -= tensor.nbytes
    shards = [
        Shard(f"model-{number:05d}-of-{len(files):05d}.safetensors", {None: _aligned(tensors)})
        for number, tensors in enumerate(files, 1)
    ]
    total = sum(shard.nbytes for shard in shards)
    return Outline(shards, copied_sizes(source.checkpoint.path), total)


def _aligned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Wide types first, as the reference writer has it, so that every tensor is aligned."""

    def width(name: str) -> int:
        return tensors[name].nbytes // max(1, math.prod(tensors[name].shape))

    return {name: tensors[name] for name in sorted(tensors, key=width, reverse=True)}


def export_hf(
    source: SourceModel,
    plan: Plan,
    out: Path,
    *,
    plan_file: Path,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Write `plan` applied to `source` as a checkpoint directory `out` in the source's layout.

    The directory appears only when every tensor has been compared with the source and a forward
    pass is finite; `force` and `resume` as in `export`. `nbytes` of the result are those of the
    files, which are fewer than planned where the source is FP8: plans count what mlx-lm loads.
    Raises ReapError for a plan that the layout cannot hold (see the module), an MLX source, another
    model's plan, a small disk, and as `export` does.
    """
    recover(out)
    refuse_existing(out, force)
    check_target(out, source.checkpoint.path, plan_file)
    spec = source.spec()
    pieces = _pieces_of(source, plan, spec)
    config = _config(source, plan)
    made = _outline(source, pieces)
    made_of = fingerprint(source, plan_file, None) | {"the layout": "hf"}
    with partial_export(out, made_of, resume=resume, force=force) as partial:
        check_space(out, made.need(list(partial.done)), begun=bool(partial.done))
        _write_shards(source.checkpoint, pieces, made.shards, partial, progress)
        folder = partial.checkpoint
        write_rest(folder, source, made, config, model_card(plan, spec, layout="hf"))
        write_json(folder / ORIGIN, _origin(plan, spec, plan_file))
        progress("checking what was written", len(pieces), len(pieces))
        with checked(partial, out, source):
            _verify(folder, source, plan, pieces)
    carried = sum(source.checkpoint.tensors[name].nbytes for name in source.carried_names())
    return ExportResult(out, made.nbytes, made.nbytes - carried, len(pieces))


# What the layout can hold


def _check_uniform(plan: Plan) -> None:
    """Raise ReapError for a plan whose counts, banks or trunk the layout has no room for."""
    low = sum(layer.low for layer in plan.layers)
    if low:
        kept = sum(len(layer.kept) for layer in plan.layers)
        raise ReapError(
            f"--format hf keeps the source's encoding: the plan has {low} of {kept} experts in the "
            f"low bank ({_labels(plan.low.values())}).",
            _WAY_OUT,
        )
    counts = Counter(len(layer.kept) for layer in plan.layers)
    if len(counts) > 1:
        named = ", ".join(f"{n} in {layers} layers" for n, layers in sorted(counts.items()))
        raise ReapError(
            "--format hf needs the same number of experts in every layer, config.json has room "
            f"for one; the plan keeps {named}.",
            _WAY_OUT,
        )
    if plan.trunk:
        path, format = next(iter(plan.trunk.items()))
        raise ReapError(
            f"--format hf keeps the source's encoding: the plan stores {len(plan.trunk)} matrices "
            f"outside the experts anew, {path} as {format.label}.",
            "plan with --trunk source",
        )


def _check_bank(plan: Plan, spec: ModelSpec) -> None:
    for moe in spec.moe_layers:
        for projection in moe.projections:
            planned = plan.high[projection.name]
            if planned != projection.format:
                raise ReapError(
                    f"--format hf keeps the source's encoding: {moe.experts}.{projection.name} is "
                    f"{projection.format.label}, the plan stores it as {planned.label}.",
                    "plan with --high source",
                )


def _labels(formats: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(format.label for format in formats))


def _pieces(source: SourceModel, plan: Plan) -> list[Piece]:
    """Every tensor of the export in the order in which the source's files hold them.

    Layers beyond the last one (multi-token prediction) are left out: their experts would have to
    have the same new number, and nothing is known of them. Raises ReapError for an MLX source and
    for routers and experts that are not where the family has them.
    """
    family, tensors = source.family, source.checkpoint.tensors
    kept = {layer.layer: layer.kept for layer in plan.layers}
    slots = {
        index: {expert: slot for slot, expert in enumerate(ids)} for index, ids in kept.items()
    }
    found: Counter[int] = Counter()
    apart: set[int] = set()
    pieces: list[Piece] = []
    names = [*source.loaded_names(), *source.carried_names()]
    for name in sorted(names, key=lambda name: (tensors[name].file, tensors[name].offset)):
        expert, rows = family.source_expert.fullmatch(name), family.source_rows.fullmatch(name)
        if expert and int(expert["layer"]) in kept:
            apart.add(int(expert["layer"]))
            slot = slots[int(expert["layer"])].get(int(expert["expert"]))
            if slot is not None:
                pieces.append(Piece(f"{expert['head']}{slot}{expert['tail']}", name))
        elif rows and int(rows["layer"]) in kept:
            index = int(rows["layer"])
            if tensors[name].shape[:1] != (plan.num_experts,) or name + SCALE_SUFFIX in tensors:
                raise CheckpointError(
                    f"{name} of shape {tensors[name].shape} cannot be cut by experts: there are "
                    f"{plan.num_experts}."
                )
            found[index] += 1
            pieces.append(Piece(name, name, kept[index]))
        else:
            pieces.append(Piece(name, name))
    wanted = len(family.router) + family.fused
    experts_found = apart or max(found.values(), default=0) > len(family.router)
    if source.config.get("quantization") or not experts_found:
        raise ReapError(
            f"{source.checkpoint.name} is an MLX checkpoint with stacked experts: it has no "
            "Hugging Face layout to keep.",
            "leave --format hf out, or start from the Hugging Face checkpoint",
        )
    for index in kept:
        if found[index] != wanted or (index in apart) == bool(family.fused):
            raise CheckpointError(
                f"layer {index} of {source.checkpoint.path} has {found[index]} tensors of routers "
                f"and fused experts where {wanted} are expected.",
                "export without --format hf",
            )
    return pieces


def _config(source: SourceModel, plan: Plan) -> dict[str, Any]:
    """The source's config.json with the new number of experts.

    Experts that `quantization_config` names are renumbered, prediction layers that are left out
    (see `_pieces`) are no longer announced.
    """
    path = source.checkpoint.path / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    text[source.family.num_experts] = len(plan.layers[0].kept)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    for part in [config] if text is config else [config, text]:
        if part.get("quantization_config"):
            part["quantization_config"] = _renumbered(part["quantization_config"], source, plan)
    return config


def _renumbered(value: Any, source: SourceModel, plan: Plan) -> Any:
    """`value` with every module name of an expert in a list renumbered, or left out if dropped."""
    if isinstance(value, dict):
        return {key: _renumbered(entry, source, plan) for key, entry in value.items()}
    if not isinstance(value, list):
        return value
    kept = {layer.layer: layer.kept for layer in plan.layers}
    out = []
    for entry in value:
        if isinstance(entry, str) and entry.startswith("re:"):
            if re.search(r"experts\\?\.\(?\d", entry):
                raise CheckpointError(
                    f"quantization_config names experts by a pattern with numbers, {entry}: it "
                    "cannot be renumbered.",
                    "export without --format hf",
                )
        # The name of a module, to which a tensor's would add its own.
        elif isinstance(entry, str) and (m := source.family.source_expert.fullmatch(f"{entry}.")):
            ids = kept.get(int(m["layer"]), ())
            if int(m["expert"]) not in ids:
                continue
            entry = f"{m['head']}{ids.index(int(m['expert']))}{m['tail']}".removesuffix(".")
        out.append(_renumbered(entry, source, plan))
    return out


def _origin(plan: Plan, spec: ModelSpec, plan_file: Path) -> dict[str, Any]:
    """reap.json: the keys of an MLX export's config["reap"], and which expert became which."""
    return {
        "version": plan.provenance.reap_version,
        "layout": "hf",
        "source": spec.model,
        "source_revision": spec.revision,
        "source_num_experts": spec.num_experts,
        "source_model_sha256": spec.model_sha256,
        "plan_sha256": sha256(plan_file),
        "kept": {str(layer.layer): list(layer.kept) for layer in plan.layers},
    }


# Files


def _write_shards(
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    shards: Sequence[Shard],
    partial: PartialExport,
    progress: Progress,
) -> None:
    """Write the shards that are not done."""
    by_name = {piece.name: piece for piece in pieces}

    def data(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
        header = {name: (_dtype(name, tensor), tensor.shape) for name, tensor in tensors.items()}
        for name in tensors:
            yield from copied_bytes(name, by_name[name].ranges(checkpoint), header)

    with Writer(partial) as writer:
        for number, shard in enumerate(shards):
            progress(f"writing shard {number + 1} of {len(shards)}", number, len(shards))
            if shard.name not in partial.done:
                writer.write(shard.name, shard.tensors, data(shard.tensors), "pt")


def _dtype(name: str, tensor: Tensor) -> str:
    """As in the header; the scales of mxfp4 (weight_scale in K3, …_scales in gpt-oss) are E8M0."""
    scales = tensor.dtype == "U8" and name.endswith(("_scale", "_scales"))
    return "F8_E8M0" if scales else tensor.dtype


# Checks after the writing


def _verify(directory: Path, source: SourceModel, plan: Plan, pieces: Sequence[Piece]) -> None:
    """Re-read an export: the tensors are the pieces, byte for byte; routers agree with what
    mlx-lm makes of the source; a forward pass over a few tokens is finite."""
    checkpoint = open_checkpoint(str(directory))
    wanted = {piece.name for piece in pieces}
    if missing := sorted(wanted - set(checkpoint.tensors)):
        raise CheckpointError(f"{missing[0]} was not written.")
    if extra := sorted(set(checkpoint.tensors) - wanted):
        raise CheckpointError(f"{extra[0]} was written, but belongs to nothing.")
    for piece in pieces:
        info, original = checkpoint.tensors[piece.name], source.checkpoint.tensors[piece.source]
        same = info.dtype == original.dtype and info.shape == piece.shape(original)
        ours, theirs = checkpoint.ranges([piece.name]), piece.ranges(source.checkpoint)
        if not same or not same_bytes(ours, theirs):
            raise CheckpointError(f"{piece.name} differs from the source's {piece.source}.")
    written = SourceModel(checkpoint)
    for layer in plan.layers:
        found = written.layer_weights(layer.layer)
        expected = source.layer_weights(layer.layer, layer.kept)
        for name in source.family.router:
            if not mx.array_equal(found[name], expected[name]).item():
                raise CheckpointError(f"layer {layer.layer}: {name} is not in the plan's order.")
    check_forward(written)
