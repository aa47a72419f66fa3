"""Lines for a person: on a terminal wrapped at words and clear of a live line, elsewhere plain.

In a notebook the live line is above the lines of its cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

NOTEBOOK_COLUMNS = 100
WIDE = 10_000  # columns of a file or pipe: nothing is wrapped there


class _Screen(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor on: a process that is killed could not bring it back."""
        return False


SCREEN = _Screen(stderr=True, markup=False, emoji=False, highlight=False)


def is_live() -> bool:
    """Whether stdout and stderr are a terminal where a line can be rewritten."""
    return sys.stdout.isatty() and sys.stderr.isatty() and SCREEN.is_terminal and not SCREEN.is_dumb_terminal


def cell_line() -> Callable[[str], None] | None:
    """What replaces the text of the line in the running cell's output; None outside a notebook."""
    shell = _notebook()
    return _line_of(shell.execution_count) if shell is not None else None


@lru_cache(maxsize=1)  # a cell has one line for all that it runs
def _line_of(cell: int) -> Callable[[str], None]:
    from IPython.display import display

    shown = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: shown.update({"text/plain": text}, raw=True)


def columns() -> int | None:
    """How many columns a table may have; None in files and pipes, where any number fits."""
    return SCREEN.width if is_live() else NOTEBOOK_COLUMNS if _notebook() is not None else None


def _notebook() -> Any:
    """The shell of the notebook that this process serves; None outside of one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if hasattr(shell, "kernel") else None


def say(text: str, style: str = "") -> None:
    """Print lines. On a terminal they are wrapped at words, unless they start with a space.

    Those are rows of a table and commands, which a break would spoil.
    """
    if not is_live():
        print(text, flush=True)
        return
    wrap = TextWrapper(SCREEN.width, break_long_words=False, break_on_hyphens=False).fill
    lines = [line if line.startswith(" ") else wrap(line) for line in text.split("\n")]
    SCREEN.print(Text("\n".join(lines), style), soft_wrap=True)


def say_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; its cells are wrapped on a narrow terminal only."""
    table = Table(*titles, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    Console(markup=False, emoji=False, highlight=False, width=None if is_live() else WIDE).print(table)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
