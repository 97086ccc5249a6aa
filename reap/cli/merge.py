"""reap merge: add up calibrations of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Saliency files of the same model.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Add up calibrations of one model on different texts."""
    from reap.cli import show, stages
    from reap.cli.output import print_json, say

    total = stages.merge(files, out, force=force)
    figures = show.saliency_figures(total)
    if json:
        print_json({"saliency": str(out)} | figures)
    tokens = sum(figures["domains"].values())
    say(f"{len(files)} files, {tokens:,} tokens, domains {', '.join(total.domains)}.")
    if len(files) > 1 and total.measurement is not None:
        say(
            f"Drop curves and low-bit errors cannot be added up: those of the file with most "
            f"probes are kept ({total.measurement.tokens.max():,} tokens)."
        )
    say(f"Wrote {out}")
