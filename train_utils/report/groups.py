"""Runs side by side: which are repetitions of one setting, and in what settings differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from train_utils.errors import TrainError
from train_utils.report.best import Best, read_best
from train_utils.report.run_files import Run, read_files
from train_utils.run.options import MAY_CHANGE, is_covered
from train_utils.scores.detections import GroundTruth

SEED = "train.seed"
COUNTS = {"data.train", "data.val", "evaluate.every", "train.patience"}  # what may change in a run, but counts here
IGNORED = (SEED, "name", *(option for option in MAY_CHANGE if option not in COUNTS))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    letter: str
    setting: dict[str, Any]
    runs: list[Run]
    best: list[Best]  # of each run

    def figures(self, name: str = "AP") -> list[float]:
        """One of the COCO figures of each run's best epoch."""
        return [best.scores.figures[name] for best in self.best]

    def mean(self, name: str = "AP") -> float:
        """The mean of a figure over the runs."""
        return fmean(self.figures(name))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        return stdev(self.figures()) if len(self.runs) > 1 else None


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """The runs of these folders by setting, in the order in which each setting comes first.

    Raises TrainError if a folder is no run, comes twice, has no evaluation or another validation
    set than the first one.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise TrainError("runs= names a folder twice. fix: name each run once")
    groups: dict[str, Group] = {}
    truth: GroundTruth | None = None
    for run in map(read_files, folders):
        best = read_best(run.folder)
        truth = truth or best.truth
        if not same_labels(truth, best.truth):
            raise TrainError(
                f"{run.folder} was scored on another validation set ({_size(best.truth)}) than {folders[0]} "
                f"({_size(truth)}). fix: score it on the same: python eval.py ckpt=... data=... out=<its folder>"
            )
        if best.scores.figures["AP"] < 0:
            raise TrainError(f"{run.folder} has no AP: no validation image has a box. fix: leave it out")
        setting = setting_of(run)
        letter = chr(ord("A") + len(groups))
        group = groups.setdefault(json.dumps(setting, sort_keys=True), Group(letter, setting, [], []))
        group.runs.append(run)
        group.best.append(best)
    return list(groups.values())


def setting_of(run: Run) -> dict[str, Any]:
    """The options that make a result."""
    return {key: value for key, value in run.options.items() if not is_covered(key, IGNORED)}


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """Each option in which settings differ, with the value of each; "-" where one lacks it."""
    keys = dict.fromkeys(key for group in groups for key in group.setting)
    rows = [(key, [group.setting.get(key, "-") for group in groups]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def same_labels(first: GroundTruth, other: GroundTruth) -> bool:
    """Whether two validation sets are the same to the last box."""
    pairs = zip(vars(first).values(), vars(other).values(), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def _size(truth: GroundTruth) -> str:
    return f"{len(truth.image_ids)} images with {len(truth.classes)} boxes of {len(truth.names)} classes"
