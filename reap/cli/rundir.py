"""The run directory: where the files of one model lie, so that commands need no file names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from reap.artifacts.files import write_json
from reap.cli.output import say
from reap.data import model_path
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
    def partial(self) -> Path:
        """What a calibration that was cut off leaves."""
        return self.path / "calibration.partial"

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
        local = _expanded(model)
        where = str(local.resolve()) if local.exists() else model
        write_json(self._settings, {"model": where}, force=True)

    @property
    def model(self) -> str:
        """Raises ReapError if the run does not know its model."""
        try:
            return str(json.loads(self._settings.read_text(encoding="utf-8"))["model"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ReapError(
                f"{self.path} does not say which model it belongs to.",
                "name the model: --model for `reap export`, --reference for `reap evaluate`",
            ) from None

    @classmethod
    def for_model(cls, model: str, override: Path | None) -> RunDirectory:
        """runs/<model-name>, or `override`."""
        name = _expanded(model).resolve().name
        return cls(override or RUNS / name)

    @classmethod
    def find(cls, override: Path | None, *given: Path | None) -> RunDirectory:
        """`override`, or the run in which the first file that is given lies, or the newest run.

        The newest run is the one whose calibration is newest; it is told if there are others.
        Raises ReapError if there is none.
        """
        if override is not None:
            return cls(override)
        named = [file.parent for file in given if file is not None]
        for folder in named:
            if cls(folder)._settings.exists():
                return cls(folder)
        files = sorted(RUNS.glob("*/saliency.safetensors"), key=lambda file: file.stat().st_mtime)
        if not files and named:
            return cls(named[0])
        if not files:
            raise ReapError(
                "there is no run below runs/.",
                "run `reap calibrate MODEL` first, or name a run with --run",
            )
        newest = cls(files[-1].parent)
        if len(files) > 1:
            say(f"run: {newest.path}")
        return newest

    def require_out(self, out: Path | None, given: Path | None, own: Path) -> None:
        """Raise ReapError if what is made from `given` would take the place of the run's own.

        `own` is what the run has where `given` stands.
        """
        if out is None and given is not None and given.resolve() != own.resolve():
            raise ReapError(
                f"{given} is not the {own.name} of {self.path}.", "name what to write with --out"
            )


def _expanded(model: str) -> Path:
    try:
        return model_path(model)
    except RuntimeError as error:
        raise ReapError(f"{model}: {error}", "write the path without ~") from None
