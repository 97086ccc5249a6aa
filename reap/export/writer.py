"""Writing safetensors shards of limited size, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from reap.models.checkpoint import INDEX

SHARD_BYTES = 5 * 2**30


class ShardWriter:
    """Collects tensors and writes a shard whenever the next tensor would not fit.

    Arrays are evaluated when their shard is written; nothing of a written shard stays in memory.
    Call `close` to write the rest, number the files and write the index.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, mx.array] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, mx.array]) -> None:
        for name, array in tensors.items():
            if self._pending and self._pending_bytes + array.nbytes > self._shard_bytes:
                self._flush()
            self._pending[name] = array
            self._pending_bytes += array.nbytes
            self.total_bytes += array.nbytes

    def evaluate(self) -> None:
        """Read and compute what is pending, so that its sources can be let go."""
        mx.eval(self._pending)

    def _flush(self) -> None:
        path = self._directory / f"shard-{len(self._shards) + 1:05d}.safetensors"
        try:
            mx.save_safetensors(str(path), self._pending, metadata={"format": "mlx"})
        except RuntimeError as error:
            raise OSError(f"{error} (is the disk full?)") from error
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0
        mx.clear_cache()

    def close(self) -> None:
        if self._pending:
            self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            (self._directory / f"shard-{number:05d}.safetensors").rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (self._directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
