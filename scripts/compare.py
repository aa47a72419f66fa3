"""Compare runs: options, mean and spread over seeds, and whether a gain is real.

    python -m scripts.compare runs/a                 # of one run the report.html, as far as it is
    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/base-0 runs/base-1 runs/wide-0 runs/wide-1

Runs that differ in train.seed only are one setting; the others are compared with the first one.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.run import run

    raise SystemExit(run("compare"))

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hotcoco
import numpy as np

from conf import errors, from_checkpoint, run_files, schema
from conf.options import MAY_CHANGE, flat, is_covered
from data import progress
from train_utils import coco_eval, report_page
from train_utils.run_report import report_run

METRICS = ("AP", "AP50", "AP75")
CONFIDENCE = 0.95  # of the intervals
DRAWS = 200_000  # for the quantiles of a sum of errors
# What may change in a run, but counts here.
COUNTS = {"data.train", "data.val", "evaluate.every", "train.epochs", "train.patience"}
IGNORED = ("train.seed", "name", *(option for option in MAY_CHANGE if option not in COUNTS))


def compare(config: schema.CompareConfig) -> "list[Gain]":
    """Print the comparison; return the gain of each setting over the first.

    Of one run write the report. Raises TrainError if runs cannot be read or compared.
    """
    folders = [Path(run_files.full_name(run)) for run in config.runs]
    if len(folders) == 1:
        print(f"page: {report_run(folders[0])}")
        return []
    groups = read_groups(folders)
    table = []
    for group in groups:
        metrics = [*map(group.mean, METRICS), group.spread()]
        table.append((group.letter, str(len(group.runs)), *map(coco_eval.format_metric, metrics)))
    print_table(("setting", "runs", *METRICS, "spread of AP"), table)
    keys = dict.fromkeys(key for group in groups for key in group.setting)
    rows = [(key, *(str(group.setting.get(key, "-")) for group in groups)) for key in keys]
    print_table(("option", *(group.letter for group in groups)), [row for row in rows if len(set(row[1:])) > 1])
    print_table(("setting", "folder"), [(group.letter, str(run)) for group in groups for run in group.runs])
    first, *others = groups
    gains = [gain(first, other, config.resamples, config.seed) for other in others]
    for other, of_other in zip(others, gains, strict=True):
        print(f"{other.letter} against {first.letter}: {of_other.sentence()}.")
    if any(len(group.runs) == 1 for group in groups):
        print("A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m).")
    return gains


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their titles."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


class Group(NamedTuple):
    """Runs that differ in their seed only."""

    letter: str
    setting: dict[str, Any]
    runs: list[Path]
    best: list[coco_eval.Evaluation]  # of each run

    def metrics(self, name: str = "AP") -> list[float]:
        """One of the COCO metrics of each run's best epoch."""
        return [best.metrics[name] for best in self.best]

    def mean(self, name: str = "AP") -> float:
        """The mean of a metric over the runs."""
        return float(np.mean(self.metrics(name)))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        return float(np.std(self.metrics(), ddof=1)) if len(self.runs) > 1 else None


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """The runs of these folders by setting, in the order in which each setting comes first.

    Raises TrainError if a folder is no run, or has no evaluation or another validation set than the
    first one.
    """
    groups: dict[str, Group] = {}
    truth = None
    for folder in folders:
        options, best = flat(from_checkpoint.read_config(folder, "")), report_page.read_best(folder)
        truth = truth or best.truth
        if not all(map(np.array_equal, vars(truth).values(), vars(best.truth).values())):
            raise errors.TrainError(
                f"{folder} was scored on another validation set than {folders[0]}. fix: score it on the same: "
                "python eval.py ckpt=... data=... out=<its folder>"
            )
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        letter = chr(ord("A") + len(groups))
        group = groups.setdefault(str(sorted(setting.items())), Group(letter, setting, [], []))
        group.runs.append(folder)
        group.best.append(best)
    return list(groups.values())


class Gain(NamedTuple):
    """The difference of two settings in AP, the second minus the first, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    def sentence(self) -> str:
        """The verdict in plain words: a gain is real if its interval does not hold 0."""
        is_real = self.low > 0 or self.high < 0
        word, verdict = "gain" if self.value >= 0 else "loss", "is real" if is_real else "is unproven"
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
    with progress.Progress(max(counts) * resamples, title, enabled=True, unit="draw") as bar:
        for number in range(max(counts)):
            before, after = (group.best[number % len(group.best)] for group in (first, second))
            for draw, delta in enumerate(bootstrap(before, after, resamples, seed)):
                deltas[draw] += delta / max(counts)
                bar.advance(1)
    generator, images = np.random.default_rng(seed), len(first.best[0].truth.image_ids)
    left_out = (1 - 1 / images) ** images or 1.0  # share of the images; of one image none
    values = value + ((1 - left_out) / left_out) ** 0.5 * generator.choice(deltas - deltas.mean(), DRAWS)
    if freedom := sum(counts) - 2:
        squares = sum(np.var(group.metrics()) * len(group.runs) for group in (first, second))
        error = (squares / freedom * sum(1 / count for count in counts)) ** 0.5
        values += error * generator.standard_t(freedom, DRAWS)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(value, float(low), float(high), "images and seeds" if freedom else "images")


def bootstrap(first: coco_eval.Evaluation, second: coco_eval.Evaluation, resamples: int, seed: int) -> Iterator[float]:
    """The difference in AP on each of so many drawings of the images, the second minus the first.

    The images that hotcoco draws depend on ``seed`` and their number only. One at a time takes
    twice the time of all at once, but shows progress.
    """
    sides = [coco_eval.match(side.truth, side.detections, every_size=False) for side in (first, second)]
    for number in range(resamples):
        drawn: Any = hotcoco.compare(sides[0], sides[1], n_bootstrap=1, seed=seed * resamples + number)
        yield drawn["ci"]["AP"]["lower"]
