"""The run directory: where the files of one model lie, so that commands need no file names."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from reap.artifacts.files import write_json
from reap.errors import ReapError

RUNS = Path("runs")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run; `model` is the source the run was started with."""

    path: Path

    @property
    def saliency(self) -> Path:
        return self.path / "saliency.safetensors"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def _settings(self) -> Path:
        return self.path / "run.json"

    def start(self, model: str) -> None:
        """Remember where the model is, as an absolute path if it is a local directory."""
        local = Path(model).expanduser()
        where = str(local.resolve()) if local.exists() else model
        write_json(self._settings, {"model": where}, force=True)

    @property
    def model(self) -> str:
        """Raises ReapError if the run does not know its model."""
        try:
            return str(json.loads(self._settings.read_text(encoding="utf-8"))["model"])
        except (OSError, ValueError, KeyError):
            raise ReapError(
                f"{self.path} does not say which model it belongs to.", "pass --model"
            ) from None

    @classmethod
    def for_model(cls, model: str, override: Path | None) -> RunDirectory:
        """runs/<model-name>, or `override`."""
        return cls(override or RUNS / Path(model).expanduser().resolve().name)

    @classmethod
    def newest(cls, override: Path | None) -> RunDirectory:
        """The run whose calibration is newest, or `override`. Raises ReapError if there is none."""
        if override is not None:
            return cls(override)
        files = sorted(RUNS.glob("*/saliency.safetensors"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise ReapError("there is no run below runs/.", "run `reap calibrate MODEL` first")
        return cls(files[-1].parent)


def command_line() -> str:
    """The command as it was typed, for the provenance."""
    return shlex.join(["reap", *sys.argv[1:]])
