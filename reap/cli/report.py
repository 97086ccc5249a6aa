"""reap report: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json, Run


def report(
    saliency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Saliency file; default: the run's.", show_default=False),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan file; default: the run's.", show_default=False),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Evaluation file; default: the run's, if it has one.",
            show_default=False,
        ),
    ] = None,
    rival: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Evaluation of another plan to compare with; repeatable.",
            show_default=False,
        ),
    ] = None,
    rival_plan: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Plan of a --rival's checkpoint, to show what it predicted; repeatable.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="HTML file; default: the run's.", show_default=False),
    ] = None,
    run: Run = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from reap.artifacts import Plan
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.cli.stages import check_output
    from reap.errors import ReapError
    from reap.report import write_report

    if rival_plan and not rival:
        raise ReapError(
            "--rival-plan has no use without --rival.", "add the evaluation of its checkpoint"
        )
    directory = RunDirectory.find(run, plan, saliency, evaluation)
    plan_file = plan or directory.plan
    Plan.load(plan_file)
    directory.require_out(out, plan, directory.plan)
    target = out or directory.report
    # A run's own report is derived from its files, so it is renewed without being asked.
    force = force or out is None
    check_output(target, force)
    if evaluation is None and directory.evaluation.exists():
        evaluation = directory.evaluation
    data = write_report(
        target,
        saliency=saliency or directory.saliency,
        plan=plan_file,
        evaluation=evaluation,
        rivals=rival or (),
        rival_plans=rival_plan or (),
        force=force,
    )
    if json:
        print_json({"report": str(target)})
    for warning in data.warnings:
        say(f"warning: {warning}")
    say(f"Wrote {target}")
