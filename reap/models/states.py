"""What is between two decoder layers: in memory up to a limit, else in a directory.

A state is what a layer returned: arrays in tuples, lists, dicts and plain objects of mlx-lm. On
disk it is one safetensors file per array, and JSON for the rest. An array that is the same object
as before (K3's residual stack between its block starts) keeps its file. No pickle.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from reap.errors import CalibrationError, ReapError

Key = tuple[int, Any]


def is_plain_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | mx.array | type)


def leaves(value: Any) -> Iterator[Any]:
    """What nested containers and plain objects (e.g. K3's residual blocks) hold."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif is_plain_object(value):
        yield from leaves(vars(value))
    else:
        yield value


class States:
    """States in memory, as they are."""

    def __init__(self) -> None:
        self._states: dict[Key, Any] = {}

    def keys(self) -> list[Key]:
        return list(self._states)

    def get(self, key: Key) -> Any:
        return self._states[key]

    def put(self, key: Key, state: Any) -> None:
        self._states[key] = state


@dataclass
class _Stored:
    """One array: in memory, in a file, or both. `written`: that file is complete."""

    file: str
    nbytes: int
    array: mx.array | None = None
    written: bool = False


class StateStore(States):
    """States in memory up to `memory` bytes (None: all of them), beyond that in `directory`.

    Batches come round in turn, so what is in memory stays there and what does not fit is written
    at once: to throw out the oldest would throw out what is needed next.
    """

    def __init__(self, directory: Path, memory: int | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.memory = memory
        self.bytes_written = 0
        self._arrays: dict[str, _Stored] = {}
        self._users: Counter[str] = Counter()  # states that hold an array
        self._names: dict[int, str] = {}  # of arrays in memory, by identity
        self._resident = 0
        self._serial = 0
        self._unsynced: list[Path] = []
        # What was handed out last, so that an array that comes back is known.
        self._lent: tuple[Key, dict[int, tuple[str, mx.array]]] | None = None

    def get(self, key: Key) -> Any:
        lent: dict[int, tuple[str, mx.array]] = {}
        state = self._decoded(self._states[key], lent)
        self._lent = key, lent
        return state

    def put(self, key: Key, state: Any) -> None:
        lent = self._lent[1] if self._lent is not None and self._lent[0] == key else {}
        self._lent = None
        before = _files(self._states.get(key))
        encoded = self._encoded(state, lent)
        after = _files(encoded)
        self._states[key] = encoded
        self._users.update(after)
        self._users.subtract(before)
        for name in before:
            if not self._users[name]:
                # Its file stays: it may belong to the last commit.
                self._drop(self._arrays.pop(name))
                del self._users[name]
        for name in after - before:
            stored = self._arrays[name]
            if self.memory is not None and self._resident > self.memory:
                if not stored.written:
                    self._write(stored)
                self._drop(stored)

    def _drop(self, stored: _Stored) -> None:
        """From memory."""
        if stored.array is not None:
            self._resident -= stored.nbytes
            del self._names[id(stored.array)]
            stored.array = None

    def _hold(self, stored: _Stored, array: mx.array) -> None:
        stored.array = array
        self._resident += stored.nbytes
        self._names[id(array)] = stored.file

    def _write(self, stored: _Stored) -> None:
        assert stored.array is not None
        path = self.directory / stored.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(path), {"a": stored.array})
            if path.stat().st_size < stored.nbytes:  # MLX does not always report a full disk
                raise OSError(28, os.strerror(28))
            self._unsynced.append(path)
        except (OSError, RuntimeError) as error:
            raise ReapError(
                f"could not write {path}: {getattr(error, 'strerror', None) or error}"
            ) from None
        stored.written = True
        self.bytes_written += stored.nbytes

    def commit(self) -> dict[str, Any]:
        """Write what is not on disk yet; all states as JSON, for `restore`."""
        for stored in self._arrays.values():
            if not stored.written:
                self._write(stored)
        # All at the end: the first takes most of the others with it.
        for path in self._unsynced:
            with suppress(FileNotFoundError), open(path, "rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()
        return {
            "serial": self._serial,
            "arrays": {name: stored.nbytes for name, stored in self._arrays.items()},
            "states": [[_plain(key), encoded] for key, encoded in self._states.items()],
        }

    def restore(self, committed: dict[str, Any]) -> None:
        """Take up what `commit` gave. Raises ReapError if files are missing."""
        self._serial = committed["serial"]
        for name, nbytes in committed["arrays"].items():
            stored = _Stored(name, nbytes, written=True)
            path = self.directory / name
            if not path.exists() or path.stat().st_size < nbytes:
                raise ReapError(f"{path} is missing or cut short.")
            if self.memory is None or self._resident + nbytes <= self.memory:
                self._hold(stored, _read(path))
            self._arrays[name] = stored
        self._states = {_hashable(key): encoded for key, encoded in committed["states"]}
        for encoded in self._states.values():
            self._users.update(_files(encoded))

    def clean(self) -> None:
        """Remove the files of states that are gone. Only after a commit has been recorded."""
        for path in self.directory.glob("state-*.safetensors"):
            if path.name not in self._arrays:
                path.unlink(missing_ok=True)

    def _encoded(self, value: Any, lent: dict[int, tuple[str, mx.array]]) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        if isinstance(value, mx.array):
            return {"array": self._named(value, lent)}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self._encoded(item, lent) for item in value]}
        if type(value) is dict and all(isinstance(name, str) for name in value):
            return {"dict": {n: self._encoded(item, lent) for n, item in value.items()}}
        cls = type(value)
        if is_plain_object(value) and cls.__module__.split(".")[0] == "mlx_lm":
            fields = {n: self._encoded(item, lent) for n, item in vars(value).items()}
            return {"object": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}
        raise CalibrationError(
            f"a decoder layer returns a {cls.__module__}.{cls.__qualname__}, which reap cannot "
            "keep between layers.",
            "this architecture is not supported by reap",
        )

    def _named(self, array: mx.array, lent: dict[int, tuple[str, mx.array]]) -> str:
        if id(array) in self._names:
            return self._names[id(array)]
        if id(array) in lent:
            return lent[id(array)][0]
        mx.eval(array)
        self._serial += 1
        name = f"state-{self._serial}.safetensors"
        self._arrays[name] = _Stored(name, array.nbytes)
        self._hold(self._arrays[name], array)
        return name

    def _decoded(self, encoded: Any, lent: dict[int, tuple[str, mx.array]]) -> Any:
        if "value" in encoded:
            return encoded["value"]
        if "array" in encoded:
            name = encoded["array"]
            known = next((array for of, array in lent.values() if of == name), None)
            if known is not None:
                return known
            stored = self._arrays[name]
            array = _read(self.directory / name) if stored.array is None else stored.array
            lent[id(array)] = name, array
            return array
        if "tuple" in encoded:
            return tuple(self._decoded(item, lent) for item in encoded["tuple"])
        if "list" in encoded:
            return [self._decoded(item, lent) for item in encoded["list"]]
        if "dict" in encoded:
            return {n: self._decoded(item, lent) for n, item in encoded["dict"].items()}
        made = _class(encoded["object"])
        value = made.__new__(made)
        vars(value).update({n: self._decoded(f, lent) for n, f in encoded["fields"].items()})
        return value


