"""Reading a checkpoint directory: headers first, tensors lazily, nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from reap.data import EMBEDDED, model_path
from reap.errors import CheckpointError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
INDEX = "model.safetensors.index.json"
_NUMBER = re.compile(r"\d+")
_SAMPLES, _SAMPLE_BYTES = (0.0, 0.5, 1.0), 4096
_CHUNK = 2**22
Range = tuple[Path, int, int]
"""A file, an offset and a number of bytes."""
ORIGIN = "reap.json"
"""What an export in a foreign layout carries instead of config["reap"]."""
_DTYPES = {
    **{"U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64},
    **{"I8": mx.int8, "I16": mx.int16, "I32": mx.int32, "I64": mx.int64},
    **{"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "BOOL": mx.bool_},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the safetensors header states it; `dtype` in safetensors' spelling (BF16, …)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0
    """Where its bytes begin in the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with config.json and safetensors shards, checked but not read."""

    path: Path
    name: str
    revision: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @cached_property
    def model_sha256(self) -> str:
        """Identifies the model: of config.json, of the tensors' names, dtypes and shapes, and of
        samples of the tensors. All of a checkpoint of terabytes would take too long to read: of
        each layer's tensors that differ in a number only (experts) one is sampled."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        sampled: dict[tuple[str, str], TensorInfo] = {}
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
            layer = _LAYER.search(name)
            kind = layer[1] if layer else "", _NUMBER.sub("", name)
            sampled.setdefault(kind, info)
        for info in sampled.values():
            with open(self.path / info.file, "rb", buffering=0) as shard:
                for share in _SAMPLES:
                    start = int(share * max(0, info.nbytes - _SAMPLE_BYTES))
                    shard.seek(info.offset + start)
                    digest.update(shard.read(min(_SAMPLE_BYTES, info.nbytes)))
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def origin(self) -> dict[str, Any]:
        """What reap wrote of where the checkpoint comes from; empty if reap did not make it."""
        return origin(self.path, self.config)

    def by_layer(self, prefixes_apart: tuple[str, ...]) -> dict[int | None, list[str]]:
        """Tensor names by decoder layer; None holds what is in no layer.

        Names that start with one of `prefixes_apart` (vision towers) are left out.
        """
        names: dict[int | None, list[str]] = defaultdict(list)
        for name in self.tensors:
            if name.startswith(prefixes_apart):
                continue
            match = _LAYER.search(name)
            names[int(match[1]) if match else None].append(name)
        return names

    def ranges(self, names: Iterable[str]) -> list[Range]:
        """Where the named tensors are, neighbours joined."""
        spans = sorted((self.tensors[n].file, self.tensors[n].offset, n) for n in names)
        joined: list[Range] = []
        for file, offset, name in spans:
            size = self.tensors[name].nbytes
            if joined and joined[-1][0] == self.path / file and sum(joined[-1][1:]) == offset:
                path, start, before = joined.pop()
                joined.append((path, start, before + size))
            else:
                joined.append((self.path / file, offset, size))
        return joined

    def stamp(self) -> str:
        """A digest of the shards' names, sizes and times of change: another one, other weights."""
        files = {}
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            status = (self.path / file).stat()
            files[file] = [status.st_size, status.st_mtime_ns]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def row_ranges(self, name: str, ids: Sequence[int]) -> list[Range]:
        """Where some entries of a tensor's first axis are."""
        info = self.tensors[name]
        size = info.nbytes // info.shape[0]
        return [(self.path / info.file, info.offset + size * row, size) for row in ids]

    def rows(self, name: str, ids: Sequence[int]) -> mx.array:
        """Some entries of a tensor's first axis; nothing else of it is read."""
        info = self.tensors[name]
        content = b"".join(read_ranges(self.row_ranges(name, ids)))
        raw = mx.array(np.frombuffer(content, np.uint8))
        return raw.view(_DTYPES[info.dtype]).reshape(len(ids), *info.shape[1:])

    def load(self, names: Iterable[str]) -> dict[str, mx.array]:
        """The named tensors as lazy arrays: bytes are read when they are evaluated."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        arrays: dict[str, mx.array] = {}
        for file, wanted in by_file.items():
            try:
                shard: Any = mx.load(str(self.path / file))
            except RuntimeError as error:
                raise CheckpointError(
                    f"{self.path / file} cannot be read any more: {error}", "is it being changed?"
                ) from None
            arrays.update((name, shard[name]) for name in wanted)
        return arrays


def read_ranges(ranges: Iterable[Range]) -> Iterator[bytes]:
    """The bytes of the ranges one after the other, in chunks of a few MB none of which crosses from
    one range to the next. Raises CheckpointError for a file that ends before, and OSError."""
    for path, pieces in groupby(ranges, key=lambda piece: piece[0]):
        with open(path, "rb", buffering=0) as file:
            for _, offset, size in pieces:
                for start in range(0, size, _CHUNK):
                    length = min(_CHUNK, size - start)
                    chunk = os.pread(file.fileno(), length, offset + start)
                    if len(chunk) < length:
                        raise CheckpointError(
                            f"{path} cannot be read any more: it ends early.",
                            "is it being changed?",
                        )
                    yield chunk


def same_bytes(ours: Iterable[Range], theirs: Iterable[Range]) -> bool:
    """Whether the bytes of ranges are those of others, however they are divided. Raises as
    `read_ranges`."""
    left_over, right_over = read_ranges(ours), read_ranges(theirs)
    left = right = b""
    while True:
        left = left or next(left_over, b"")
        right = right or next(right_over, b"")
        size = min(len(left), len(right))
        if size == 0 or left[:size] != right[:size]:
            return not left and not right
        left, right = left[size:], right[size:]


def mlx_dtype(name: str) -> mx.Dtype:
    """Of a dtype as safetensors spells it."""
    return _DTYPES[name]


def dtype_name(dtype: mx.Dtype) -> str:
    """As safetensors spells it."""
    return _NAMES[dtype]


def open_checkpoint(model: str) -> Checkpoint:
    """Open a local directory or a Hugging Face repository id.

    Every shard's header is read and its size checked, so that a missing or truncated file is
    reported before any work. Raises CheckpointError.
    """
    path, revision = _locate(model)
    config_path = path / "config.json"
    if not config_path.exists():
        raise CheckpointError(f"{path} has no config.json.", "give a model directory or hub id")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{config_path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_path} is not a JSON object.")
    name = path.resolve().name if model_path(model).exists() else model
    return Checkpoint(path, name, revision, config, _tensors(path))


def origin(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`Checkpoint.origin` of a directory with that config.json."""
    file = directory / ORIGIN
    if "reap" in config or not file.exists():
        return dict(config.get("reap") or {})
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise CheckpointError(f"{file} is damaged.", "export again, or delete it") from None


