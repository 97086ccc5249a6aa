"""A calibration that can be taken up again: what is kept after each layer, and for which run.

`calibration.partial/` holds the states between layers, one file of sums and measurements per
finished layer, and `progress.json`, written last and renamed into place: whatever moment the
process ends at, it names only files that are complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from reap import __version__
from reap.errors import ReapError
from reap.models.source import SourceModel
from reap.models.states import StateStore
from reap.models.text import TextSet, TokenSequence

FORMAT, VERSION = "reap-calibration-progress", 1


def fingerprint(
    source: SourceModel,
    texts: Sequence[TextSet],
    parts: Sequence[TokenSequence],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Everything that the result depends on, by the name that a person knows it by."""
    checkpoint = source.checkpoint
    files = {}
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        status = (checkpoint.path / file).stat()
        files[file] = [status.st_size, status.st_mtime_ns]
    tokens = hashlib.sha256()
    for part in parts:
        tokens.update(np.array([part.domain, part.document, *part.tokens], "<i8").tobytes())
    found = {
        "reap's version": __version__,
        "reap's code": _code(),
        "mlx's version": version("mlx"),
        "the device": str(mx.default_device().type),
        "the model's config.json": checkpoint.config_sha256,
        "the model's weights": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "the texts": [text.source for text in texts],
    }
    found |= {f"the text of {text.source}": text.sha256 for text in texts}
    found |= {f"the setting {name}": value for name, value in settings.items()}
    return json.loads(json.dumps(found | {"the tokens": tokens.hexdigest()}))


def _code() -> str:
    """sha256 of the source of what computes the sums."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("models", "calibrate"):
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class PartialRun:
    """The directory of one unfinished calibration."""

    def __init__(self, directory: Path, *, memory: int | None = None) -> None:
        self.directory = directory
        self.states = StateStore(directory, memory)
        self.layers_done = 0
        self.command = ""
        self._fingerprint: dict[str, Any] = {}
        self._results: dict[str, str] = {}  # layer → its file

    @property
    def _progress(self) -> Path:
        return self.directory / "progress.json"

    def begin(self, fingerprint: dict[str, Any], command: str, *, resume: bool) -> None:
        """Take up what is there if it is of the same run; else begin anew.

        Raises ReapError if it is of another run, naming what differs, or must not be taken up.
        """
        self._fingerprint, self.command = fingerprint, command
        if resume and self._progress.exists():
            self._take_up(fingerprint)
            return
        if self._progress.exists():
            raise unfinished(self.directory)
        remove(self.directory)
        try:
            self._write()
        except ReapError:
            remove(self.directory)
            raise

    def _take_up(self, fingerprint: dict[str, Any]) -> None:
        try:
            kept = json.loads(self._progress.read_text(encoding="utf-8"))
            if (kept.get("format"), kept.get("format_version")) != (FORMAT, VERSION):
                raise ReapError(f"{self._progress} was written by another version of reap.", _ANEW)
            before = kept["fingerprint"]
            names = [*fingerprint, *(name for name in before if name not in fingerprint)]
            changed = [name for name in names if before.get(name) != fingerprint.get(name)]
            if len(changed) > 1:  # the tokens differ because of something else
                changed = [name for name in changed if name != "the tokens"]
            if changed:
                what = ", ".join(_difference(n, before.get(n), fingerprint.get(n)) for n in changed)
                raise ReapError(f"{self.directory} is of another run: {what}.", _ANEW)
            self.states.restore(kept["states"])
            self._results = kept["results"]
            self.layers_done = kept["layers_done"]
            self.command = kept["command"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReapError(f"{self._progress} is damaged: {error!r}.", _ANEW) from None
        self._clean()

    def results(self) -> dict[int, dict[str, np.ndarray]]:
        """What was saved for each finished layer that had results."""
        found = {}
        for layer, file in self._results.items():
            try:
                found[int(layer)] = load((self.directory / file).read_bytes())
            except Exception as error:  # safetensors has its own class
                raise ReapError(f"{self.directory / file} is damaged: {error}.", _ANEW) from None
        return found

    def layer_done(self, layer: int, results: dict[str, np.ndarray] | None) -> None:
        """Keep the states and results as they are after `layer`. Raises ReapError (full disk)."""
        if results is not None:
            file = f"layer-{layer}.safetensors"
            self._replace(self.directory / file, save(results))
            self._results[str(layer)] = file
        self.layers_done = layer + 1
        self._write()
        self._clean()

    def _write(self) -> None:
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            "command": self.command,
            "layers_done": self.layers_done,
            "fingerprint": self._fingerprint,
            "results": self._results,
            "states": self.states.commit(),
        }
        self._replace(self._progress, json.dumps(data).encode())

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            folder = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ReapError(
                f"could not write {path}: {error.strerror or error}",
                "make room, then go on with --resume" if self.layers_done else None,
            ) from error

    def _clean(self) -> None:
        self.states.clean()
        kept = set(self._results.values())
        for path in self.directory.glob("layer-*.safetensors"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """After a failure: keep what can be taken up again, and nothing else."""
        if not self.directory.exists():
            return
        try:
            done = json.loads(self._progress.read_text(encoding="utf-8"))["layers_done"]
        except (OSError, ValueError, KeyError):
            done = 0
        if not done:
            remove(self.directory)


_ANEW = "begin anew with --force (and without --resume)"


def unfinished(directory: Path) -> ReapError:
    return ReapError(
        f"{directory} holds a calibration that was not finished.",
        "go on with --resume, or begin anew with --force",
    )


def remove(directory: Path) -> None:
    """Raises ReapError for a directory that is not of a calibration."""
    if not directory.exists():
        return
    if any(
        file.suffix not in (".safetensors", ".json", ".partial") for file in directory.iterdir()
    ):
        raise ReapError(f"{directory} holds files that are not of a calibration.", "remove them")
    (directory / "progress.json").unlink(missing_ok=True)  # first: what it names goes next
    shutil.rmtree(directory)


def _difference(name: str, before: Any, now: Any) -> str:
    if name.startswith(("the setting", "reap's version", "mlx's", "the device")):
        return f"{name} was {before} and is {now}"
    return f"{name} has changed" if before is not None and now is not None else f"{name} differs"


def packed(*things: object) -> dict[str, np.ndarray]:
    """The numbers of plain objects (arrays, ints, floats, dicts of arrays) as arrays."""
    found = {}
    for number, thing in enumerate(things):
        for name, value in _fields(thing):
            found[f"{number}.{name}"] = np.array(value, order="C")
    return found


def unpacked(arrays: dict[str, np.ndarray], number: int) -> dict[str, Any]:
    """The fields of the `number`-th thing; scalars are Python's."""
    start = f"{number}."
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(start):
            *outer, leaf = name.removeprefix(start).split("/")
            into = fields
            for part in outer:
                into = into.setdefault(part, {})
            into[leaf] = array.item() if array.ndim == 0 else array.copy()
    return fields


def _fields(thing: object) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in vars(thing).items():
        if isinstance(value, dict):
            found += [(f"{name}/{key}", item) for key, item in value.items()]
        else:
            found.append((name, value))
    return found
