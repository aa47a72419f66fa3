"""Progress bars for long work on files, shown while it lasts and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class _Screen(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor on: a process that is killed could not bring it back."""
        return False


@contextmanager
def bar(what: str, total: int = 0, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr: call its function with units done and in total, 0 if that is unknown."""
    screen = _Screen(file=sys.stderr)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    redirect = sys.stdout.isatty()  # what is printed into a file must get there
    shown = screen.is_terminal and not screen.is_dumb_terminal and sys.stderr.isatty()
    with Progress(*columns, console=screen, transient=True, redirect_stdout=redirect, disable=not shown) as live:
        task = live.add_task(what, total=total or None)

        def report(done: int, of: int) -> None:
            live.update(task, completed=done, total=of or None)

        yield report


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a bar that counts those already handled."""
    with bar(what, len(items)) as report:
        for done, item in enumerate(items, start=1):
            yield item
            report(done, len(items))
