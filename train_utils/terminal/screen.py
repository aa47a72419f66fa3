"""Lines for a person: on a terminal wrapped at words and clear of a live line, elsewhere plain."""

from __future__ import annotations

import sys
from textwrap import TextWrapper

from rich.console import Console
from rich.text import Text


class _Screen(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor on: a process that is killed could not bring it back."""
        return False


SCREEN = _Screen(markup=False, emoji=False, highlight=False)  # stdout, also where a test replaces it


def is_live() -> bool:
    """Whether stdout is a terminal where a line can be rewritten."""
    return sys.stdout.isatty() and SCREEN.is_terminal and not SCREEN.is_dumb_terminal


def say(text: str | Text) -> None:
    """Print lines. On a terminal they are wrapped at words, unless they start with a space.

    Those are rows of a table and commands, which a break would spoil.
    """
    if not is_live():
        print(str(text), flush=True)
        return
    if isinstance(text, str):
        wrap = TextWrapper(SCREEN.width, break_long_words=False, break_on_hyphens=False).fill
        text = Text("\n".join(line if line.startswith(" ") else wrap(line) for line in text.split("\n")))
    SCREEN.print(text, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
