"""Runs side by side: which are repetitions of one setting, and in what settings differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from train_utils.errors import TrainError
from train_utils.report.best import Best
from train_utils.report.run_files import Run, read_files
from train_utils.run.same_training import WITHOUT_EFFECT, is_covered
from train_utils.scores.detections import GroundTruth

SEED = "train.seed"
# Without effect on the steps of a training, but not on its result or its figures.
COUNTS = {"evaluate", "model.cfg", "model.weights", "model.fresh_heads", "train.patience"}
IGNORED = tuple(option for option in WITHOUT_EFFECT if option not in COUNTS)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    letter: str
    runs: list[Run]
    best: list[Best]  # of each run

    def figures(self, name: str) -> list[float]:
        """One of the COCO figures of each run's best epoch."""
        return [best.scores.figures[name] for best in self.best]

    def mean(self, name: str = "AP") -> float:
        """The mean of a figure over the runs."""
        return fmean(self.figures(name))

    def spread(self, name: str = "AP") -> float | None:
        """The standard deviation of a figure over the runs (n - 1); None for a single run."""
        return stdev(self.figures(name)) if len(self.runs) > 1 else None


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """The runs of these folders by setting, in the order in which each setting comes first.

    Raises TrainError if a folder is no run, comes twice, has no evaluation or another validation
    set than the first one.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise TrainError("runs= names a folder twice. fix: name each run once")
    runs = [read_files(folder) for folder in folders]
    best = [run.best() for run in runs]
    for run, one in zip(runs, best, strict=True):
        if (why := difference(best[0].truth, one.truth)) is not None:
            raise TrainError(
                f"{run.folder} was scored on another validation set than {runs[0].folder} ({why}). "
                "fix: score it on the same: python eval.py ckpt=... data=... out=<its folder>"
            )
        if one.scores.figures["AP"] < 0:
            raise TrainError(f"{run.folder} has no AP: no validation image has a box. fix: leave it out")
    settings: list[tuple[dict[str, Any], Group]] = []
    for run, one in zip(runs, best, strict=True):
        setting = setting_of(run)
        group = next((group for known, group in settings if known == setting), None)
        if group is None:
            group = Group(chr(ord("A") + len(settings)) if len(settings) < 26 else f"G{len(settings) + 1}", [], [])
            settings.append((setting, group))
        group.runs.append(run)
        group.best.append(one)
    return [group for _, group in settings]


def setting_of(run: Run) -> dict[str, Any]:
    """The options that make a result, and what the training set holds."""
    options = {key: value for key, value in run.options.items() if key != SEED and not is_covered(key, IGNORED)}
    return options | {"(training set)": run.data.get("train", {}).get("figures")}


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """Each option in which settings differ, with the value of each; "-" where one lacks it."""
    settings = [setting_of(group.runs[0]) for group in groups]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    rows = [(key, [setting.get(key, "-") for setting in settings]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def difference(first: GroundTruth, other: GroundTruth) -> str | None:
    """Why two validation sets are not the same; None if they are, to the last box."""
    if list(first.names) != list(other.names):
        return f"{len(other.names)} classes, not the same {len(first.names)}"
    counts = [(len(truth.image_ids), len(truth.classes)) for truth in (first, other)]
    if counts[0] != counts[1]:
        return "{} images with {} boxes, not {} with {}".format(*counts[1], *counts[0])
    for field in fields(GroundTruth):
        if field.name != "names" and not np.array_equal(getattr(first, field.name), getattr(other, field.name)):
            return f"other {field.name}"
    return None
