"""A logger: a line of JSON for each group of metrics, in ``lines.jsonl`` of the run folder.

``python train.py plugins=[lines_logger.py]``
"""

import json
from collections.abc import Mapping
from pathlib import Path

from plugins import LOGGERS
from train_utils.report.loggers import LoggedRun


class LinesLogger:
    """Called in a thread of its own; an exception is a warning and does not end the training."""

    def __init__(self, run: LoggedRun) -> None:
        self._file = (run.folder / "lines.jsonl").open("a", encoding="utf-8")

    def scalars(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a group after ``step`` steps."""
        self._file.write(json.dumps({"step": step, "group": group, **metrics}) + "\n")

    def picture(self, step: int, name: str, path: Path) -> None:
        """Pictures are in the run folder anyway."""

    def close(self, complete: bool) -> None:
        """Write out what is left."""
        self._file.close()


LOGGERS["lines"] = LinesLogger
