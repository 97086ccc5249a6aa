"""Reading and writing the files between the stages: envelopes, atomic writes, checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reap.errors import ArtifactError, ReapError


def sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes. Raises ArtifactError for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist.") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_existing(path: Path, force: bool) -> None:
    """Raise ReapError if `path` exists and `force` is not set."""
    if path.is_symlink() and not path.exists():
        raise ReapError(f"{path} is a link to nothing.", "remove it, or name another place")
    if path.exists() and not force:
        raise ReapError(
            f"{path} exists already.", "pass --force to replace it, or name another place"
        )


@contextmanager
def written_whole(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path` and rename it to `path` when the block ends well.

    Works for files and directories. On an exception the temporary path is removed and what stood
    at `path` is untouched. An OSError (disk full, no permission) becomes a ReapError.
    """
    partial = path.with_name(path.name + ".partial")
    recover(path)
    refuse_existing(path, force)
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        yield partial
        put_in_place(partial, path)
    except OSError as error:
        raise ReapError(f"could not write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # a folder that cannot be read has nothing of ours
            remove(partial)
        if not path.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()


def _set_aside(path: Path) -> Path:
    return path.with_name(path.name + ".old.partial")


def put_in_place(partial: Path, path: Path) -> None:
    """Rename what is finished to `path`, in place of what stands there. Raises OSError."""
    if path.is_dir():
        old = _set_aside(path)
        remove(old)
        os.rename(path, old)
        os.rename(partial, path)
        remove(old)
    else:
        os.replace(partial, path)


def recover(path: Path) -> None:
    """Put back what a crash between the two renames of `put_in_place` left set aside.

    Raises ReapError for a place that cannot be written to, a name that is too long, say.
    """
    try:
        if _set_aside(path).exists() and not path.exists():
            os.rename(_set_aside(path), path)
    except OSError as error:
        raise ReapError(f"could not write {path}: {error.strerror or error}") from error


def remove(path: Path) -> None:
    """Delete a file or a directory with all that is in it; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, data: dict[str, Any], *, force: bool = False) -> None:
    """Write `data` as indented JSON, atomically; short number lists stay on one line."""
    with written_whole(path, force=force) as partial:
        partial.write_text(_dumps(data) + "\n", encoding="utf-8")


def _dumps(value: Any, indent: int = 0) -> str:
    pad = "  " * (indent + 1)
    end = "  " * indent
    if isinstance(value, dict) and value:
        flat = json.dumps(value, ensure_ascii=False)
        if len(flat) <= 100 and not any(isinstance(v, dict | list) for v in value.values()):
            return flat
        items = (f"{pad}{json.dumps(k)}: {_dumps(v, indent + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(items) + f"\n{end}}}"
    if isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        return "[\n" + ",\n".join(pad + _dumps(v, indent + 1) for v in value) + f"\n{end}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_json(path: Path, *, format: str, version: int) -> dict[str, Any]:
    """Load a reap JSON file and check its envelope (`format`, `format_version`)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a directory, not a file.", "name a file in it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}") from None
    check_envelope(path, data, format=format, version=version)
    return dict(data)


def check_envelope(path: Path, data: Any, *, format: str, version: int) -> None:
    """Raise ArtifactError unless `data` says it is `format` in a version this reap can read."""
    found = data.get("format") if isinstance(data, dict) else None
    if found != format:
        what = f"a {found} file" if found else "not a reap file"
        raise ArtifactError(f"{path} is {what}; expected {format}.")
    if data.get("format_version") != version:
        raise ArtifactError(
            f"{path} has {format} version {data.get('format_version')}; "
            f"this reap reads version {version}.",
            "make it again with this version of reap, or use the reap that wrote it",
        )
