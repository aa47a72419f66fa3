"""Compare runs: options, mean and spread over seeds, and whether a gain is real.

    python -m scripts.compare runs/a                 # of one run the report.html, as far as it is
    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/base-0 runs/base-1 runs/wide-0 runs/wide-1

Runs that differ in train.seed only are one setting; the others are compared with the first one.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.run import run

    raise SystemExit(run("compare"))

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf import errors, from_checkpoint, run_files, schema
from conf.options import MAY_CHANGE, flat, is_covered
from data import progress
from data.errors import as_started, printable
from train_utils import coco_eval, report_page
from train_utils.run_report import report_run

COMPARED_METRICS = ("AP", "AP50", "AP75")
CONFIDENCE = 0.95  # of the intervals
SIMULATED = 200_000  # sums of two errors, for their quantiles
DRAWS_AT_ONCE = 50  # bounds memory: 60 MB for the persons in COCO's 5,000 images
RECALLS = np.linspace(0, 1, 101)
# A resumed run may change these, but runs that differ in them are different settings.
DISTINCT = {"data.train", "data.val", "evaluate.every", "train.epochs", "train.patience"}
IGNORED = ("train.seed", "name", *(option for option in MAY_CHANGE if option not in DISTINCT))


def compare(config: schema.CompareConfig) -> "list[Gain]":
    """Print the comparison; return the gain of each setting over the first.

    A single run gets its report instead. Raises TrainError if runs cannot be read or compared.
    """
    folders = [Path(run_files.full_name(run)) for run in config.runs]
    if len(folders) == 1:
        print(f"page: {report_run(folders[0])}")
        return []
    groups = read_groups(folders)
    table = []
    for group in groups:
        metrics = [*map(group.mean, COMPARED_METRICS), group.spread()]
        table.append((group.letter, str(len(group.runs)), *map(coco_eval.format_metric, metrics)))
    print_table(("setting", "runs", *COMPARED_METRICS, "spread of AP"), table)
    keys = dict.fromkeys(key for group in groups for key in group.setting)
    rows = [(key, *(str(group.setting.get(key, "-")) for group in groups)) for key in keys]
    print_table(("option", *(group.letter for group in groups)), [row for row in rows if len(set(row[1:])) > 1])
    print_table(("setting", "folder"), [(group.letter, str(run)) for group in groups for run in group.runs])
    first, *others = groups
    gains = [gain(first, other, config.resamples, config.seed) for other in others]
    for other, over_first in zip(others, gains, strict=True):
        print(f"{other.letter} against {first.letter}: {over_first.sentence()}.")
    if any(len(group.runs) == 1 for group in groups):
        print("A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m).")
    return gains


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their titles."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    letter: str
    setting: dict[str, Any]
    runs: list[Path]
    best: list[coco_eval.Evaluation]  # of each run

    def metrics(self, name: str = "AP") -> list[float]:
        """A COCO metric at the best epoch of each run."""
        return [best.metrics[name] for best in self.best]

    def mean(self, name: str = "AP") -> float:
        """The mean of a metric over the runs."""
        return float(np.mean(self.metrics(name)))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        return float(np.std(self.metrics(), ddof=1)) if len(self.runs) > 1 else None


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Group the runs in these folders by setting, in the order of first appearance.

    Raises TrainError if a folder is not a run, has no evaluation, or was scored on another
    validation set than the first.
    """
    groups: dict[str, Group] = {}
    truth = None
    for folder in folders:
        options, best = flat(from_checkpoint.read_config(folder, "")), report_page.read_best(folder)
        truth = truth or best.truth
        if not all(map(np.array_equal, vars(truth).values(), vars(best.truth).values())):
            raise errors.TrainError(
                f"{folder} was scored on another validation set than {folders[0]}. fix: score it on the same: "
                f"{as_started('python eval.py')} ckpt=... data=... out=<its folder>"
            )
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        letter = chr(ord("A") + len(groups))
        group = groups.setdefault(str(sorted(setting.items())), Group(letter, setting, [], []))
        group.runs.append(folder)
        group.best.append(best)
    return list(groups.values())


class Gain(NamedTuple):
    """The AP of a setting minus that of the first, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    def sentence(self) -> str:
        """The verdict: a gain is real if its interval excludes 0."""
        is_real = self.low > 0 or self.high < 0
        word, verdict = "gain" if self.value >= 0 else "loss", "is real" if is_real else "is unproven"
        interval = f"{CONFIDENCE:.0%} interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def gain(first: Group, second: Group, resamples: int, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    A bootstrap, which draws the same images for all runs, gives the error over images. Where a
    setting has several runs, Student's t with the pooled variance of AP adds the error over seeds.
    """
    value, counts = second.mean() - first.mean(), (len(first.runs), len(second.runs))
    draws, deltas = draw_images(len(first.best[0].truth.image_ids), resamples, seed), np.zeros(resamples)
    title = f"{second.letter} against {first.letter}"
    with progress.Progress(sum(counts) * resamples, title, enabled=True, unit="draw") as bar:
        for sign, group in ((-1, first), (1, second)):
            for best in group.best:
                matches = coco_eval.find_matches(best.truth, best.detections)
                for start in range(0, resamples, DRAWS_AT_ONCE):
                    block = slice(start, start + DRAWS_AT_ONCE)
                    deltas[block] += sign * resampled_ap(matches, draws[block]) / len(group.best)
                    bar.advance(len(draws[block]))
    values = value + deltas - deltas.mean()
    if freedom := sum(counts) - 2:
        squares = sum(np.var(group.metrics()) * len(group.runs) for group in (first, second))
        error = (squares / freedom * sum(1 / count for count in counts)) ** 0.5
        generator = np.random.default_rng(seed)
        values = generator.choice(values, SIMULATED) + error * generator.standard_t(freedom, SIMULATED)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(value, float(low), float(high), "images and seeds" if freedom else "images")


def draw_images(images: int, resamples: int, seed: int) -> np.ndarray:
    """How often each of N images is in each sample of N with replacement, int (resamples, N)."""
    return np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), resamples)


def resampled_ap(matches: coco_eval.Matches, draws: np.ndarray) -> np.ndarray:
    """AP (R,) of data sets that hold image i ``draws[:, i]`` times; ``draws`` is int (R, N).

    It is pycocotools' mean over the classes with boxes, IoUs and 101 recalls of the best precision
    at that recall or a higher one, which a right detection has.
    """
    total, present = np.zeros(len(draws)), np.zeros(len(draws))
    for index, boxes in enumerate(matches.boxes):
        labels = draws @ boxes
        present += labels > 0
        of_class = np.flatnonzero(matches.classes == index)
        of_class = of_class[np.argsort(-matches.scores[of_class], kind="stable")]
        times = draws[:, matches.images[of_class]]  # that each detection occurs
        for right, wrong in zip(matches.right[:, of_class], matches.wrong[:, of_class], strict=True):
            hits = times[:, right].cumsum(1)
            precision = hits / np.maximum((times * (right | wrong)).cumsum(1)[:, right], 1)
            best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
            recalls = np.searchsorted(RECALLS, hits / np.maximum(labels, 1)[:, None], side="right")
            total += (best * np.diff(recalls, axis=1, prepend=0)).sum(1)
    return total / np.maximum(present, 1) / (len(matches.right) * len(RECALLS))
