"""What a run folder holds, read for a report or a comparison."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from train_utils.errors import TrainError
from train_utils.run.options import flat
from train_utils.scores.coco_eval import ABSENT

Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """The files of a run. Rows are by epoch, with empty cells left out."""

    folder: Path
    options: dict[str, Any]  # of config.yaml, by full key, as ``optim.lr``
    epochs: list[Row]  # of metrics.csv
    times: list[Row]  # of times.csv

    @property
    def best(self) -> Row | None:
        """The first epoch with the best AP; None if none was evaluated."""
        scored = [row for row in self.epochs if row.get("AP", ABSENT) != ABSENT]
        return max(scored, key=lambda row: row["AP"], default=None)


def read_files(folder: Path) -> Run:
    """Read a run folder, also of a run that goes on. Raises TrainError if it is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise TrainError(f"{folder} is not the folder of a run (no config.yaml). fix: runs/<name>/<date_time>")
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("config.yaml has aliases, and a few of them are billions of values")
        options = flat(yaml.safe_load(text))
        return Run(folder, options, _table(folder / "metrics.csv"), _table(folder / "times.csv"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainError(f"cannot read {folder} ({error}). fix: restore its tables and config.yaml") from error


def _table(path: Path) -> list[Row]:
    """The rows of a table of numbers; [] if there is no file. A last line cut short is left out."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{key: float(cell) for key, cell in row.items() if cell} for row in rows]