def state_bytes(state: Any) -> int:
    """Bytes of a state's arrays, each counted once."""
    arrays = {id(leaf): leaf.nbytes for leaf in leaves(state) if isinstance(leaf, mx.array)}
    return sum(arrays.values())


def _read(path: Path) -> mx.array:
    try:
        loaded: Any = mx.load(str(path), format="safetensors")
        array: mx.array = loaded["a"]
        mx.eval(array)  # read now: nothing lazy keeps the file open
    except (OSError, RuntimeError, KeyError) as error:
        raise ReapError(f"could not read {path}: {error}") from None
    return array


def _files(encoded: Any) -> set[str]:
    if not isinstance(encoded, dict):
        return set()
    if "array" in encoded:
        return {encoded["array"]}
    parts = [
        item
        for kind in ("tuple", "list", "dict", "fields")
        for item in _items(encoded.get(kind, ()))
    ]
    return set().union(*map(_files, parts))


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    if module.split(".")[0] != "mlx_lm" or not name.isidentifier():
        raise ReapError(f"a stored state holds {path}, which is not of mlx-lm.")
    return getattr(importlib.import_module(module), name)


def _plain(key: Any) -> Any:
    return [_plain(part) for part in key] if isinstance(key, tuple) else key


def _hashable(key: Any) -> Any:
    return tuple(_hashable(part) for part in key) if isinstance(key, list) else key
