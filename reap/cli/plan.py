"""reap plan: decide under a byte budget which experts stay and how they are stored."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from reap.artifacts.plan import Layout, Rounding
from reap.artifacts.saliency import CRITERIA
from reap.cli.options import Force, Json, Run
from reap.planning.settings import TRUNKS, PlanSettings


def plan(
    ctx: typer.Context,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory the model must run in, e.g. 512GB or 96GiB.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes of the loaded weights, not a budget.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="A shipped recipe or a YAML file whose choices to take.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens of state to hold.")
    ] = PlanSettings.context,
    reserve: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=0.9, help="Part of the budget left free.")
    ] = PlanSettings.reserve,
    layout: Annotated[
        str, typer.Option(metavar="NAME", help=f"auto, {', '.join(get_args(Layout))}.")
    ] = PlanSettings.layout,
    trunk: Annotated[
        str,
        typer.Option(metavar="FORMAT", help=f"Everything but experts: {', '.join(TRUNKS)}."),
    ] = PlanSettings.trunk,
    high: Annotated[
        str, typer.Option(metavar="FORMAT", help="High bank: source, or e.g. mxfp4, 4bit-g64.")
    ] = PlanSettings.high,
    low: Annotated[
        str, typer.Option(metavar="FORMAT", help="Low bank: e.g. 2bit, 3bit, 3bit-g64.")
    ] = PlanSettings.low,
    low_rounding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How experts get into it: {', '.join(get_args(Rounding))}; default: as measured.",
            show_default=False,
        ),
    ] = PlanSettings.low_rounding,
    min_experts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Fewest experts in a layer; default: four times as many as a token uses.",
            show_default=False,
        ),
    ] = PlanSettings.min_experts,
    min_bank: Annotated[
        int, typer.Option(metavar="N", min=1, help="Fewest experts in a bank that is not empty.")
    ] = PlanSettings.min_bank,
    criterion: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Ranks a layer's experts: {', '.join(CRITERIA)}."),
    ] = PlanSettings.criterion,
    plain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A plain recipe at the same bytes to compare with: random, low, two-bank or a "
            "criterion.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of --plain random.")] = 0,
    saliency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Saliency file; default: the run's.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan file; default: the run's.", show_default=False),
    ] = None,
    run: Run = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Decide under a byte budget which experts stay."""
    from reap.cli import show, stages
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory

    settings = _settings(ctx, recipe)
    directory = RunDirectory.find(run, saliency)
    target = out or directory.plan
    made = stages.plan(
        saliency or directory.saliency, settings, target, plain=plain, seed=seed, force=force
    )
    if json:
        print_json({"plan": str(target)} | show.plan_figures(made))
    show.show_plan(made)
    say(f"Wrote {target}")


def _settings(ctx: typer.Context, recipe: str | None) -> PlanSettings:
    """What was typed goes before the recipe, the recipe before the defaults."""
    from reap.planning import parse_size
    from reap.recipes import load_recipe

    typed: dict[str, Any] = {}
    for name in (field.name for field in fields(PlanSettings)):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = ctx.params[name]
            typed[name] = parse_size(value) if name in ("budget", "size") else value
    chosen = dict(load_recipe(recipe).plan) if recipe else {}
    if "budget" in typed or "size" in typed:
        chosen.pop("budget", None)
        chosen.pop("size", None)
    return PlanSettings(**(chosen | typed))
