"""What a logger takes, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Cell = str | float


@dataclass(frozen=True)
class LoggedRun:
    """What a logger knows of the run when it starts."""

    folder: Path
    run_id: str  # the same each time the run is resumed
    step: int  # steps done, above 0 if the run is resumed; later ones of an earlier start are void
    options: dict[str, Any]  # nested dictionaries of numbers and strings


class Logger(Protocol):
    """A place for the figures of one run; any method may raise any exception.

    A logger is made, called and closed in one thread of its own.
    """

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Take the figures of a group, such as ``train``, after ``step`` optimiser steps."""
        ...

    def picture(self, step: int, name: str, path: Path) -> None:
        """Take the PNG or JPEG in ``path``, which does not change any more."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Take a table; each row has a cell for each column."""
        ...

    def close(self, complete: bool) -> None:
        """Write out what is left; ``complete`` unless the run stopped or failed before its end."""
        ...
