"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Run directory; default: the one of the files given, else the newest below runs/.",
        show_default=False,
    ),
]
NewRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Run directory; default: runs/ and the model's name.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
Redo = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Do again what does not fit the recipe any more, and all after it; if all fits, all.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model or tokenizer."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=1,
        help="Tokens to use, an equal share of each domain; default: all.",
        show_default=False,
    ),
]
SequenceLength = Annotated[
    int,
    typer.Option("--sequence-length", metavar="N", min=2, help="Longest sequence, in tokens."),
]
