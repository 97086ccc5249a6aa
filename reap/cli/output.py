"""What commands print: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
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

console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


def say(message: str) -> None:
    """A line on stderr, as it is."""
    console.print(message, markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout; what is not finite becomes null, as JSON knows no NaN."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stderr; the first column is text, the others are numbers."""
    if title:
        # Not the table's own title, which wraps to the table's width.
        console.print(Text(title, style="bold"), soft_wrap=True)
    shown = Table(box=None)
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
