"""A directory that is being written and can be taken up again: who holds it, and of what it is."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reap.errors import ReapError

ANEW = "begin anew with --force (and without --resume)"

_LOCK = "lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory`, which is made if it is not there, for this process alone.

    The lock ends with the process, however that ends. Raises ReapError if another one has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _LOCK
    with open(path, "a+", encoding="ascii") as file:
        if not _lock(file.fileno()):
            raise _held(directory, path.read_text(encoding="ascii"))
        # Whoever held it may have finished, and removed the directory, in the meantime.
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise _held(directory, "")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a directory that is there, for this process alone, without leaving a file in it.

    Raises ReapError if another process has it.
    """
    folder = os.open(directory, os.O_RDONLY)
    try:
        if not _lock(folder):
            raise ReapError(
                f"another process is calibrating in {directory}.",
                "wait for it to end, or name another run with --run",
            )
        yield
    finally:
        os.close(folder)


def _lock(descriptor: int) -> bool:
    """Whether another process does not have the lock; it ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a network file system without locks
    return True


def _held(directory: Path, process: str) -> ReapError:
    who = f"process {process}" if process else "another process"
    return ReapError(
        f"{who} is writing {directory}.", "wait for it to end, or name another place with --out"
    )


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that, whatever happens, is there whole or as it was before. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have a file or directory on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def code_sha256(folders: Sequence[str]) -> str:
    """Hex sha256 of the source of some of reap's packages."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def difference(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] | None = None
) -> str:
    """In what two fingerprints differ, in words; "" if they agree.

    A fingerprint maps what a run depends on, in a person's words, to a version or a digest.
    `names`: of those in which they differ, the ones to tell; default: all.
    """
    told = changed(before, now) if names is None else names
    return ", ".join(_differs(name, before.get(name), now.get(name)) for name in told)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names in which two fingerprints differ."""
    names = [*now, *(name for name in before if name not in now)]
    return [name for name in names if before.get(name) != now.get(name)]


def _differs(name: str, before: Any, now: Any) -> str:
    if name.startswith("the setting") or name.endswith(("'s version", "the device")):
        return f"{name} was {before} and is {now}"
    return f"{name} {'have' if name in _PLURALS else 'has'} changed"


_PLURALS = ("the model's weights", "the texts", "the tokens")
"""Names in fingerprints that stand for several things."""
