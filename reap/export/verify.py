"""Re-reading an export: what the plan promised is what the files hold."""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from reap.artifacts import Format, ModelSpec, Plan, Saliency
from reap.errors import CheckpointError, ReapError
from reap.export.finite import check_finite
from reap.export.samples import Samples, check_same
from reap.models.checkpoint import Checkpoint, TensorInfo, open_checkpoint, same_bytes
from reap.models.source import SourceModel, Stacked
from reap.models.stream import LayerStream
from reap.progress import Progress, silent

# Bytes of a tensor that is compared with the source's whole, once more after it was written.
_SMALL = 2**20

_SCALES = {"mxfp4": "U8", "mxfp8": "U8", "nvfp4": "U8"}
_DENSE = {"F32": 32, "BF16": 16, "F16": 16}


def verify(
    directory: Path,
    source: SourceModel,
    plan: Plan,
    spec: ModelSpec,
    *,
    saliency: Saliency | None = None,
    progress: Progress = silent,
) -> int:
    """Check a written checkpoint against plan and source; the number of tensors.

    Checked: mlx-lm builds it strictly (no missing or extra tensor, every shape); every path has
    exactly its bits, planned or as in the source; of what keeps the source's format, small tensors
    and samples of every layer's experts have the source's bytes, and samples of the others give
    its outputs (see samples); neither these nor what a few tokens read on their way through the
    model is NaN or infinite, nor are their logits. Experts that are in no sample and that no token
    chooses are not read again. Raises ReapError.
    """
    checkpoint = open_checkpoint(str(directory))
    carried = source.carried_names()
    _check_names(directory, checkpoint, carried)
    _check_formats(checkpoint, plan, spec)
    written = SourceModel(checkpoint)
    for name in carried:
        both = checkpoint, source.checkpoint
        types = {(c.tensors[name].dtype, c.tensors[name].shape) for c in both}
        if len(types) > 1 or not same_bytes(*(c.ranges([name]) for c in both)):
            raise CheckpointError(f"{name} differs from the source.")
    trunk = written.trunk_weights()
    check_finite(trunk)
    _check_tensors(trunk, source.trunk_weights(), "", plan.trunk)
    del trunk
    samples = Samples(written, source, plan, spec, saliency)
    for index in range(spec.num_layers):
        progress(f"checking layer {index}", index, 2 * spec.num_layers)
        if index in samples.layers:
            samples.check(index)
            kept = samples.layers[index].kept
            theirs = source.layer_weights(index, kept, some=kept[:1])
            experts = f"{source.family.experts}."
            theirs = {n: array for n, array in theirs.items() if not n.startswith(experts)}
        else:
            theirs = source.layer_weights(index)
        ours = written.layer_weights(index)
        _check_tensors(ours, theirs, f"{source.layer_prefix(index)}.", plan.trunk)
        mx.clear_cache()
    check_forward(written, progress)
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


def _check_tensors(
    ours: dict[str, mx.array], theirs: dict[str, mx.array], prefix: str, changed: Container[str]
) -> None:
    """What is in `theirs` and small is equal, unless its path is `changed`."""
    check_same(
        {
            f"{prefix}{name}": (ours[name], original)
            for name, original in theirs.items()
            if original.nbytes <= _SMALL and f"{prefix}{name.rpartition('.')[0]}" not in changed
        }
    )


def check_forward(written: SourceModel, progress: Progress = silent, tokens: int = 2) -> None:
    """Every layer as mlx-lm runs it, on a few tokens; of the experts, those that they choose."""
    count = len(written.layers)
    ids = np.linspace(0, written.vocabulary - 1, tokens).astype(np.int32)
    written.load_trunk()
    with LayerStream(written.model, written.layers, [mx.array(ids)[None]]) as stream:
        for index, layer in enumerate(written.layers):
            progress(f"running layer {index}", count + index, 2 * count)
            prefix = written.layer_prefix(index)
            written.load_layer(index, experts=False)
            experts = f"{written.family.experts}."
            arrays = tree_flatten(layer.parameters())
            check_finite({n: a for n, a in arrays if not n.startswith(experts)}, f"{prefix}.")
            del arrays

            def check(found: Stacked, prefix: str = f"{prefix}.{experts}") -> None:
                for name, leaves in found.items():
                    check_finite({f"{name}.{leaf}": a for leaf, a in leaves.items()}, prefix)

            moe = index in written.moe_layers
            with written.reading_experts(index, check) if moe else nullcontext():
                stream.step(0)
            written.release_layer(index)
        if not mx.all(mx.isfinite(stream.finish(0))).item():
            raise CheckpointError("the written model's logits are not finite.")
