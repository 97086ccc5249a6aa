"""A calibration that can be taken up again: what is kept after each layer, and for which run.

`calibration.partial/` holds the states between layers, one file of sums and measurements per
finished layer, and `progress.json`, written last and renamed into place: whatever moment the
process ends at, it names only files that are complete.

Of several ranks each has a directory of its own below that one, `rank-0-of-2/`, with the states of
its batches and the sums of all. When they are ended, some may have finished a layer more than
others: `progress.json` names what was there one layer before, too, and nothing of it is removed
before all have finished the layer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from reap import __version__
from reap.artifacts.files import sha256
from reap.artifacts.partial import ANEW, changed, code_sha256, difference, write_synced
from reap.errors import ReapError
from reap.models.ranks import Ranks
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
    tokens = hashlib.sha256()
    for part in parts:
        tokens.update(np.array([part.domain, part.document, *part.tokens], "<i8").tobytes())
    found = {
        "reap's version": __version__,
        "reap's code": code_sha256(("models", "calibrate")),
        "mlx's version": version("mlx"),
        "the device": str(mx.default_device().type),
        "the model's config.json": sha256(source.checkpoint.path / "config.json"),
        _WEIGHTS: source.checkpoint.stamp(),
        "the texts": [text.source for text in texts],
    }
    found |= {f"the text of {text.source}": text.sha256 for text in texts}
    found |= {f"the setting {name}": value for name, value in settings.items()}
    return json.loads(json.dumps(found | {_TOKENS: tokens.hexdigest()}))


_WEIGHTS = "the model's weights"
_TOKENS = "the tokens"


def check_alike(source: SourceModel, known: dict[str, Any], ranks: Ranks) -> None:
    """Raise ReapError if the ranks have not the same model, text, settings and versions.

    Times differ between machines and whole files take too long to read: of the weights, sizes and
    samples are compared.
    """
    if ranks.size == 1:
        return
    mine = known | {_WEIGHTS: source.checkpoint.model_sha256}
    first, *others = map(json.loads, ranks.gather(json.dumps(mine).encode()))
    for rank, theirs in enumerate(others, 1):
        if names := _changed(first, theirs):
            raise ReapError(
                f"rank {rank} differs from rank 0 in {', '.join(names)}.",
                "give all machines the same files and the same versions",
            )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = changed(before, now)
    if len(names) > 1:  # the tokens differ because of something else
        names = [name for name in names if name != _TOKENS]
    return names


class PartialRun:
    """What one rank keeps of an unfinished calibration."""

    def __init__(
        self, directory: Path, *, memory: int | None = None, ranks: Ranks | None = None
    ) -> None:
        """directory: of all ranks."""
        self.ranks = ranks or Ranks()
        self._shared = directory
        self.directory = own_directory(directory, self.ranks)
        self.states = StateStore(self.directory, memory)
        self.layers_done = 0
        self.command = ""
        self._fingerprint: dict[str, Any] = {}
        self._results: dict[str, str] = {}  # layer → its file
        self._before: dict[str, Any] | None = None  # what was written last

    @property
    def _progress(self) -> Path:
        return self.directory / "progress.json"

    def begin(self, fingerprint: dict[str, Any], command: str, *, resume: bool) -> None:
        """Take up what is there if it is of the same run; else begin anew.

        Raises ReapError if it is of another run, naming what differs, or must not be taken up.
        """
        self._fingerprint, self.command = fingerprint, command
        _check_size(self._shared, self.ranks)
        if self._progress.exists() and not resume:
            raise unfinished(self.directory)
        found = self._read(fingerprint) if self._progress.exists() else None
        layers = self._agreed(0 if found is None else found["layers_done"])
        if found is not None:
            self._take_up(found, layers)
            return
        remove(self.directory)
        try:
            self._write()
        except ReapError:
            remove(self.directory)
            raise

    def _read(self, fingerprint: dict[str, Any]) -> dict[str, Any]:
        with self._damage():
            kept = json.loads(self._progress.read_text(encoding="utf-8"))
            if (kept.get("format"), kept.get("format_version")) != (FORMAT, VERSION):
                raise ReapError(f"{self._progress} was written by another version of reap.", ANEW)
            before = kept["fingerprint"]
            if names := _changed(before, fingerprint):
                what = difference(before, fingerprint, names)
                raise ReapError(f"{self.directory} is of another run: {what}.", ANEW)
            int(kept["layers_done"])
            return dict(kept)

    def _agreed(self, layers: int) -> int:
        """How many layers all ranks have done. A rank is at most one ahead of another."""
        done = [int(message) for message in self.ranks.gather(str(layers).encode())]
        if max(done) > min(done) + 1:
            each = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(done))
            raise ReapError(
                f"what the ranks have kept does not fit together: layers done are {each}.",
                f"give the machines the order they had, or {ANEW}",
            )
        return min(done)

    def _take_up(self, kept: dict[str, Any], layers: int) -> None:
        with self._damage():
            ahead = kept["layers_done"] != layers
            taken = kept["before"] if ahead else kept
            self._before = {name: taken[name] for name in ("layers_done", "results", "states")}
            self.states.restore(taken["states"])
            self._results = dict(taken["results"])
            self.layers_done = taken["layers_done"]
            self.command = kept["command"]
        if ahead:  # before a file that the later state names is written again
            self._write()
        self._clean()

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReapError(f"{self._progress} is damaged: {error!r}.", ANEW) from None

    def results(self) -> dict[int, dict[str, np.ndarray]]:
        """What was saved for each finished layer that had results."""
        found = {}
        for layer, file in self._results.items():
            try:
                found[int(layer)] = load((self.directory / file).read_bytes())
            except Exception as error:  # safetensors has its own class
                raise ReapError(f"{self.directory / file} is damaged: {error}.", ANEW) from None
        return found

    def layer_done(self, layer: int, results: dict[str, np.ndarray] | None) -> None:
        """Keep the states and results as they are after `layer`. Raises ReapError (full disk)."""
        if results is not None:
            file = f"layer-{layer}.safetensors"
            self._replace(self.directory / file, save(results))
            self._results[str(layer)] = file
        self.layers_done = layer + 1
        self._write()
        self.ranks.gather()
        self._clean()

    def _write(self) -> None:
        state = {
            "layers_done": self.layers_done,
            "results": dict(self._results),
            "states": self.states.commit(),
        }
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            "command": self.command,
            "fingerprint": self._fingerprint,
            **state,
        }
        if self.ranks.size > 1:
            data["before"] = self._before
        self._replace(self._progress, json.dumps(data).encode())
        self._before = state

    def _replace(self, path: Path, content: bytes) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_synced(path, content)
        except OSError as error:
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


def unfinished(directory: Path) -> ReapError:
    return ReapError(
        f"{directory} holds a calibration that was not finished.",
        "go on with --resume, or begin anew with --force",
    )


_RANKS = "rank-*-of-*"


def own_directory(directory: Path, ranks: Ranks) -> Path:
    """Where this rank keeps what it has; `directory` itself if there is no other."""
    return directory if ranks.size == 1 else directory / ranks.name


def _check_size(directory: Path, ranks: Ranks) -> None:
    """Raise ReapError if what is kept in `directory` is of another number of ranks."""
    sizes = {int(part.name.rpartition("-")[2]) for part in directory.glob(_RANKS)}
    sizes |= {1} if (directory / "progress.json").exists() else set()
    if other := sizes - {ranks.size}:
        raise ReapError(
            f"{directory} is of another run: the number of ranks was {min(other)} and is "
            f"{ranks.size}.",
            ANEW,
        )


def remove(directory: Path) -> None:
    """Raises ReapError for a directory that is not of a calibration."""
    if not directory.exists():
        return
    parts = list(directory.glob(_RANKS))
    if any(
        file.suffix not in (".safetensors", ".json", ".partial") and file not in parts
        for file in directory.iterdir()
    ):
        raise ReapError(f"{directory} holds files that are not of a calibration.", "remove them")
    for part in parts:
        remove(part)
    (directory / "progress.json").unlink(missing_ok=True)  # first: what it names goes next
    shutil.rmtree(directory)


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
