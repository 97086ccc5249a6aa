"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
        help="Tokens to use, shared by the domains' weights; default: all.",
        show_default=False,
    ),
]
SequenceLength = Annotated[
    int,
    typer.Option("--sequence-length", metavar="N", min=2, help="Longest sequence, in tokens."),
]
Documents = Annotated[
    Literal["split", "truncate"],
    typer.Option(
        metavar="split|truncate",
        help="A document longer than a sequence gives several, or only its first.",
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="[DOMAIN:]SOURCE[=WEIGHT or =NUMBERtok]; a source is a shipped text set, a "
        ".txt/.jsonl/.parquet/.csv file, a dataset directory or ORG/NAME:SPLIT:COLUMN on the hub "
        "(see docs/text.md); repeatable; default: all shipped sets.",
        show_default=False,
    ),
]
