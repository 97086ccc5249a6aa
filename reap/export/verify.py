"""Re-reading an export: what the plan promised is what the files hold."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from reap.artifacts import Format, ModelSpec, Plan
from reap.errors import CheckpointError, ReapError
from reap.models.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from reap.models.source import SourceModel
from reap.models.stream import LayerStream

_SCALES = {"mxfp4": "U8", "mxfp8": "U8", "nvfp4": "U8"}
_DENSE = {"F32": 32, "BF16": 16, "F16": 16}


def verify(directory: Path, source: SourceModel, plan: Plan, spec: ModelSpec) -> int:
    """Check a written checkpoint against plan and source; the number of tensors.

    Checked: mlx-lm loads it strictly (no missing or extra tensor, every shape); every path has
    exactly its bits, planned or as in the source; whatever keeps the source's format has the
    source's bytes (experts, router rows, trunk, carried tensors); nothing is NaN or infinite; a
    forward pass over a few tokens is finite. Raises ReapError.
    """
    checkpoint = open_checkpoint(str(directory))
    carried = source.carried_names()
    _check_names(directory, checkpoint, carried)
    _check_formats(checkpoint, plan, spec)
    written = SourceModel(checkpoint)
    for name in carried:
        _check_same(checkpoint.load([name])[name], source.checkpoint.load([name])[name], name)
    _check_tensors(written.trunk_weights(), source.trunk_weights(), "", plan.trunk)
    for index in range(spec.num_layers):
        _check_layer(written, source, plan, spec, index)
        mx.clear_cache()
    _check_forward(written)
    return len(checkpoint.tensors)


def _check_names(directory: Path, checkpoint: Checkpoint, carried: list[str]) -> None:
    """mlx-lm itself ignores some surplus tensors, e.g. of a vision tower or of unknown layers."""
    try:
        model, _ = load_model(directory, lazy=True, trust_remote_code=True)
    except (ValueError, KeyError) as error:
        raise ReapError(f"mlx-lm does not load what was written: {error}") from error
    wanted = {name for name, _ in tree_flatten(model.parameters())} | set(carried)
    if missing := sorted(wanted - set(checkpoint.tensors)):
        raise CheckpointError(f"{missing[0]} was not written.")
    if extra := sorted(set(checkpoint.tensors) - wanted):
        raise CheckpointError(f"{extra[0]} was written, but belongs to nothing.")


def _check_formats(checkpoint: Checkpoint, plan: Plan, spec: ModelSpec) -> None:
    as_source = {module.path: module.format for module in spec.modules if module.elements}
    for path, format in (as_source | plan.quantization).items():
        _check_format(checkpoint.tensors, path, format)
    for module in spec.modules:
        if not module.elements and f"{module.path}.scales" in checkpoint.tensors:
            raise CheckpointError(f"{module.path} is not stored as in the source.")


def _check_format(tensors: dict[str, TensorInfo], path: str, format: Format) -> None:
    weight = tensors.get(f"{path}.weight")
    scales = tensors.get(f"{path}.scales")
    if weight is None or (format.mode != "dense" and scales is None):
        raise CheckpointError(f"{path} is not stored as {format.label}: tensors are missing.")
    if scales is None:
        wrong = _DENSE.get(weight.dtype) != format.bits
    else:
        columns = weight.shape[-1] * 32 // format.bits
        expected = _SCALES.get(format.mode)
        wrong = (
            format.mode == "dense"
            or weight.dtype != "U32"
            or scales.shape[-1] * format.group_size != columns
            or (scales.dtype != expected if expected else scales.dtype == "U8")
        )
    if wrong:
        raise CheckpointError(f"{path} is not stored as {format.label}.")


def _check_layer(
    written: SourceModel, source: SourceModel, plan: Plan, spec: ModelSpec, index: int
) -> None:
    """One decoder layer: finite, and what keeps the source's format has the source's bytes."""
    ours = written.layer_weights(index)
    prefix = f"{source.layer_prefix(index)}."
    layer = next((entry for entry in plan.layers if entry.layer == index), None)
    theirs = source.layer_weights(index, layer.kept if layer else None)
    if layer is not None:
        experts = f"{source.family.experts}."
        stacked = {name: theirs.pop(name) for name in list(theirs) if name.startswith(experts)}
        bank = f"{experts}high." if layer.split else experts
        moe = next(moe for moe in spec.moe_layers if moe.layer == index)
        for projection in moe.projections if layer.high else ():
            if plan.high[projection.name] == projection.format:
                for name, array in stacked.items():
                    leaf = name.removeprefix(experts)
                    if leaf.startswith(f"{projection.name}."):
                        theirs[bank + leaf] = array[: layer.high]
    _check_tensors(ours, theirs, prefix, plan.trunk)


def _check_tensors(
    ours: dict[str, mx.array], theirs: dict[str, mx.array], prefix: str, changed: Container[str]
) -> None:
    """All of `ours` is finite; what is in `theirs`, too, is equal unless its path is `changed`."""
    _check_finite(ours, prefix)
    for name, original in theirs.items():
        if f"{prefix}{name.rpartition('.')[0]}" not in changed:
            _check_same(ours[name], original, f"{prefix}{name}")


def _check_same(ours: mx.array, theirs: mx.array, name: str) -> None:
    if ours.dtype != theirs.dtype or not mx.array_equal(ours, theirs).item():
        raise CheckpointError(f"{name} differs from the source.")


def _check_finite(tensors: dict[str, mx.array], prefix: str) -> None:
    for name, array in tensors.items():
        if name.endswith(".scales") and array.dtype == mx.uint8:
            # NaN is 255 in E8M0, 127 in the E4M3 of nvfp4, which has 16 codes of 4 bits a group.
            codes = 8 * tensors[f"{name.removesuffix('.scales')}.weight"].shape[-1]
            bad = mx.any(array == 255).item()
            if codes == 16 * array.shape[-1]:
                bad = mx.any(mx.bitwise_and(array, 127) == 127).item()
        elif mx.issubdtype(array.dtype, mx.floating):
            bad = not mx.all(mx.isfinite(array)).item()
        else:
            continue
        if bad:
            raise CheckpointError(f"{prefix}{name} holds a value that is not finite.")


def _check_forward(written: SourceModel, tokens: int = 16) -> None:
    vocabulary = written.vocabulary
    ids = np.linspace(0, vocabulary - 1, tokens).astype(np.int32)
    written.load_trunk()
    with LayerStream(written.model, written.layers, [mx.array(ids)[None]]) as stream:
        for index in range(len(written.layers)):
            written.load_layer(index)
            stream.step(0)
            written.release_layer(index)
        if not mx.all(mx.isfinite(stream.finish(0))).item():
            raise CheckpointError("the written model's logits are not finite.")
