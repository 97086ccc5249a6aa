"""reap report: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json, Run


def report(
    saliency: Annotated[
        Path | None, typer.Option(help="Default: the run's.", show_default=False)
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Default: the run's.", show_default=False)
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Default: the run's, if it has one.", show_default=False)
    ] = None,
    rival: Annotated[
        list[Path] | None,
        typer.Option(
            help="Evaluation of another plan to compare with; repeatable.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: the run's.", show_default=False)
    ] = None,
    run: Run = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a self-contained HTML report from the files of a run."""
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.report import write_report

    directory = RunDirectory.newest(run) if not (saliency and plan and out) else None
    if evaluation is None and directory is not None and directory.evaluation.exists():
        evaluation = directory.evaluation
    target = out or directory.report  # type: ignore[union-attr]
    write_report(
        target,
        saliency=saliency or directory.saliency,  # type: ignore[union-attr]
        plan=plan or directory.plan,  # type: ignore[union-attr]
        evaluation=evaluation,
        rivals=rival or (),
        force=force,
    )
    if json:
        print_json({"report": str(target)})
    say(f"Wrote {target}")
