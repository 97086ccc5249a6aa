"""The typer application. Commands import what they need when they run: `--help` stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from reap import __version__
from reap.cli import calibrate, demo, evaluate, export, inspect, merge, plan, recipe, report
from reap.errors import ReapError

app = typer.Typer(
    help="Prune and mixed-precision quantize Mixture-of-Experts models until they fit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"reap {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    from reap.models.ranks import launched

    if context.invoked_subcommand != "calibrate" and launched():
        raise ReapError(
            f"`reap {context.invoked_subcommand}` cannot run on several machines or processes.",
            "run it without mlx.launch; of all commands only `reap calibrate` can be launched so",
        )


app.command("demo")(demo.demo)
app.command("calibrate")(calibrate.calibrate)
app.command("merge")(merge.merge)
app.command("plan")(plan.plan)
app.command("export")(export.export)
app.command("evaluate")(evaluate.evaluate)
app.command("report")(report.report)
app.command("inspect")(inspect.inspect)
app.command("run")(recipe.run)
