"""What a run folder holds, read for a report or a comparison."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from train_utils.errors import TrainError
from train_utils.report.about import read_about
from train_utils.report.best import Best, read_best
from train_utils.scores.coco_eval import ABSENT, FIGURES


@dataclass(frozen=True)
class Run:
    """The files of a run. Rows are by epoch, with empty cells left out."""

    folder: Path
    config: dict[str, Any]
    options: dict[str, Any]  # the same by full key, as ``optim.lr``
    epochs: list[dict[str, float]]  # of metrics.csv
    times: list[dict[str, float]]  # of times.csv
    starts: list[dict[str, Any]]
    data: dict[str, dict[str, Any]]

    @property
    def best_row(self) -> dict[str, float] | None:
        """The first epoch with the best AP; None if none was evaluated."""
        scored = [row for row in self.epochs if row.get("AP", ABSENT) != ABSENT]
        return max(scored, key=lambda row: row["AP"]) if scored else None

    def best(self) -> Best:
        """Labels and detections of the best epoch. Raises TrainError if there are none."""
        return read_best(self.folder)


def read_files(folder: Path) -> Run:
    """Read a run folder, also of a run that goes on. Raises TrainError if it is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise TrainError(f"{folder} is not the folder of a run (no config.yaml). fix: runs/<name>/<date_time>")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        about = read_about(folder)
        epochs, times = read_table(folder / "metrics.csv"), read_table(folder / "times.csv")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainError(f"cannot read {folder} ({error}). fix: restore its config.yaml and tables") from error
    return Run(folder, config, flat(config), epochs, times, about["starts"], about["data"])


def read_table(path: Path) -> list[dict[str, float]]:
    """The rows of a table of numbers; [] if there is no file. A last line cut short is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{key: float(cell) for key, cell in row.items() if cell} for row in rows]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by full key; an empty section is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return found


def figures_of(row: Mapping[str, float]) -> list[float]:
    """The 12 COCO figures of an epoch's row."""
    return [row.get(name, ABSENT) for name in FIGURES]
