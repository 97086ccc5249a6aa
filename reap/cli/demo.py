"""reap demo: the whole pipeline on the embedded model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json


def demo(
    out: Annotated[Path, typer.Option(help="Directory for everything it makes.")] = Path("demo"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Run the whole pipeline on the embedded Kimi-K3-architecture model, offline."""
    from reap.cli.output import print_json, say
    from reap.cli.recipe import Pipeline
    from reap.cli.rundir import RunDirectory
    from reap.recipes import load_recipe

    directory = RunDirectory(out)
    Pipeline(load_recipe("demo"), directory, force=force).run()
    if json:
        print_json({"report": str(directory.report.resolve())})
    say(f"Report: {directory.report.resolve()}")
