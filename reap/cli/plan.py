"""reap plan: decide under a byte budget which experts stay and how they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reap.cli.options import Force, Json, Run

if TYPE_CHECKING:
    from reap.artifacts import Format, Plan


def plan(
    budget: Annotated[
        str | None,
        typer.Option(help="Memory the model must run in, e.g. 512GB or 96GiB.", show_default=False),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Bytes of the loaded weights instead of a budget.", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Take budget and precisions from a recipe.", show_default=False),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=0, help="Tokens of state to hold.", show_default="8192")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(min=0, max=0.9, help="Share of the budget left free.", show_default="0.08"),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="auto, stock, per-layer or two-bank.", show_default="auto")
    ] = None,
    trunk: Annotated[
        str | None,
        typer.Option(
            help="Precision of everything else: source, 8bit, 6bit, 4bit.", show_default="source"
        ),
    ] = None,
    high: Annotated[
        str | None, typer.Option(help="High bank: source or a format.", show_default="source")
    ] = None,
    low: Annotated[
        str | None, typer.Option(help="Low bank: 2bit, 3bit, 3bit-g64, …", show_default="2bit")
    ] = None,
    low_rounding: Annotated[
        str | None,
        typer.Option(
            help="How experts get into the low bank: plain, search, weighted, feedback.",
            show_default="as measured",
        ),
    ] = None,
    min_experts: Annotated[
        int | None,
        typer.Option(min=1, help="Fewest experts in a layer.", show_default="4 × top_k"),
    ] = None,
    min_bank: Annotated[
        int | None, typer.Option(min=1, help="Fewest experts in a bank.", show_default="1")
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(help="What ranks the experts of a layer.", show_default="energy"),
    ] = None,
    plain: Annotated[
        str | None,
        typer.Option(
            help="A plain recipe at the same bytes instead: random, low, or a criterion.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --plain random.")] = 0,
    saliency: Annotated[
        Path | None, typer.Option(help="Saliency file; default: the run's.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file; default: the run's.", show_default=False)
    ] = None,
    run: Run = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Decide under a byte budget which experts stay: writes plan.json."""
    from reap import __version__
    from reap.artifacts import Provenance, Saliency
    from reap.artifacts.files import refuse_existing, sha256
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory, command_line
    from reap.planning import PlanSettings, make_plan, parse_size, plain_plan

    source = saliency or RunDirectory.newest(run).saliency
    target = out or (source.parent / "plan.json" if run is None else run / "plan.json")
    given = {
        "budget": parse_size(budget) if budget else None,
        "size": parse_size(size) if size else None,
        "context": context,
        "reserve": reserve,
        "layout": layout,
        "trunk": trunk,
        "high": high,
        "low": low,
        "low_rounding": low_rounding,
        "min_experts": min_experts,
        "min_bank": min_bank,
        "criterion": criterion,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if recipe is not None:
        from reap.recipes import load_recipe

        given = load_recipe(recipe).plan | given
        if budget:
            given.pop("size", None)
        elif size:
            given.pop("budget", None)
    settings = PlanSettings(**given)
    refuse_existing(target, force)
    measured = Saliency.load(source)
    provenance = Provenance(
        reap_version=__version__,
        command=command_line(),
        model=measured.spec.model,
        revision=measured.spec.revision,
        config_sha256=measured.spec.config_sha256,
        inputs={"saliency": sha256(source)},
        corpora=measured.provenance.corpora,
    )
    if plain is None:
        made = make_plan(measured, settings, provenance=provenance)
    else:
        made = plain_plan(measured, settings, recipe=plain, seed=seed, provenance=provenance)
    made.save(target, force=force)
    if json:
        print_json(summary(made) | {"plan": str(target)})
    show(made)
    say(f"Wrote {target}")


def parse_format(text: str) -> Format:
    """Raises ReapError for what is not a format."""
    from reap.artifacts import Format
    from reap.errors import ReapError

    try:
        return Format.parse(text)
    except ValueError as error:
        raise ReapError(f"{error}.", "e.g. 2bit, 3bit-g64, 8bit, mxfp4") from None


def summary(plan: Plan) -> dict[str, object]:
    """The plan's figures for --json."""
    water = plan.waterfall
    return {
        "layout": plan.layout,
        "kept": sum(plan.expert_counts),
        "of": plan.num_experts * len(plan.layers),
        "high": sum(layer.high for layer in plan.layers),
        "bytes": {**vars(water), "weights": water.weights, "slack": water.slack},
        "damage": plan.damage,
        "lower_bound": plan.lower_bound,
        "alternatives": plan.alternatives,
    }


def show(plan: Plan) -> None:
    """The byte waterfall and the counts, as tables on stderr."""
    from reap.cli.output import say, table
    from reap.planning import format_size

    water = plan.waterfall

    def line(name: str, value: int, sign: str = "") -> list[str]:
        share = f"{100 * value / water.budget:.1f} %" if water.budget else ""
        return [name, f"{sign}{value:,}", format_size(value), share]

    by_size = not water.reserve and not water.state
    high = "/".join(dict.fromkeys(f.label for f in plan.high.values()))
    low = "/".join(dict.fromkeys(f.label for f in plan.low.values()))
    rows = [
        line("size of the weights" if by_size else "budget", water.budget),
        line("trunk", water.trunk, "-"),
        line("routers", water.router, "-"),
        line(f"experts, high bank ({high})", water.high, "-"),
        line(f"experts, low bank ({low})", water.low, "-"),
    ]
    if not by_size:
        rows += [
            line(f"state of {water.context:,} tokens", water.state, "-"),
            line("reserve", water.reserve, "-"),
        ]
    rows.append(line("slack", water.slack))
    table("Bytes", ["", "bytes", "", "share"], rows)
    kept = [len(layer.kept) for layer in plan.layers]
    highs = [layer.high for layer in plan.layers]
    say(
        f"{plan.layout}: {sum(kept):,} of {plan.num_experts * len(kept):,} experts kept, "
        f"{sum(highs):,} high and {sum(kept) - sum(highs):,} low; "
        f"{min(kept)}-{max(kept)} in a layer."
    )
    say(f"Predicted damage {plan.damage:.4g}, lower bound {plan.lower_bound:.4g}.")
    for name, damage in plan.alternatives.items():
        say(f"  {name}: {damage:.4g}")
