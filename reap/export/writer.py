"""Writing safetensors shards of limited size, each checked before it counts as written."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from reap.artifacts.partial import sync
from reap.errors import CheckpointError
from reap.export.content import Content, Copied, Part, Tensor, by_module, tensor_of
from reap.export.finite import Header, check_finite, finite, kind_of, not_finite, raw
from reap.export.partial import PartialExport
from reap.models.checkpoint import INDEX, Range, read_ranges
from reap.progress import Progress

SHARD_BYTES = 5 * 10**9

_WAITING = 2**25  # bytes to be hashed: they should still be in the processor's cache
_WRITE = 2**20  # bytes at a time: no write of gigabytes in one call


@dataclass(frozen=True)
class Shard:
    """A file to write: its tensors by name, for each part that it holds something of."""

    name: str
    parts: dict[Part, dict[str, Tensor]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for found in self.parts.values() for name, tensor in found.items()}

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tensors)


def shards(foreseen: Mapping[Part, Mapping[str, Tensor]], limit: int = SHARD_BYTES) -> list[Shard]:
    """Divide tensors, by part and name, into files of at most `limit` bytes, in their order.

    A file holds at most as much as the largest layer, which is all that a kill can cost, and ends
    at a layer's end unless that layer alone is more. What belongs to one module (weight, scales,
    biases) stays together if it can. A tensor that is larger than `limit` is a larger file.
    """
    totals = {part: _nbytes(found) for part, found in foreseen.items()}
    most = min(limit, max((n for part, n in totals.items() if part is not None), default=limit))
    made: list[dict[Part, dict[str, Tensor]]] = [{}]
    room = most
    for part, found in foreseen.items():
        if totals[part] > room and made[-1]:
            made.append({})
            room = most
        for tensors in _together(found, most):
            size = _nbytes(tensors)
            if size > room and made[-1]:
                made.append({})
                room = most
            made[-1].setdefault(part, {}).update(tensors)
            room -= size
    return [
        Shard(f"model-{number:05d}-of-{len(made):05d}.safetensors", parts)
        for number, parts in enumerate(made, 1)
    ]


def _together(found: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """The tensors of each module, one by one if they are more than `most`."""
    for names in by_module(found).values():
        module = {name: found[name] for name in names}
        if _nbytes(module) <= most:
            yield module
        else:
            yield from ({name: tensor} for name, tensor in module.items())


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def write_shards(
    content: Content, files: Sequence[Shard], partial: PartialExport, progress: Progress
) -> None:
    """Write the shards that are not done.

    Raises CheckpointError for a tensor that is not finite or not as foreseen, and OSError.
    """
    left = [shard for shard in files if shard.name not in partial.done]
    # Memory that one module leaves is the next one's, which spares the system the clearing of it.
    layers = (_nbytes(found) for part, found in content.foreseen.items() if part is not None)
    with buffers_kept(max(layers, default=0)), Writer(partial) as writer:
        for shard in left:
            writer.write(shard.name, shard.tensors, _data(content, shard, progress), "mlx")


@contextmanager
def buffers_kept(nbytes: int) -> Iterator[None]:
    """Let MLX keep at most that much freed memory for its next arrays."""
    before = mx.set_cache_limit(nbytes)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()


def _data(content: Content, shard: Shard, progress: Progress) -> Iterator[Any]:
    """The bytes of a shard's tensors in their order, in buffers; what is copied in small ones."""
    total = len(content.parts)
    for part, tensors in shard.parts.items():
        what = "the rest"
        if part is not None:
            what = f"layer {part} ({part + 1} of {total - 1})"
        progress(f"writing {what}", total - 1 if part is None else part, total)
        awaited = iter(tensors.items())
        header = {n: (tensor.dtype, tensor.shape) for n, tensor in content.foreseen[part].items()}
        for module in content.modules(part, tensors):
            wanted = [name for name in module if name in tensors]
            for name in wanted:
                if (name, _tensor(module[name], tensors[name])) != next(awaited, None):
                    raise CheckpointError(
                        f"{name} is not what was foreseen in {shard.name}.", "this is a bug in reap"
                    )
            arrays = {n: found for n, found in module.items() if isinstance(found, mx.array)}
            check_finite(arrays)
            if arrays:
                found = raw({name: arrays[name] for name in wanted})
                yield from (values.view(np.uint8) for values in found.values())
            for name in wanted:
                if isinstance(copied := module[name], Copied):
                    yield from copied_bytes(name, copied.ranges, header)


def _tensor(found: mx.array | Copied, foreseen: Tensor) -> Tensor:
    """What a header would say of `found`; of copied bytes only their number is known."""
    if isinstance(found, Copied):
        return replace(foreseen, nbytes=found.nbytes)
    return tensor_of(found)


def copied_bytes(name: str, ranges: Iterable[Range], header: Header) -> Iterator[bytes]:
    """The bytes of a tensor. Raises CheckpointError for a value that is not finite."""
    kind = kind_of(name, header)
    for chunk in read_ranges(ranges):
        if kind and not finite(np.frombuffer(chunk, np.uint8), kind):
            raise not_finite(name)
        yield chunk


class Writer:
    """Writes files of tensors; each counts as done once it is on the disk.

    Bytes are hashed by a thread of its own while the next ones are made and written, and a file
    gets to the disk while the next one is written.
    """

    def __init__(self, partial: PartialExport) -> None:
        self._partial = partial
        self._hashing, self._ending = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._hashes: deque[tuple[int, Future[None]]] = deque()
        self._waiting = 0
        self._files: list[tuple[str, Future[str]]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._files:
                self._commit()
        finally:
            self._hashing.shutdown()
            self._ending.shutdown()

    def write(
        self, name: str, tensors: Mapping[str, Tensor], data: Iterable[Any], kind: str
    ) -> None:
        """Write a safetensors file: `data` are the bytes of `tensors` in their order, as buffers of
        bytes. Raises OSError."""
        digest, path = hashlib.sha256(), self._partial.checkpoint / name
        with open(path, "wb", buffering=0) as file:
            for buffer in chain([_header(tensors, kind)], data):
                self._make_room(len(buffer))
                self._hashes.append((len(buffer), self._hashing.submit(digest.update, buffer)))
                self._waiting += len(buffer)
                _write(file, buffer)
        # After the last bytes: one thread hashes all, in this order.
        hashed = self._hashing.submit(digest.hexdigest)
        self._files.append((name, self._ending.submit(_end, path, hashed)))
        if len(self._files) > 1:
            self._commit()

    def _make_room(self, nbytes: int) -> None:
        """Wait until little is left to be hashed."""
        while self._hashes:
            size, hashed = self._hashes[0]
            if self._waiting + nbytes <= _WAITING and not hashed.done():
                return
            hashed.result()
            self._hashes.popleft()
            self._waiting -= size

    def _commit(self) -> None:
        name, digest = self._files.pop(0)
        self._partial.shard_done(name, digest.result())


def _end(path: Path, hashed: Future[str]) -> str:
    """Have a file on the disk; its sha256."""
    sync(path)
    return hashed.result()


def _header(tensors: Mapping[str, Tensor], kind: str) -> bytes:
    """Little-endian u64 length and JSON, padded to align the data (safetensors format)."""
    header: dict[str, Any] = {"__metadata__": {"format": kind}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: BinaryIO, buffer: Any) -> None:
    view = memoryview(buffer)
    while view:
        view = view[file.write(view[:_WRITE]) :]


def write_index(directory: Path, files: Sequence[Shard]) -> None:
    """Raises OSError."""
    where = {name: shard.name for shard in files for name in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in files)},
        "weight_map": dict(sorted(where.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
