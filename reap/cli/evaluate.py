"""reap evaluate: measure what a checkpoint lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Documents, Force, Json, Run, SequenceLength, Texts, Tokens, Trust


def evaluate(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint directory or hub id; default: the run's.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model to compare with; default: the run's source.",
            show_default=False,
        ),
    ] = None,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="Perplexity only.")] = False,
    text: Texts = None,
    tokens: Tokens = None,
    sequence_length: SequenceLength = 512,
    documents: Documents = "split",
    label: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name in reports; default: the checkpoint's.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Evaluation file; default: the run's.", show_default=False
        ),
    ] = None,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure perplexity and KL to the source model."""
    from reap.cli import show, stages
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.errors import ReapError
    from reap.evaluate import EvaluationSettings

    given = Path(checkpoint) if checkpoint else None
    directory = RunDirectory.find(run, given)
    directory.require_out(out, given, directory.checkpoint)
    if checkpoint is None and not directory.checkpoint.exists():
        raise ReapError(
            f"{directory.path} has no checkpoint yet.",
            "run `reap export` first, or name one with --checkpoint",
        )
    target = out or directory.evaluation
    base = None if no_reference else reference or directory.model
    result = stages.evaluate(
        checkpoint or str(directory.checkpoint),
        base,
        text or (),
        EvaluationSettings(tokens=tokens, sequence_length=sequence_length, documents=documents),
        target,
        label=label or "",
        trust=trust_remote_code,
        force=force,
    )
    if json:
        print_json({"evaluation": str(target)} | show.evaluation_figures(result))
    show.show_evaluation(result)
    say(f"Wrote {target}")
