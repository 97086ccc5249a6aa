"""reap calibrate: measure on text what the experts of a model do."""

from __future__ import annotations

from typing import Annotated

import typer

from reap.cli.options import Force, Json, Run, SequenceLength, Tokens, Trust


def calibrate(
    model: Annotated[str, typer.Argument(help="Model directory or Hugging Face id.")],
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="A shipped text set or a .jsonl/.txt file; repeatable. Default: all sets.",
            show_default=False,
        ),
    ] = None,
    tokens: Tokens = None,
    sequence_length: SequenceLength = 512,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one batch.")] = 4096,
    probe_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens on which drops and low bits are measured; 0: not at all."),
    ] = 2048,
    low: Annotated[
        list[str] | None,
        typer.Option(
            help="Low-bit format to measure, e.g. 2bit or 3bit-g64; repeatable. "
            "Default: 2bit and 3bit.",
            show_default=False,
        ),
    ] = None,
    low_rounding: Annotated[
        str, typer.Option(help="How experts get into them: plain, search, weighted, feedback.")
    ] = "weighted",
    sensitivity: Annotated[
        bool, typer.Option(help="Measure the KL divergence with one layer changed at a time.")
    ] = True,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure on text what the experts of MODEL do: writes saliency.safetensors."""
    from reap.artifacts.files import refuse_existing
    from reap.calibrate import CalibrationSettings
    from reap.calibrate import calibrate as run_calibration
    from reap.cli.output import print_json, progress_bar, say
    from reap.cli.plan import parse_format
    from reap.cli.rundir import RunDirectory, command_line
    from reap.models.source import open_source
    from reap.models.text import load_texts

    directory = RunDirectory.for_model(model, run)
    refuse_existing(directory.saliency, force)
    texts = load_texts(calibration or (), split="calibration")
    formats = tuple(parse_format(text) for text in low or ("2bit", "3bit"))
    settings = CalibrationSettings(
        tokens=tokens,
        sequence_length=sequence_length,
        batch_tokens=batch_tokens,
        probe_tokens=probe_tokens,
        low_formats=formats,
        low_rounding=low_rounding,
        sensitivity=sensitivity,
    )
    source = open_source(model, trust_remote_code=trust_remote_code)
    with progress_bar("tok") as progress:
        saliency = run_calibration(
            source,
            texts,
            settings,
            command=command_line(),
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    saliency.save(directory.saliency, force=force)
    directory.start(model)
    unrouted = int((saliency.count.sum(axis=(0, 1)) == 0).sum())
    experts = saliency.count.shape[2] * saliency.count.shape[3]
    used = sum(corpus.tokens for corpus in saliency.provenance.corpora)
    if json:
        print_json(
            {"saliency": str(directory.saliency), "tokens": used, "never_routed": unrouted}
        )
    say(f"{used:,} tokens; {unrouted} of {experts:,} experts were never routed.")
    say(f"Wrote {directory.saliency}")
