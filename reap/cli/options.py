"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    Path | None,
    typer.Option("--run", help="Run directory; default: the newest below runs/.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model or tokenizer."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="Tokens to use, an equal share of each domain; default: all.",
        show_default=False,
    ),
]
SequenceLength = Annotated[
    int, typer.Option("--sequence-length", min=2, help="Longest sequence, in tokens.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Evaluation text: a shipped set or a .jsonl/.txt file; repeatable. Default: all sets.",
        show_default=False,
    ),
]
