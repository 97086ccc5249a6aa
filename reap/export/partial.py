"""An export that can be taken up again: which shards are done, and of what it is.

`<out>.partial/` holds the unfinished checkpoint and `progress.json`, which names a shard only once
that is on the disk and is itself renamed into place: whatever moment the process ends at, what it
names is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from reap import __version__
from reap.artifacts.files import put_in_place, remove, sha256
from reap.artifacts.partial import ANEW, code_sha256, difference, locked, sync, write_synced
from reap.errors import CheckpointError, ReapError
from reap.models.source import SourceModel

_WEIGHTS = "the model's weights"
FORMAT, VERSION = "reap-export-progress", 1


def fingerprint(source: SourceModel, plan_file: Path, saliency: str | None) -> dict[str, Any]:
    """Everything that the files depend on, by the name that a person knows it by.

    `saliency`: sha256 of the file that the low bank is rounded by, if it is.
    """
    found = {
        "reap's version": __version__,
        "reap's code": code_sha256(("artifacts", "models", "export")),
        "mlx's version": version("mlx"),
        "mlx-lm's version": version("mlx-lm"),
        "the device": str(mx.default_device().type),
        "the model's config.json": sha256(source.checkpoint.path / "config.json"),
        _WEIGHTS: source.checkpoint.stamp(),
        "the plan": sha256(plan_file),
        "the saliency file": saliency,
    }
    return dict(json.loads(json.dumps(found)))


@dataclass
class PartialExport:
    """The directory of one unfinished export. `done`: sha256 of every shard that is finished."""

    directory: Path
    fingerprint: dict[str, Any]
    done: dict[str, str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def _progress(self) -> Path:
        return self.directory / "progress.json"

    def begin(self, *, resume: bool, force: bool) -> None:
        """Take up what is there if it is of the same export; else begin anew.

        Raises ReapError if it is of another one, naming what differs, or must not be taken up.
        """
        # Without a checkpoint, all that is left is of an export that was finished.
        if self._progress.exists() and self.checkpoint.exists():
            if resume:
                self._take_up()
            elif not force:
                raise ReapError(
                    f"{self.directory} holds an export that was not finished.",
                    "go on with --resume, or begin anew with --force",
                )
        if not self.done:
            self.remove()
        self.checkpoint.mkdir(exist_ok=True)
        for file in self.checkpoint.iterdir():
            if file.name not in self.done:
                remove(file)

    def _take_up(self) -> None:
        try:
            kept = json.loads(self._progress.read_text(encoding="utf-8"))
            if (kept.get("format"), kept.get("format_version")) != (FORMAT, VERSION):
                raise ReapError(f"{self._progress} was written by another version of reap.", ANEW)
            changed = difference(kept["fingerprint"], self.fingerprint)
            digests = {name: str(entry["sha256"]) for name, entry in kept["shards"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReapError(f"{self._progress} is damaged: {error!r}.", ANEW) from None
        if changed:
            raise ReapError(f"{self.directory} is of another export: {changed}.", ANEW)
        # A shard that was lost or damaged meanwhile is written again.
        self.done = {
            name: digest
            for name, digest in digests.items()
            if (self.checkpoint / name).exists() and sha256(self.checkpoint / name) == digest
        }

    def shard_done(self, name: str, digest: str) -> None:
        """Remember a shard that is on the disk. Raises OSError."""
        self.done[name] = digest
        shards = {name: {"sha256": digest} for name, digest in self.done.items()}
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            "fingerprint": self.fingerprint,
            "shards": shards,
        }
        write_synced(self._progress, json.dumps(data).encode())

    def check_source(self, source: SourceModel) -> None:
        """Raise CheckpointError if the source's files are not those that the export began with."""
        try:
            stamp = source.checkpoint.stamp()
        except OSError:  # one is gone
            stamp = ""
        if stamp != self.fingerprint[_WEIGHTS]:
            raise CheckpointError(
                f"files of {source.checkpoint.path} have changed while they were exported.",
                "export again when nothing changes them",
            )

    def remove(self) -> None:
        """Drop what is there, but for the lock. Raises ReapError for what is not of an export."""
        ours = {"lock", "checkpoint", "progress.json", "progress.json.partial"}
        files = list(self.directory.iterdir()) if self.directory.exists() else []
        if foreign := sorted(file.name for file in files if file.name not in ours):
            raise ReapError(
                f"{self.directory} holds files that are not of an export, first {foreign[0]}.",
                "remove them",
            )
        self.done.clear()
        # First what names the others.
        for name in ("progress.json", "progress.json.partial", "checkpoint"):
            remove(self.directory / name)

    def finish(self, out: Path) -> None:
        """Put the checkpoint in its place. Raises OSError."""
        sync(self.checkpoint)
        put_in_place(self.checkpoint, out)
        sync(out.parent)
        remove(self.directory)


def finished_shards(out: Path) -> list[str]:
    """The shards that an unfinished export to `out` would be taken up with, if it is of the same.

    Raises ReapError if what is there cannot be read.
    """
    file = _beside(out) / "progress.json"
    try:
        return [str(name) for name in json.loads(file.read_text(encoding="utf-8"))["shards"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReapError(f"{file} is damaged: {error!r}.", ANEW) from None


def _beside(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@contextmanager
def partial_export(
    out: Path, made_of: dict[str, Any], *, resume: bool, force: bool
) -> Iterator[PartialExport]:
    """The unfinished export beside `out`, held by this process alone, taken up or begun.

    After a failure it stays if a shard is done, to be taken up. An OSError becomes a ReapError.
    """
    partial = PartialExport(_beside(out), made_of)
    made = [folder for folder in partial.directory.parents if not folder.exists()]
    try:
        with locked(partial.directory):
            partial.begin(resume=resume, force=force)
            try:
                yield partial
            finally:
                if not partial.done:
                    with suppress(OSError):
                        remove(partial.directory)
    except RuntimeError as error:
        if not str(error).startswith("[read]"):  # MLX, of a file that ends early or a bad disk
            raise
        raise CheckpointError(
            f"a file cannot be read any more: {error}", "is the source being changed?"
        ) from error
    except OSError as error:
        raise ReapError(
            f"could not write {out}: {error.strerror or error}",
            "make room, then go on with --resume" if partial.done else None,
        ) from error
    finally:
        if not out.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
