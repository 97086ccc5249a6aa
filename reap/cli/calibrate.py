"""reap calibrate: measure on text what the experts of a model do."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from reap.artifacts.plan import Rounding
from reap.cli.options import Force, Json, NewRun, SequenceLength, Tokens, Trust


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory or Hugging Face id.")
    ],
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A shipped text set or a .jsonl/.txt file; repeatable; default: all sets.",
            show_default=False,
        ),
    ] = None,
    tokens: Tokens = None,
    sequence_length: SequenceLength = 512,
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens in one batch.")
    ] = 4096,
    probe_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Tokens on which drops and low bits are measured; 0: not at all.",
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
    run: NewRun = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure on text what a model's experts do."""
    from reap.calibrate import CalibrationSettings
    from reap.cli import show, stages
    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory

    directory = RunDirectory.for_model(model, run)
    settings = CalibrationSettings(
        tokens=tokens,
        sequence_length=sequence_length,
        batch_tokens=batch_tokens,
        probe_tokens=probe_tokens,
        low_formats=tuple(map(stages.parse_format, low or ())),
        low_rounding=low_rounding,
        sensitivity=sensitivity,
    )
    saliency = stages.calibrate(
        model, calibration or (), settings, directory, trust=trust_remote_code, force=force
    )
    figures = show.saliency_figures(saliency)
    if json:
        print_json({"saliency": str(directory.saliency)} | figures)
    say(
        f"{sum(figures['domains'].values()):,} tokens; {figures['never_routed']} of "
        f"{saliency.score().size:,} experts were never routed."
    )
    say(f"Wrote {directory.saliency}")
