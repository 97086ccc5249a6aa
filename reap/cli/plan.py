"""reap plan: decide under a byte budget which experts stay and how they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from reap.artifacts.plan import Layout, Rounding
from reap.artifacts.saliency import CRITERIA, Saliency
from reap.cli.options import Force, Json, Run
from reap.errors import ReapError
from reap.planning.settings import TRUNKS, PlanSettings
from reap.planning.size import parse_size


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
            metavar="SIZE",
            help="Bytes of the loaded weights, not a budget; 55% keeps at most so much of the "
            "experts' bytes, beside everything else.",
            show_default=False,
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
        str, typer.Option(metavar="FORMAT", help="Low bank: none, or e.g. 2bit, 3bit, 3bit-g64.")
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
    low_down: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Low bank's down projections, if they differ.",
            show_default=False,
        ),
    ] = PlanSettings.low_down,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER:EXPERT,…",
            help="Experts that must be in the high bank, e.g. 3:17,40; repeatable.",
            show_default=False,
        ),
    ] = None,
    protect_super: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="So many experts of extreme output must be in the high bank."
        ),
    ] = PlanSettings.protect_super,
    domains: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="How domains count: sum, worst, or weights like code=2,prose=1."
        ),
    ] = str(PlanSettings.domains),
    clamp: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Limits of a layer's count relative to the uniform one: auto, none, or 0.5:1.6.",
        ),
    ] = str(PlanSettings.clamp),
    plain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A plain recipe at the same bytes to compare with: random, low, two-bank, "
            "coverage, global-reap or a criterion.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of --plain random.")] = 0,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Plan nothing: show what other sizes would give, and what more buys."
        ),
    ] = False,
    extra: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The more that --sweep asks about; default: a twentieth of the size or budget.",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="Plan nothing: show what the run's plan does differently from PLAN.",
            show_default=False,
        ),
    ] = None,
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

    directory = RunDirectory.find(run, saliency)
    target = out or directory.plan
    _refuse_idle_options(ctx, diff=diff is not None, sweep=sweep)
    if diff is not None:
        found = show.plan_diff(diff, target)
        if json:
            print_json(show.diff_figures(found))
        else:
            say(str(found))
        return
    if not sweep:
        directory.require_out(out, saliency, directory.saliency)
    measured = saliency or directory.saliency
    settings = _settings(ctx, recipe, measured)
    if sweep:
        figures = show.sweep(measured, settings, extra, quiet=json)
        if json:
            print_json(figures)
        return
    made = stages.plan(measured, settings, target, plain=plain, seed=seed, force=force)
    if json:
        print_json({"plan": str(target)} | show.plan_figures(made))
    show.show_plan(made)
    say(f"Wrote {target}")


def _refuse_idle_options(ctx: typer.Context, *, diff: bool, sweep: bool) -> None:
    """Raise ReapError for options that --diff or --sweep, or their absence, leaves without use."""
    idle = {"plain", "seed", "force"} | ({"out"} if sweep else set())
    if diff:
        idle = set(ctx.params) - {"diff", "out", "run", "json", "saliency"}
    if not (diff or sweep):
        if ctx.params["extra"] is not None:
            raise ReapError("--extra has no use without --sweep.", "leave it out, or add --sweep")
        return
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name in idle and source is not None and source.name == "COMMANDLINE":
            what = "--diff" if diff else "--sweep"
            raise ReapError(f"{what} has no use for --{name.replace('_', '-')}.", "leave it out")


def _settings(ctx: typer.Context, recipe: str | None, saliency: Path) -> PlanSettings:
    """What was typed goes before the recipe, the recipe before the defaults.

    A size in percent is one of the model that `saliency` is of.
    """
    from reap.recipes import load_recipe

    typed: dict[str, Any] = {}
    for name in (field.name for field in fields(PlanSettings)):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = ctx.params[name]
            typed[name] = _READ.get(name, lambda value: value)(value)
    chosen = dict(load_recipe(recipe).plan) if recipe else {}
    if "budget" in typed or "size" in typed:
        chosen.pop("budget", None)
        chosen.pop("size", None)

    from reap.planning.precision import settings_of

    return settings_of(chosen | typed, lambda: Saliency.load(saliency).spec)


def _kept(texts: list[str]) -> list[tuple[str, str]]:
    """["3:17,40"] → layer and expert pairs, checked by PlanSettings."""
    pairs = []
    for text in texts:
        layer, _, experts = text.partition(":")
        pairs += [(layer, expert) for expert in experts.split(",")]
    return pairs


def _domains(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip(): weight for name, _, weight in parts}


def _clamp(text: str) -> str | list[str] | None:
    return None if text == "none" else text.split(":") if ":" in text else text


_READ: dict[str, Callable[[Any], Any]] = {
    "budget": parse_size,
    "keep": _kept,
    "domains": _domains,
    "clamp": _clamp,
}
"""How the text of an option becomes a setting, where it is not taken as it is."""
