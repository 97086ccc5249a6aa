"""How a source stores its weights: known formats are told apart, all others refused by name.

Everything here looks at config.json and at headers; no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from reap.artifacts import Format
from reap.errors import CheckpointError
from reap.models.checkpoint import Checkpoint
from reap.models.families import Family, text_config

SCALE_SUFFIX = "_scale_inv"
"""`x.weight_scale_inv` holds the scales of the FP8 matrix `x.weight` (DeepSeek-V3, Qwen3)."""

_SUPPORTED = (
    "supported: bf16/fp16/fp32, FP8 (E4M3) with a scale per block, MLX-quantized, and the mxfp4 of "
    "kimi_k3 (compressed-tensors mxfp4-pack-quantized) and gpt_oss"
)

# safetensors' spelling, by what the config says of the quantization.
_PLAIN = frozenset(("BF16", "F16", "F32"))
_DTYPES = {
    "": _PLAIN,
    "mlx": _PLAIN | {"U32", "U8"},
    "packed": _PLAIN | {"U8"},
    "fp8": _PLAIN | {"F8_E4M3"},
}

# Also in what is carried or left out: MLX takes a file as a whole.
_LOADABLE = {
    *("U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "BOOL"),
    *("F16", "BF16", "F32", "C64", "F8_E4M3", "F8_E8M0"),
}

Block = tuple[int, int]


def fp8_block(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family, names: Sequence[str]
) -> Block | None:
    """(rows, columns) of the blocks that share a scale in an FP8 source; None for other sources.

    `names` are the tensors that the language model loads. Raises CheckpointError for a format
    that reap cannot read and for tensors that are not what config.json says.
    """
    kind, block = _kind(checkpoint, config, family)
    for name in names:
        dtype = checkpoint.tensors[name].dtype
        if dtype not in _DTYPES[kind]:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is stored as {dtype}, which config.json does not "
                f"explain{'' if kind else ': it says nothing of a quantization'}.",
                _SUPPORTED,
            )
        if name.endswith(".global_scale"):
            raise _unreadable("nvfp4 with a scale per tensor")
    for name, info in checkpoint.tensors.items():
        if info.dtype not in _LOADABLE:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is stored as {info.dtype}; MLX loads no file with it."
            )
    if block:
        _check_scales(checkpoint, names, block)
    return block


def dense(arrays: Mapping[str, mx.array], block: Block) -> dict[str, mx.array]:
    """`arrays` with every FP8 matrix as bfloat16, and without the scales; lazy.

    A value is E4M3 code × scale of its block in float32, rounded once, as in DeepSeek-V3's own
    conversion and mlx-lm's.
    """
    return {
        name: _values(array, arrays[name + SCALE_SUFFIX], block)
        if name + SCALE_SUFFIX in arrays
        else array
        for name, array in arrays.items()
        if not name.endswith(SCALE_SUFFIX)
    }


def _values(codes: mx.array, scales: mx.array, block: Block) -> mx.array:
    rows, columns = codes.shape
    each = scales.astype(mx.float32)
    for axis, size in enumerate(block):
        each = mx.repeat(each, size, axis=axis)
    return (mx.from_fp8(codes, dtype=mx.float32) * each[:rows, :columns]).astype(mx.bfloat16)


def _kind(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family
) -> tuple[str, Block | None]:
    if config.get("quantize_activations"):
        raise _unreadable("MLX with quantized activations")
    if config.get("quantization"):
        _check_mlx(config["quantization"])
        return "mlx", None
    settings = config.get("quantization_config") or text_config(dict(config)).get(
        "quantization_config"
    )
    if not settings:
        if (checkpoint.path / "hf_quant_config.json").exists():
            raise _unreadable("hf_quant_config.json says (NVIDIA ModelOpt)")
        return "", None
    if not isinstance(settings, dict):
        raise _unreadable(f"quantization_config {settings!r}")
    method, packing = settings.get("quant_method"), settings.get("format")
    if (packing if method == "compressed-tensors" else method) in family.packed:
        return "packed", None
    if method != "fp8":
        raise _unreadable(f"{method} {packing}" if packing else str(method))
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(_positive(b) for b in block)):
        raise _unreadable(f"fp8 with weight_block_size {block}")
    for key, known in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if settings.get(key, known) != known:
            raise _unreadable(f"fp8 with {key} {settings[key]}")
    return "fp8", (block[0], block[1])


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _check_mlx(settings: Mapping[str, Any]) -> None:
    """The default and every module's own format; `false` leaves a module as it is."""
    own = {path: value for path, value in settings.items() if isinstance(value, dict)}
    for path, value in {"": settings, **own}.items():
        format = mlx_format(value)
        if format.mode == "dense" or not format.known:
            raise _unreadable(
                f"{format.mode} with {format.bits} bits and groups of {format.group_size}"
                + (f" ({path})" if path else "")
            )


def mlx_format(settings: Mapping[str, Any]) -> Format:
    """What an entry of config["quantization"] says; its `known` tells whether that is a format."""
    mode, group = settings.get("mode", "affine"), settings.get("group_size", 0)
    if group is None:  # mlx_lm.convert's mixed recipes leave it to MLX
        group = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}.get(mode, 0)
    return Format(settings.get("bits", 0), group, mode)


def _check_scales(checkpoint: Checkpoint, names: Sequence[str], block: Block) -> None:
    tensors = checkpoint.tensors
    loaded = set(names)
    for name in names:
        codes = name.removesuffix(SCALE_SUFFIX)
        if codes != name and (codes not in loaded or tensors[codes].dtype != "F8_E4M3"):
            raise CheckpointError(f"{checkpoint.path}: {name} has no FP8 matrix to scale.")
        if tensors[name].dtype != "F8_E4M3":
            continue
        if name + SCALE_SUFFIX not in loaded:
            raise CheckpointError(f"{checkpoint.path} lacks {name + SCALE_SUFFIX}.")
        shape, scales = tensors[name].shape, tensors[name + SCALE_SUFFIX].shape
        wanted = tuple(-(-side // size) for side, size in zip(shape, block))
        if len(shape) != 2 or scales != wanted:
            raise CheckpointError(
                f"{checkpoint.path}: {name + SCALE_SUFFIX} has shape {scales}; {name} of shape "
                f"{shape} needs {wanted} for blocks of {list(block)}."
            )


def _unreadable(named: str) -> CheckpointError:
    return CheckpointError(
        f"the source is quantized as {named}, which reap cannot read yet.", _SUPPORTED
    )
