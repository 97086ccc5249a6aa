"""SHA256SUMS: the digest of every file of a checkpoint, as `sha256sum -c` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reap.artifacts.files import sha256
from reap.artifacts.partial import write_synced
from reap.errors import ArtifactError
from reap.progress import Progress, silent

MANIFEST = "SHA256SUMS"

Status = Literal["ok", "present", "changed", "missing", "extra"]


@dataclass(frozen=True)
class FileCheck:
    """A file of a checkpoint, its path relative to it, against the manifest.

    `status` "present": there, but not hashed; "extra": there, but not in the manifest, with
    `sha256` "". `nbytes` is 0 for a missing file.
    """

    path: str
    nbytes: int
    sha256: str
    status: Status

    @property
    def damaged(self) -> bool:
        """Changed, missing, or weights too many: mlx-lm loads every model*.safetensors there is."""
        weights = self.path.startswith("model") and self.path.endswith(".safetensors")
        return self.status in ("changed", "missing") or (self.status == "extra" and weights)


def write_manifest(directory: Path, digests: Mapping[str, str]) -> None:
    """`digests`: hex sha256 by path relative to `directory`. Raises OSError."""
    lines = [f"{digest}  {path}\n" for path, digest in sorted(digests.items())]
    write_synced(directory / MANIFEST, "".join(lines).encode())


def read_manifest(directory: Path) -> dict[str, str]:
    """Hex sha256 by relative path. Raises ArtifactError."""
    path = directory / MANIFEST
    found = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            if len(digest) != 64 or not name or set(digest) - set("0123456789abcdef"):
                raise ValueError(f"not a line of sha256sum: {line[:80]!r}")
            found[name] = digest
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from None
    return found


def check_manifest(
    directory: Path, *, hashing: bool = True, progress: Progress = silent
) -> list[FileCheck]:
    """Every file that the manifest names or that is there; `hashing` False: only whether it is."""
    digests = read_manifest(directory)
    there = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    total, done = sum(there.get(name, 0) for name in digests), 0
    found = []
    for name in sorted({*digests, *there}):
        status: Status = "present"
        if name not in digests:
            status = "extra"
        elif name not in there:
            status = "missing"
        elif hashing:
            progress("checking files", done, total)
            status = "ok" if sha256(directory / name) == digests[name] else "changed"
            done += there[name]
        found.append(FileCheck(name, there.get(name, 0), digests.get(name, ""), status))
    return found


def renew(directory: Path, name: str) -> None:
    """Bring the entry of one file in line with it, if there is a manifest. Raises OSError."""
    if (directory / MANIFEST).exists():
        write_manifest(directory, read_manifest(directory) | {name: sha256(directory / name)})
