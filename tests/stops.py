"""A run that ends when its progress says what it is asked to stop at, as if it had been killed."""

from __future__ import annotations

from collections.abc import Callable


class Stopped(Exception):
    pass


def stop_at(doing: str) -> Callable[[str, int, int], None]:
    def progress(now: str, done: int, total: int) -> None:
        if now == doing:
            raise Stopped

    return progress
