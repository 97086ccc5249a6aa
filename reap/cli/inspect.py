"""reap inspect: what is in a file that reap wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from reap.cli.options import Json, Trust

if TYPE_CHECKING:
    from reap.artifacts.manifest import FileCheck

T = TypeVar("T")


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Saliency, plan or evaluation file, or a checkpoint directory."
        ),
    ],
    verify: Annotated[
        bool,
        typer.Option(help="Hash a checkpoint's files; else only look whether they are there."),
    ] = True,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Print what is in a file; check a checkpoint."""
    from reap.artifacts import Evaluation, Plan, Saliency
    from reap.cli import show
    from reap.cli.output import data_on_stdout, print_json
    from reap.errors import ArtifactError

    def shown(
        loaded: T, figures: Callable[[T], dict[str, Any]], table: Callable[[T], None]
    ) -> None:
        if json:
            print_json(figures(loaded))
        else:
            with data_on_stdout():
                table(loaded)

    if not file.exists():
        raise ArtifactError(f"{file} does not exist.")
    if file.is_dir():
        from reap.models.source import open_source

        _refuse_run(file)
        files = _checked_files(file, hashing=verify)
        source = open_source(str(file), trust_remote_code=trust_remote_code)
        figures = show.checkpoint_figures(source)
        if json:
            print_json(figures | {"files": show.files_figures(files)})
            return
        with data_on_stdout():
            show.show_checkpoint(source)
            show.show_files(files)
        return
    kind = _kind(file)
    if kind == "reap.plan":
        shown(Plan.load(file), show.plan_figures, show.show_plan)
    elif kind == "reap.evaluation":
        shown(Evaluation.load(file), show.evaluation_figures, show.show_evaluation)
    elif kind is None:
        shown(Saliency.load(file), show.saliency_figures, show.show_saliency)
    else:
        if file.name == "run.json":
            _refuse_run(file.parent, f"{file} says only which model the run is of.")
        raise ArtifactError(f"{file} is not a file that reap wrote.")


def _refuse_run(directory: Path, message: str = "") -> None:
    """Raise ReapError, naming what can be inspected, if `directory` is a run's or holds runs."""
    from reap.errors import ReapError

    if (directory / "config.json").exists():
        return
    found = _results(directory)
    if found:
        raise ReapError(
            message or f"{directory} is a run, not a checkpoint.",
            f"inspect one of its files: {', '.join(map(str, found))}",
        )
    runs = [folder for folder in sorted(directory.iterdir()) if _results(folder)]
    if runs:
        raise ReapError(
            f"{directory} holds runs, it is not a checkpoint.",
            f"inspect a file of {', '.join(map(str, runs))}; e.g. {_results(runs[0])[0]}",
        )


def _results(directory: Path) -> list[Path]:
    """What a run in `directory` has to inspect; empty if it is none."""
    from reap.cli.rundir import RunDirectory

    run = RunDirectory(directory)
    return [p for p in (run.saliency, run.plan, run.evaluation, run.checkpoint) if p.exists()]


def _checked_files(checkpoint: Path, *, hashing: bool) -> list[FileCheck]:
    """Empty for a checkpoint without a manifest. Raises CheckpointError, naming what is damaged."""
    from reap.artifacts.manifest import MANIFEST, check_manifest
    from reap.cli.output import progress_bar
    from reap.errors import CheckpointError

    if not (checkpoint / MANIFEST).exists():
        return []
    with progress_bar("B") as progress:
        files = check_manifest(checkpoint, hashing=hashing, progress=progress)
    if any(file.damaged for file in files):
        wrong = [f"{x.path} is {x.status}" for x in files if x.damaged or x.status == "extra"]
        raise CheckpointError(
            f"{checkpoint} is damaged: {', '.join(wrong)}.", "export it again, or copy it again"
        )
    return files


def _kind(file: Path) -> str | None:
    """The format that a JSON file names, "" if it names none; None if it is not JSON."""
    import json

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(data.get("format", "")) if isinstance(data, dict) else ""
