"""Runs side by side: repetitions of a setting, where settings differ, whether one is better."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import hotcoco
import numpy as np

from train_utils.errors import TrainError
from train_utils.report.best import Best, read_best
from train_utils.report.run_files import Run, read_files
from train_utils.run.options import MAY_CHANGE, is_covered
from train_utils.scores.coco_backends import columns, hotcoco_evaluation
from train_utils.terminal import Progress

CONFIDENCE = 0.95  # of the intervals
DRAWS = 200_000  # for the quantiles of a sum of errors
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
    truth = None
    for run in map(read_files, folders):
        best = read_best(run.folder)
        truth = truth or best.truth
        if not all(map(np.array_equal, vars(truth).values(), vars(best.truth).values())):
            raise TrainError(
                f"{run.folder} was scored on another validation set than {folders[0]}. fix: score it on the same: "
                "python eval.py ckpt=... data=... out=<its folder>"
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


@dataclass(frozen=True)
class Gain:
    """The difference of two settings in AP, the second minus the first, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    @property
    def is_real(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low > 0 or self.high < 0

    def sentence(self) -> str:
        """The verdict in plain words."""
        word, verdict = "gain" if self.value >= 0 else "loss", "is real" if self.is_real else "is unproven"
        interval = f"{CONFIDENCE:.0%} interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def gain(first: Group, second: Group, resamples: int, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    The error over images is that of a bootstrap, which draws the same images for all runs. hotcoco
    1.3 scores a drawn image once, however often it was drawn. That is a delete-d jackknife, whose
    errors are scaled by the root of the shares kept and left out (Shao and Wu 1989). Where a
    setting has several runs, Student's t with the pooled variance of AP adds the error over seeds.
    """
    value, counts = second.mean() - first.mean(), (len(first.runs), len(second.runs))
    deltas = np.zeros(resamples)
    title = f"{second.letter} against {first.letter}"
    with Progress(max(counts) * resamples, title, enabled=True, unit="draw") as progress:
        for number in range(max(counts)):
            before, after = (group.best[number % len(group.best)] for group in (first, second))
            for draw, delta in enumerate(bootstrap(before, after, resamples, seed)):
                deltas[draw] += delta / max(counts)
                progress.advance(1)
    generator, images = np.random.default_rng(seed), len(first.best[0].truth.image_ids)
    left_out = (1 - 1 / images) ** images or 1.0  # share of the images; of one image none
    values = value + ((1 - left_out) / left_out) ** 0.5 * generator.choice(deltas - deltas.mean(), DRAWS)
    if freedom := sum(counts) - 2:
        squares = sum(np.var(group.figures()) * len(group.runs) for group in (first, second))
        error = (squares / freedom * sum(1 / count for count in counts)) ** 0.5
        values += error * generator.standard_t(freedom, DRAWS)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(value, float(low), float(high), "images and seeds" if freedom else "images")


def bootstrap(first: Best, second: Best, resamples: int, seed: int) -> Iterator[float]:
    """The difference in AP on each of so many drawings of the images, the second minus the first.

    The images that hotcoco draws depend on ``seed`` and their number only. One at a time takes
    twice the time of all at once, but shows progress.
    """
    sides = [evaluated(first), evaluated(second)]
    for number in range(resamples):
        drawn: Any = hotcoco.compare(sides[0], sides[1], n_bootstrap=1, seed=seed * resamples + number)
        yield drawn["ci"]["AP"]["lower"]


def evaluated(best: Best) -> Any:
    """Hotcoco's evaluation over boxes of all sizes: enough for AP, in a quarter of the time."""
    truth = best.truth
    evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, best.detections))
    parameters = evaluation.params
    parameters.area_rng, parameters.area_rng_lbl = parameters.area_rng[:1], parameters.area_rng_lbl[:1]
    evaluation.params = parameters
    evaluation.evaluate()
    return evaluation