def _locate(model: str) -> tuple[Path, str]:
    try:
        path = model_path(model)
    except RuntimeError as error:  # ~ of a user that does not exist
        raise CheckpointError(f"{model} is not a directory: {error}") from None
    if path.is_dir():
        # The hub cache keeps a snapshot in a folder named by its commit.
        revision = path.resolve().name
        return path, revision if re.fullmatch(r"[0-9a-f]{40}", revision) else ""
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise CheckpointError(
            f"{model} is not a directory.",
            f"give a model directory, a hub id like org/name, or {EMBEDDED}",
        )
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        snapshot = Path(snapshot_download(model, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except Exception as error:  # the hub client raises many kinds; all mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(
            f"{model} is neither a local directory nor could it be fetched from the hub: {reason}",
            "check the name, the network and `hf auth login`",
        ) from None
    return snapshot, snapshot.name


def _tensors(path: Path) -> dict[str, TensorInfo]:
    index_path = path / INDEX
    weight_map: dict[str, str] = {}
    if index_path.exists():
        try:
            weight_map = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
            files = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{index_path} is damaged: {error!r}", "download that file again"
            ) from None
        if not files:
            raise CheckpointError(f"{index_path} is damaged: it names no tensors.")
    else:
        files = sorted(file.name for file in path.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} has no safetensors files.")
    absent = [file for file in files if not (path / file).exists()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {len(files)} shards are missing from {path}, first {absent[0]}.",
            "download the checkpoint again",
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(path, file))
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise CheckpointError(
            f"{len(lost)} tensors of {INDEX} are in no shard, first {lost[0]}.",
            "download the checkpoint again",
        )
    return tensors


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """What a shard says it holds, its size checked. Raises CheckpointError.

    Layout: little-endian u64 length, JSON, then the data (safetensors format).
    """
    size = (path / file).stat().st_size
    with open(path / file, "rb") as shard:
        prefix = shard.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        content = shard.read(length) if 8 + length <= size else b""
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(
                file,
                t["dtype"],
                tuple(t["shape"]),
                t["data_offsets"][1] - t["data_offsets"][0],
                8 + length + t["data_offsets"][0],
            )
            for name, t in header.items()
        }
        end = max((t["data_offsets"][1] for t in header.values()), default=0)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        raise CheckpointError(
            f"{path / file} is truncated or not a safetensors file ({size:,} bytes).",
            "download that file again",
        ) from None
    expected = 8 + length + end
    if size != expected:
        raise CheckpointError(
            f"{path / file} has {size:,} bytes, its header says {expected:,}: it is truncated.",
            "download that file again",
        )
    return tensors
