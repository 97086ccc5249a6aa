"""reap calibrate: measure on text what the experts of a model do."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from reap.artifacts.plan import Rounding
from reap.cli.options import Documents, Force, Json, NewRun, SequenceLength, Texts, Tokens, Trust

if TYPE_CHECKING:
    from reap.artifacts import Saliency
    from reap.calibrate.estimate import Estimate


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory or Hugging Face id.")
    ],
    calibration: Texts = None,
    tokens: Tokens = None,
    sequence_length: SequenceLength = 512,
    documents: Documents = "split",
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens in one batch.")
    ] = 4096,
    probe_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Tokens on which drops and low bits are measured, in whole sequences of each "
            "domain, so a little more; 0: not at all.",
        ),
    ] = 2048,
    low: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help="Low-bit format to measure, e.g. 2bit or 3bit-g64; repeatable.",
        ),
    ] = ["2bit", "3bit"],  # noqa: B006
    low_rounding: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"How experts get into them: {', '.join(get_args(Rounding))}."
        ),
    ] = "weighted",
    sensitivity: Annotated[
        bool, typer.Option(help="Measure the KL divergence with one layer changed at a time.")
    ] = True,
    sensitivity_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of the probes, how many that is measured on; default: all, or as many as at "
            "most double the work.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Hidden states to hold in memory, e.g. 20GB, beside those on disk; default: all.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last finished layer of a run.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Try one layer, say what the run would take, and end."),
    ] = False,
    run: NewRun = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure on text what a model's experts do."""
    from reap.calibrate import CalibrationSettings
    from reap.cli import print_error, stages
    from reap.cli.rundir import RunDirectory
    from reap.models.ranks import join
    from reap.planning.size import parse_size

    ranks = join()
    with ranks.together(print_error):
        limit = None if memory is None else parse_size(memory)
        directory = RunDirectory.for_model(model, run)
        settings = CalibrationSettings(
            tokens=tokens,
            sequence_length=sequence_length,
            documents=documents,
            batch_tokens=batch_tokens,
            probe_tokens=probe_tokens,
            low_formats=tuple(map(stages.parse_format, low or ())),
            low_rounding=low_rounding,
            sensitivity=sensitivity,
            sensitivity_tokens=sensitivity_tokens,
        )
        texts = calibration or ()
        if dry_run and ranks.rank == 0:
            found = stages.estimate(
                model, texts, settings, trust=trust_remote_code, memory=limit, ranks=ranks.size
            )
            _print_estimate(found, json=json)
        if dry_run:
            return
        saliency = stages.calibrate(
            model,
            texts,
            settings,
            directory,
            trust=trust_remote_code,
            force=force,
            resume=resume,
            memory=limit,
            ranks=ranks,
        )
        if ranks.rank == 0:
            _print_summary(saliency, directory.saliency, json=json)


def _print_estimate(found: Estimate, *, json: bool) -> None:
    from reap.cli.output import print_json, say
    from reap.planning.size import format_size

    if json:
        print_json(asdict(found))
    say(
        f"{found.layers} layers, {found.all_tokens:,} tokens and {found.all_probe_tokens:,} to "
        f"measure on (whole sequences), sensitivity on {found.all_sensitivity_tokens:,}"
    )
    if found.ranks > 1:
        say(
            f"Shared by {found.ranks} ranks, each on a machine like this one: each reads the whole "
            f"model and takes some of the batches. That with most, {found.tokens:,} tokens and "
            f"{found.probe_tokens:,} to measure on, takes:"
        )
    say(
        f"to read: {format_size(found.read_bytes)} at {format_size(round(found.read_rate))}"
        f"/s as measured (more than the disk gives if the files are cached)\n"
        f"peak memory: about {format_size(found.peak_bytes)}\n"
        f"scratch on disk: about {format_size(found.scratch_bytes)}\n"
        f"time: about {timedelta(seconds=round(found.seconds))}, from one layer on a few tokens"
    )


def _print_summary(saliency: Saliency, file: Path, *, json: bool) -> None:
    from reap.cli import show
    from reap.cli.output import print_json, say

    figures = show.saliency_figures(saliency)
    if json:
        print_json({"saliency": str(file)} | figures)
    say(
        f"{sum(figures['domains'].values()):,} tokens; {figures['never_routed']} of "
        f"{saliency.score().size:,} experts were never routed."
    )
    say(f"Wrote {file}")
