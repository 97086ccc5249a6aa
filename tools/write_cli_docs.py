"""Writes docs/cli.md from the commands' own --help. tests/test_docs.py fails when it is stale."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from typer.main import get_command

from reap.cli import main
from reap.cli.app import app

DOCS = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """\
# Command line

What `reap --help` and `reap COMMAND --help` print; written by `make docs`.

Progress and messages go to stderr, `--json` and the tables of `reap inspect` to stdout. Exit codes:
0 done, 1 an error that you can act on (one line and a hint on stderr), 2 wrong usage, 130
interrupted.
"""


def commands() -> list[str]:
    """Names of the commands, in the order of `reap --help`."""
    return list(getattr(get_command(app), "commands"))  # noqa: B009


def help_text(*command: str) -> str:
    """What `reap COMMAND --help` prints on a plain terminal of 80 columns."""
    out = io.StringIO()
    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    with mock.patch.dict(os.environ, plain), redirect_stdout(out):
        code = main([*command, "--help"])
    assert code == 0, f"reap {' '.join(command)} --help gives {code}"
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").split("\n"))


def document() -> str:
    """The whole page."""
    sections = [HEAD, "## reap\n", _block(help_text())]
    for name in commands():
        sections += [f"## reap {name}\n", _block(help_text(name))]
    return "\n".join(sections)


def _block(text: str) -> str:
    return f"```\n{text}\n```\n"


if __name__ == "__main__":
    DOCS.write_text(document(), encoding="utf-8")
    print(f"Wrote {DOCS}")
