"""reap demo: the whole pipeline on the embedded model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Json, Redo


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for everything it makes.")
    ] = Path("demo"),
    force: Redo = False,
    json: Json = False,
) -> None:
    """Run everything on the embedded model, offline."""
    from reap.cli.output import print_json, say
    from reap.cli.pipeline import Pipeline
    from reap.cli.rundir import RunDirectory
    from reap.recipes import load_recipe

    directory = RunDirectory(out)
    Pipeline(load_recipe("demo"), directory, force=force).run()
    if json:
        print_json({"run": str(directory.path), "report": str(directory.report)})
    say(f"Report: {directory.report.resolve()}")
