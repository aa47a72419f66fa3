"""Progress bars for long work on files, shown while it lasts and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")


@contextmanager
def bar(what: str, total: int = 0) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr: call its function with units done and in total, 0 if that is unknown."""
    hidden = not (sys.stdout.isatty() and sys.stderr.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as live:
        task = live.add_task(what, total=total or None)
        yield lambda done, of: live.update(task, completed=done, total=of or None)


def counted(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The ``total`` items, with a bar that counts those already handled."""
    with bar(what, total) as report:
        for done, item in enumerate(items, start=1):
            yield item
            report(done, total)
