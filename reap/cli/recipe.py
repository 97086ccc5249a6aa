"""reap run: all stages of a recipe, each skipped if its output is there and still fits."""

from __future__ import annotations

from typing import Annotated

import typer

from reap.cli.options import Json, NewRun, Redo, Trust


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A shipped recipe or a YAML file.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model instead of the recipe's.", show_default=False),
    ] = None,
    run: NewRun = None,
    trust_remote_code: Trust = False,
    force: Redo = False,
    json: Json = False,
) -> None:
    """Run all stages of a recipe; resumes what is finished."""
    from dataclasses import replace

    from reap.cli.output import print_json, say
    from reap.cli.pipeline import Pipeline
    from reap.cli.rundir import RunDirectory
    from reap.recipes import load_recipe

    chosen = load_recipe(recipe)
    if model is not None:
        chosen = replace(chosen, model=model)
    directory = RunDirectory.for_model(chosen.model, run)
    Pipeline(chosen, directory, trust=trust_remote_code, force=force).run()
    if json:
        print_json({"run": str(directory.path), "report": str(directory.report)})
    say(f"Report: {directory.report.resolve()}")
