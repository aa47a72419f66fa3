"""A logger: a line of JSON for each figure, in ``lines.jsonl`` of the run folder.

``python train.py plugins=[lines_logger.py]``
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plugins import logger
from train_utils.loggers.interface import Cell, LoggedRun


@dataclass
class Where:
    """Where the lines go."""

    file: str = "lines.jsonl"  # in the run folder


@logger("lines_log", Where)
class LinesLogger:
    """Called in a thread of its own; an exception is a warning and does not end the training."""

    def __init__(self, run: LoggedRun, options: Where) -> None:
        self._file = (run.folder / options.file).open("a", encoding="utf-8")

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Take the figures of a group after ``step`` steps."""
        self._file.write(json.dumps({"step": step, "group": group, **figures}) + "\n")

    def picture(self, step: int, name: str, path: Path) -> None:
        """Pictures are in the run folder anyway."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Tables are not kept."""

    def close(self, complete: bool) -> None:
        """Write out what is left."""
        self._file.close()
