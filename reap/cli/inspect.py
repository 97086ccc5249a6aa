"""reap inspect: what is in a file that reap wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from reap.cli.options import Json, Trust

T = TypeVar("T")


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Saliency, plan or evaluation file, or a checkpoint directory."
        ),
    ],
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Print what is in a file or a checkpoint."""
    from reap.artifacts import Evaluation, Plan, Saliency
    from reap.cli import show
    from reap.cli.output import print_json
    from reap.errors import ArtifactError

    def shown(
        loaded: T, figures: Callable[[T], dict[str, Any]], table: Callable[[T], None]
    ) -> None:
        if json:
            print_json(figures(loaded))
        else:
            table(loaded)

    if not file.exists():
        raise ArtifactError(f"{file} does not exist.")
    if file.is_dir():
        from reap.models.source import open_source

        source = open_source(str(file), trust_remote_code=trust_remote_code)
        shown(source, show.checkpoint_figures, show.show_checkpoint)
        return
    kind = _kind(file)
    if kind == "reap.plan":
        shown(Plan.load(file), show.plan_figures, show.show_plan)
    elif kind == "reap.evaluation":
        shown(Evaluation.load(file), show.evaluation_figures, show.show_evaluation)
    elif kind is None:
        shown(Saliency.load(file), show.saliency_figures, show.show_saliency)
    else:
        raise ArtifactError(f"{file} is not a file that reap wrote.")


def _kind(file: Path) -> str | None:
    """The format that a JSON file names, "" if it names none; None if it is not JSON."""
    import json

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(data.get("format", "")) if isinstance(data, dict) else ""
