"""``steps.csv``: the losses each few steps. It is always written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from train_utils.loggers.interface import Cell, LoggedRun
from train_utils.run.log import MetricsCsv


class CsvLogger:
    """Writes the group ``train``; epochs, pictures and tables lie in the run folder anyway."""

    def __init__(self, run: LoggedRun, columns: Sequence[str]) -> None:
        """Go on in the table after ``run.step``. Raises TrainError if it is not writable."""
        self._table = MetricsCsv(run.folder / "steps.csv", ("step", *columns), True, run.step, "step")

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Append a row."""
        if group == "train":
            self._table.write({"step": step, **figures})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Do nothing."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Do nothing."""

    def close(self, complete: bool) -> None:
        """Do nothing: each row is written at once."""
