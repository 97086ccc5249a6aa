"""What commands print: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from reap.progress import Progress as Callback

console = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """A line on stderr, as it is."""
    console.print(message, markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stderr; the first column is text, the others are numbers."""
    shown = Table(title=title or None, title_justify="left", title_style="bold", box=None)
    for position, name in enumerate(columns):
        shown.add_column(name, justify="right" if position else "left", no_wrap=position > 0)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "")


@contextmanager
def progress_bar(unit: str) -> Iterator[Callback]:
    """A progress callback: a bar on a terminal, a line per step elsewhere."""
    if not console.is_terminal:
        last = ""

        def plain(doing: str, done: int, total: int) -> None:
            nonlocal last
            if doing != last:
                say(doing)
            last = doing

        yield plain
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        _Speed(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None, unit=unit)

        def shown(doing: str, done: int, total: int) -> None:
            bars.update(task, description=doing, completed=done, total=total)

        yield shown
