"""How stages tell what they are doing; the command line decides how to show it."""

from typing import Protocol


class Progress(Protocol):
    """Called often: `doing` in words, and how much of `total` is done, in tokens or steps."""

    def __call__(self, doing: str, done: int, total: int) -> None: ...


def silent(doing: str, done: int, total: int) -> None:
    """The callback of nobody who watches."""
