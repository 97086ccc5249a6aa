"""reap export: write the pruned checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reap.cli.options import Force, Json, Run, Trust

if TYPE_CHECKING:
    from reap.artifacts import Plan


def export(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Checkpoint directory; default: the run's.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Source model; default: the run's.", show_default=False),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan file; default: the run's.", show_default=False),
    ] = None,
    saliency: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Saliency file the plan was made from; default: the run's.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["mlx", "hf"],
        typer.Option(
            metavar="mlx|hf",
            help="mlx, or hf: the source's own layout and bytes; the plan must keep as many "
            "experts in every layer, in the source's format.",
        ),
    ] = "mlx",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last finished file of an export.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and end.")
    ] = False,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the checkpoint that the plan describes."""
    from reap.artifacts import Plan
    from reap.cli import show, stages
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.export import finished_shards
    from reap.planning import format_size

    directory = RunDirectory.find(run, plan)
    plan_file = plan or directory.plan
    made = Plan.load(plan_file)
    if plan is None:
        _check_fresh(plan_file, saliency or directory.saliency, made)
    directory.require_out(out, plan, directory.plan)
    target = out or directory.checkpoint
    source, measured = model or directory.model, saliency or directory.saliency
    if dry_run:
        stages.check_output(target, force or resume, directory=True)
        found = stages.outline(source, made, measured, format=format, trust=trust_remote_code)
        done = finished_shards(target) if resume else []
        if json:
            print_json(show.outline_figures(found, made, target, done))
        else:
            show.show_outline(found, made, target, done)
        return
    result = stages.export(
        source,
        plan_file,
        measured,
        target,
        plan=made,
        format=format,
        trust=trust_remote_code,
        force=force,
        resume=resume,
    )
    if json:
        print_json({"checkpoint": str(target), "bytes": result.nbytes, "tensors": result.tensors})
    flag = "" if format == "hf" or made.layout == "stock" else " --trust-remote-code"
    say(
        f"{format_size(result.loaded_bytes)} of weights in {result.tensors:,} tensors, "
        "loaded again and checked."
    )
    say(f'Try: mlx_lm.generate --model {shlex.quote(str(target))}{flag} --prompt "Hello"')
    say(f"Wrote {target}")


def _check_fresh(plan_file: Path, saliency: Path, plan: Plan) -> None:
    """A run that was calibrated again must be planned again."""
    from reap.artifacts.files import sha256
    from reap.errors import ReapError

    made_from = plan.provenance.inputs.get("saliency")
    if saliency.exists() and made_from not in (None, sha256(saliency)):
        raise ReapError(
            f"{plan_file} was not made from {saliency}.",
            "plan again with --force, or name the plan with --plan and --out",
        )
