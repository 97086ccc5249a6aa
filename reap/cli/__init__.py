"""The command line: one small file per command, and the one place where errors end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextvars import ContextVar

from reap.errors import ReapError

_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `reap` with `argv` (default: the process's arguments); the exit code.

    0: done; 1: an error the user can act on, one line and a hint on stderr; 2: wrong usage;
    130: interrupted by Ctrl-C.
    """
    given = tuple(sys.argv[1:] if argv is None else argv)
    token = _arguments.set(given)
    code: int | str | None = 0
    try:
        from reap.cli.app import app

        app(args=list(given), prog_name="reap")
    except ReapError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as done:
        # typer turns Ctrl-C and a reader that went away (`reap … | head`) into exits, too.
        code = done.code
    finally:
        _arguments.reset(token)
    if code == INTERRUPTED:
        print("\nerror: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else int(bool(code))


def print_error(error: ReapError) -> None:
    """One line on stderr, and how to put it right."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)
    sys.stderr.flush()


def command_line(without: Sequence[str] = ()) -> str:
    """The command as it was typed, for the provenance, less the flags `without`."""
    return shlex.join(["reap", *(word for word in _arguments.get() if word not in without)])


def run() -> None:
    """Entry point of the `reap` script."""
    sys.exit(main())
