"""The command line: one small file per command, and the one place where errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from reap.errors import ReapError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `reap` with `argv` (default: the process's arguments); the exit code.

    0: done; 1: an error the user can act on, one line and a hint on stderr; 2: wrong usage.
    """
    from reap.cli.app import app

    try:
        app(args=None if argv is None else list(argv), prog_name="reap")
    except ReapError as error:
        sys.stdout.flush()
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our stdout went away (`reap … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(bool(done.code))
    return 0


def run() -> None:
    """Entry point of the `reap` script."""
    sys.exit(main())
