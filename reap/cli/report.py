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
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="HTML file; default: the run's.", show_default=False),
    ] = None,
    run: Run = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.cli.stages import check_output
    from reap.report import write_report

    directory = RunDirectory.find(run, plan, saliency, evaluation)
    target = out or directory.report
    plan_file = plan or directory.plan
    check_output(target, force)
    if evaluation is None and directory.evaluation.exists():
        evaluation = directory.evaluation
        _check_belongs(evaluation, plan_file)
    write_report(
        target,
        saliency=saliency or directory.saliency,
        plan=plan_file,
        evaluation=evaluation,
        rivals=rival or (),
        force=force,
    )
    if json:
        print_json({"report": str(target)})
    say(f"Wrote {target}")


def _check_belongs(evaluation: Path, plan: Path) -> None:
    """An evaluation that was not asked for must not be taken for one of this plan."""
    from reap.artifacts import Evaluation, Plan
    from reap.artifacts.files import sha256
    from reap.errors import ArtifactError

    Plan.load(plan)
    measured = Evaluation.load(evaluation).provenance.inputs.get("plan")
    if measured is not None and measured != sha256(plan):
        raise ArtifactError(
            f"{evaluation} is of a checkpoint with another plan than {plan}.",
            "export and evaluate this plan with --force, or name the file with --evaluation",
        )
