"""Writing safetensors shards of limited size, each checked before it counts as written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from reap.artifacts.files import sha256
from reap.artifacts.partial import sync
from reap.errors import CheckpointError
from reap.export.content import Content, Part
from reap.export.partial import PartialExport
from reap.models.checkpoint import INDEX, read_header
from reap.progress import Progress

SHARD_BYTES = 5 * 10**9

_CHUNK = 2**22
_BLOCK = 2**18  # elements whose temporaries stay in a processor's cache


@dataclass(frozen=True)
class Shard:
    """A file to write: bytes by tensor name, for each part that it holds something of."""

    name: str
    parts: dict[Part, dict[str, int]]

    @property
    def tensors(self) -> dict[str, int]:
        return {name: size for sizes in self.parts.values() for name, size in sizes.items()}

    @property
    def nbytes(self) -> int:
        return sum(self.tensors.values())


def shards(sizes: Mapping[Part, Mapping[str, int]], limit: int = SHARD_BYTES) -> list[Shard]:
    """Divide tensors, bytes by part and name, into files of at most `limit` bytes.

    A file holds at most as much as the largest layer, since it is in memory while it is written,
    and ends at a layer's end unless that layer alone is more. What belongs to one module (weight,
    scales, biases) stays together if it can. A tensor that is larger than `limit` is a larger file.
    """
    totals = {part: sum(found.values()) for part, found in sizes.items()}
    most = min(limit, max((n for part, n in totals.items() if part is not None), default=limit))
    made: list[dict[Part, dict[str, int]]] = [{}]
    room = most
    for part, found in sizes.items():
        if totals[part] > room and made[-1]:
            made.append({})
            room = most
        for tensors in _together(found, most):
            size = sum(tensors.values())
            if size > room and made[-1]:
                made.append({})
                room = most
            made[-1].setdefault(part, {}).update(tensors)
            room -= size
    return [
        Shard(f"model-{number:05d}-of-{len(made):05d}.safetensors", parts)
        for number, parts in enumerate(made, 1)
    ]


def _together(sizes: Mapping[str, int], most: int) -> Iterator[dict[str, int]]:
    """The tensors of each module, one by one if they are more than `most`."""
    modules: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = size
    for module in modules.values():
        if sum(module.values()) <= most:
            yield module
        else:
            yield from ({name: size} for name, size in module.items())


def write_shards(
    content: Content, files: Sequence[Shard], partial: PartialExport, progress: Progress
) -> None:
    """Write the shards that are not done. A shard's digest is taken while the next one is read.

    Raises CheckpointError for a tensor that is not finite, not as foreseen or not on the disk as it
    was in memory, and OSError.
    """
    pending: list[tuple[str, Future[str]]] = []

    def commit() -> None:
        while pending:
            name, digest = pending.pop()
            partial.shard_done(name, digest.result())

    with ThreadPoolExecutor(1) as worker:
        try:
            for shard in files:
                if shard.name not in partial.done:
                    path = partial.checkpoint / shard.name
                    arrays = _read(content, shard, progress)
                    _save(path, arrays)
                    digest = worker.submit(sha256, path)
                    _check_same(path, arrays)
                    sync(path)  # here, as it would hold up the saving of the next one
                    arrays.clear()
                    mx.clear_cache()
                    commit()
                    pending.append((shard.name, digest))
        finally:
            commit()


def _read(content: Content, shard: Shard, progress: Progress) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    total = len(content.parts)
    for part, sizes in shard.parts.items():
        what = "the rest"
        if part is not None:
            what = f"layer {part} ({part + 1} of {total - 1})"
        progress(f"writing {what}", total - 1 if part is None else part, total)
        arrays |= content.tensors(part, list(sizes))
    for name, size in shard.tensors.items():
        if name not in arrays or arrays[name].nbytes != size:
            found = f"{arrays[name].nbytes:,} bytes" if name in arrays else "absent"
            raise CheckpointError(
                f"{name} is {found}, {size:,} bytes were foreseen.", "this is a bug in reap"
            )
    check_finite(arrays)
    return arrays


def _save(path: Path, arrays: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"{error} (is the disk full?)") from error


def _check_same(path: Path, arrays: Mapping[str, mx.array]) -> None:
    """Read a shard back and compare it with what was to be written."""
    buffer = memoryview(bytearray(_CHUNK))
    header = read_header(path.parent, path.name)
    if header.keys() != arrays.keys():
        raise CheckpointError(f"{path} does not hold the tensors that were written to it.")
    values = raw(arrays)
    with open(path, "rb", buffering=0) as file:
        for name, info in header.items():
            wanted = values[name].view(np.uint8)
            file.seek(info.offset)
            for start in range(0, wanted.size, _CHUNK):
                expected = wanted[start : start + _CHUNK]
                part = buffer[: expected.size]
                if file.readinto(part) != len(part) or not np.array_equal(part, expected):
                    raise CheckpointError(
                        f"{name} is not in {path} as it was written: the disk or memory is faulty."
                    )


def raw(arrays: Mapping[str, mx.array]) -> dict[str, np.ndarray]:
    """The values as unsigned integers of their size, [elements], sharing the memory."""
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    views = {
        name: mx.contiguous(array).reshape(-1).view(kinds[array.dtype.size])
        for name, array in arrays.items()
    }
    mx.eval(views)
    return {name: np.array(view, copy=False) for name, view in views.items()}


# All bits of the exponent, by the floating dtypes' names.
_EXPONENT: dict[mx.Dtype, int] = {
    mx.bfloat16: 0x7F80,
    mx.float16: 0x7C00,
    mx.float32: 0x7F800000,
}


def check_finite(tensors: Mapping[str, mx.array], prefix: str = "") -> None:
    """Raise CheckpointError for a value, or a scale of the MX formats, that is NaN or infinite."""
    scales = {n for n, a in tensors.items() if n.endswith(".scales") and a.dtype == mx.uint8}
    looked_at = {n: a for n, a in tensors.items() if n in scales or a.dtype in _EXPONENT}
    for name, values in raw(looked_at).items():
        if name in scales:
            # NaN is 255 in E8M0, 127 in the E4M3 of nvfp4, which has 16 codes of 4 bits a group.
            codes = 8 * tensors[f"{name.removesuffix('.scales')}.weight"].shape[-1]
            nvfp4 = codes == 16 * tensors[name].shape[-1]
            bad = bool(np.any((values & 127) == 127 if nvfp4 else values == 255))
        else:
            mask = _EXPONENT[tensors[name].dtype]
            blocks = (values[i : i + _BLOCK] for i in range(0, values.size, _BLOCK))
            bad = any(bool(np.any((block & mask) == mask)) for block in blocks)
        if bad:
            raise CheckpointError(f"{prefix}{name} holds a value that is not finite.")


def write_index(directory: Path, files: Sequence[Shard]) -> None:
    """Raises OSError."""
    where = {name: shard.name for shard in files for name in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in files)},
        "weight_map": dict(sorted(where.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
