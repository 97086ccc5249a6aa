"""Re-reading an export: what the plan promised is what the files hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from reap.artifacts import Format, ModelSpec, Plan
from reap.errors import CheckpointError, ReapError
from reap.models.checkpoint import open_checkpoint
from reap.models.source import SourceModel
from reap.models.stream import LayerStream

_SCALES = {"mxfp4": "U8", "mxfp8": "U8", "nvfp4": "U8"}


def verify(directory: Path, source: SourceModel, plan: Plan, spec: ModelSpec) -> int:
    """Check a written checkpoint against plan and source; the number of tensors.

    Checked: mlx-lm loads it strictly (no missing or extra tensor, every shape); every planned
    path has exactly its bits; experts that keep the source's format have the source's bytes; no
    scale or dense weight is NaN or infinite; a forward pass over a few tokens is finite. Raises
    ReapError.
    """
    checkpoint = open_checkpoint(str(directory))
    _load_strictly(directory)
    for path, format in plan.quantization.items():
        _check_format(checkpoint.tensors, path, format)
    written = SourceModel(checkpoint)
    for layer in plan.layers:
        _check_high_bank(written, source, plan, spec, layer.layer)
    _check_forward(written)
    return len(checkpoint.tensors)


def _load_strictly(directory: Path) -> None:
    try:
        model, _ = load_model(directory, lazy=True, trust_remote_code=True)
    except ValueError as error:
        raise ReapError(f"mlx-lm does not load what was written: {error}") from error
    if not tree_flatten(model.parameters()):
        raise ReapError("mlx-lm loads what was written as an empty model.")


def _check_format(tensors: dict, path: str, format: Format) -> None:
    weight = tensors.get(f"{path}.weight")
    scales = tensors.get(f"{path}.scales")
    if weight is None or (format.mode != "dense" and scales is None):
        raise CheckpointError(f"{path} is not stored as {format.label}: tensors are missing.")
    if format.mode == "dense":
        wrong = scales is not None
    else:
        columns = weight.shape[-1] * 32 // format.bits
        expected = _SCALES.get(format.mode)
        wrong = (
            weight.dtype != "U32"
            or scales.shape[-1] * format.group_size != columns
            or (scales.dtype != expected if expected else scales.dtype == "U8")
        )
    if wrong:
        raise CheckpointError(f"{path} is not stored as {format.label}.")


def _check_high_bank(
    written: SourceModel, source: SourceModel, plan: Plan, spec: ModelSpec, index: int
) -> None:
    """Experts in the source's own format are the source's bytes; all scales are finite."""
    layer = next(entry for entry in plan.layers if entry.layer == index)
    moe = next(moe for moe in spec.moe_layers if moe.layer == index)
    ours = written.layer_weights(index)
    _check_finite(ours.items(), written.layer_prefix(index))
    if not layer.high:
        return
    theirs = source.layer_weights(index, layer.kept[: layer.high])
    bank = f"{source.family.experts}{'.high' if layer.split else ''}"
    for projection in moe.projections:
        if plan.high[projection.name] != projection.format:
            continue
        for leaf in ("weight", "scales", "biases"):
            original = theirs.get(f"{source.family.experts}.{projection.name}.{leaf}")
            if original is None:
                continue
            if not mx.array_equal(ours[f"{bank}.{projection.name}.{leaf}"], original).item():
                raise CheckpointError(
                    f"layer {index}: {projection.name} of the high bank differs from the source."
                )


def _check_finite(tensors: Iterable[tuple[str, mx.array]], prefix: str) -> None:
    for name, array in tensors:
        if name.endswith("scales") and array.dtype == mx.uint8:
            # E8M0 255 is NaN; E4M3 (nvfp4) 127 and 255 are.
            bad = mx.any(array == 255).item()
        elif mx.issubdtype(array.dtype, mx.floating):
            bad = not mx.all(mx.isfinite(array)).item()
        else:
            continue
        if bad:
            raise CheckpointError(f"{prefix}.{name} holds a value that is not finite.")


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
