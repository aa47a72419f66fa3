"""Compare runs: options, mean and spread over seeds, and whether a gain is real.

    python -m scripts.compare runs/a                 # of one run the report.html, as far as it is
    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/base-0 runs/base-1 runs/wide-0 runs/wide-1

Runs that differ in train.seed only are one setting; the others are compared with the first one.
Where a setting B was scored on other images or labels than the first, A, its gain is split in two:

    gain    = AP(B, B's set) - AP(A, A's set) = network + data
    network = AP(B, common) - AP(A, common)
    data    = [AP(A, common) - AP(A, A's set)] + [AP(B, B's set) - AP(B, common)]

"common" are the images of both sets, by name and size, with B's labels of the classes of both.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.run import run

    raise SystemExit(run("compare"))

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf import errors, from_checkpoint, run_files, schema
from conf.options import MAY_CHANGE, flat, is_covered
from data import progress
from data.errors import as_started, printable
from train_utils import coco_eval, report_page
from train_utils.results import Detections, GroundTruth
from train_utils.run_report import report_run

COMPARED_METRICS = ("AP", "AP50", "AP75")
CONFIDENCE = 0.95  # of the intervals
SIMULATED = 200_000  # sums of two errors, for their quantiles
DRAWS_AT_ONCE = 50  # bounds memory: 60 MB for the persons in COCO's 5,000 images
RECALLS = np.linspace(0, 1, 101)
PARTS = "  by the network, on common images", "  by images and labels"
NAMED_IMAGES = 3  # of those that one set has alone
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
    gains = []
    for other in others:
        if is_same(first.best[0].truth, other.best[0].truth):
            parts = [gain(first, other, config.resamples, config.seed)]
        else:
            parts = split_gain(first, other, config.resamples, config.seed)
        for what, part in zip((f"{other.letter} against {first.letter}", *PARTS), parts, strict=False):
            print(f"{what}: {part.sentence()}.")
        gains.append(parts[0])
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

    Runs on other validation sets are other settings. Raises TrainError if a folder is not a run, is
    there twice or has no evaluation.
    """
    groups: dict[str, Group] = {}
    truths: list[GroundTruth] = []
    if len({*map(Path.resolve, folders)}) < len(folders):
        raise errors.TrainError(f"runs={' '.join(map(str, folders))} has a run twice. fix: name each once")
    for folder in folders:
        options, best = flat(from_checkpoint.read_config(folder, "")), report_page.read_best(folder)
        truths.append(next((truth for truth in truths if is_same(truth, best.truth)), best.truth))
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        letter = chr(ord("A") + len(groups))
        group = groups.setdefault(f"{id(truths[-1])} {sorted(setting.items())}", Group(letter, setting, [], []))
        group.runs.append(folder)
        group.best.append(best)
    return list(groups.values())


def is_same(truth: GroundTruth, other: GroundTruth) -> bool:
    """Whether images, by id, and labels are the same."""
    columns = vars(truth).keys() - {"file_names"}  # older files have none
    return all(np.array_equal(getattr(truth, column), getattr(other, column)) for column in columns)


class Gain(NamedTuple):
    """The AP of a setting minus that of the first, or a part of it, with its interval."""

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
    images = len(first.best[0].truth.image_ids)
    draws = draw_images(images, resamples, seed)
    deltas = resampled_gain((first, second), (np.arange(images),) * 2, draws)
    return with_interval((first.metrics(), second.metrics()), deltas, seed)


def resampled_gain(groups: Sequence[Group], columns: Sequence[np.ndarray], draws: np.ndarray) -> np.ndarray:
    """The gains (R,) of the second of two settings on samples of images.

    A setting's images, by id, stand in the ``columns`` (N,) of ``draws`` (R, all images).
    """
    deltas, title = np.zeros(len(draws)), f"{groups[1].letter} against {groups[0].letter}"
    runs = sum(len(group.best) for group in groups)
    with progress.Progress(runs * len(draws), title, enabled=True, unit="draw") as bar:
        for sign, group, own in zip((-1, 1), groups, columns, strict=True):
            for best in group.best:
                matches = coco_eval.find_matches(best.truth, best.detections)
                for start in range(0, len(draws), DRAWS_AT_ONCE):
                    block = draws[start : start + DRAWS_AT_ONCE, own]
                    deltas[start : start + len(block)] += sign * resampled_ap(matches, block) / len(group.best)
                    bar.advance(len(block))
    return deltas


def with_interval(values_of: Sequence[Sequence[float]], deltas: np.ndarray, seed: int) -> Gain:
    """The gain of the mean, from values of both settings' runs and the gains (R,) of samples."""
    first, second = values_of
    value, freedom = float(np.mean(second) - np.mean(first)), len(first) + len(second) - 2
    values = value + deltas - deltas.mean()
    if freedom:
        squares = sum(np.var(one) * len(one) for one in (first, second))
        error = (squares / freedom * sum(1 / len(one) for one in (first, second))) ** 0.5
        generator = np.random.default_rng(seed)
        values = generator.choice(values, SIMULATED) + error * generator.standard_t(freedom, SIMULATED)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(value, float(low), float(high), "images and seeds" if freedom else "images")


def split_gain(first: Group, second: Group, resamples: int, seed: int) -> list[Gain]:
    """Print how the sets of two settings differ; return the gain and its two parts, as above.

    The bootstrap draws from the images of both sets, the same for all three. Raises TrainError if
    the sets share no labelled image.
    """
    truths = [group.best[0].truth for group in (first, second)]
    keys = image_keys(truths)
    number_of = {key: number for number, key in enumerate(dict.fromkeys([*keys[0], *keys[1]]))}
    numbers = [np.array([number_of[key] for key in of_set], np.int64) for of_set in keys]
    names = sorted({*truths[0].names} & {*truths[1].names})
    both = np.intersect1d(numbers[0], numbers[1])
    before, after = (select(*one, both, names) for one in zip(truths, numbers, strict=True))
    if after.crowd.all():
        raise errors.TrainError(
            f"{second.runs[0]} was scored on another validation set than {first.runs[0]}, and no labelled image of one"
            " name is known to be in both. fix: score it on the same: "
            f"{as_started('python eval.py')} ckpt=... data=... out=<its folder>"
        )
    print(describe_change((first.letter, second.letter), keys, (before, after)))
    shared = [
        group._replace(best=[coco_eval.score(after, moved(best, ids, after)) for best in group.best])
        for group, ids in zip((first, second), numbers, strict=True)
    ]
    draws = draw_images(len(number_of), resamples, seed)
    columns = [ids[np.argsort(truth.image_ids)] for ids, truth in zip(numbers, truths, strict=True)]
    whole, network = resampled_gain((first, second), columns, draws), resampled_gain(shared, (both, both), draws)
    of_own, of_shared = ([group.metrics() for group in pair] for pair in ((first, second), shared))
    of_data = [np.subtract(*pair).tolist() for pair in zip(of_own, of_shared, strict=True)]
    parts = (of_own, whole), (of_shared, network), (of_data, whole - network)
    return [with_interval(values, deltas, seed) for values, deltas in parts]


def describe_change(letters: Sequence[str], keys: Sequence[list[Any]], common: Sequence[GroundTruth]) -> str:
    """Images, by ``image_keys``, and numbers of labels of ``common`` that one set has alone."""
    labels = [count_labels(truth) for truth in common]
    same, placed = (sum((one & other).values()) for one, other in zip(*labels, strict=True))
    lines = [f"{letters[0]} and {letters[1]} were scored on different sets:"]
    images = progress.counted(len(common[0].image_ids), "image")
    lines += [f"  {images} in both; of their labels {same:,} the same, {placed - same:,} of another class"]
    for letter, (_, boxes), own, other in zip(letters, labels, keys, keys[::-1], strict=True):
        alone = sorted(set(own) - set(other))
        named = [printable(name) for name, *_ in alone[:NAMED_IMAGES]] + ["..."] * (len(alone) > NAMED_IMAGES)
        images = progress.counted(len(alone), "image") + f" ({', '.join(named)})" * bool(alone)
        labels_there = progress.counted(boxes.total() - placed, "label")
        lines += [f"  only in {letter}: {images}; {labels_there} on the common ones"]
    return "\n".join(lines)


def count_labels(truth: GroundTruth) -> tuple[Counter[Any], Counter[Any]]:
    """How often there is each box with its class, and without."""
    rows = [*zip(truth.image_ids[truth.image_of_box].tolist(), map(tuple, truth.boxes_xywh.tolist()), strict=True)]
    return Counter(zip(rows, truth.classes.tolist(), strict=True)), Counter(rows)


def image_keys(truths: Sequence[GroundTruth]) -> list[list[Any]]:
    """Name, height, width of the images of two sets; names without folders if no others agree."""
    for shorten in (str, os.path.basename):
        keys = [
            [(shorten(name), *size) for name, size in zip(t.file_names, t.sizes.tolist(), strict=False)] for t in truths
        ]
        if set(keys[0]) & set(keys[1]) and all(len(set(of_set)) == len(of_set) for of_set in keys):
            return keys
    return [[], []]


def select(truth: GroundTruth, ids: np.ndarray, chosen: np.ndarray, names: Sequence[str]) -> GroundTruth:
    """The images whose new ``ids`` (N,) are ``chosen``, and their boxes of classes in ``names``."""
    images, classes = np.flatnonzero(np.isin(ids, chosen)), class_numbers(truth.names, names)[truth.classes]
    boxes = np.isin(truth.image_of_box, images) & (classes >= 0)
    offsets = np.append(0, np.bincount(truth.image_of_box[boxes], minlength=len(ids))[images].cumsum())
    columns = {name: getattr(truth, name)[boxes] for name in ("boxes_xywh", "crowd", "areas")}
    return GroundTruth(ids[images], truth.sizes[images], offsets, classes=classes[boxes], names=names, **columns)


def moved(best: coco_eval.Evaluation, ids: np.ndarray, truth: GroundTruth) -> Detections:
    """Detections on images and of classes of ``truth``; ``ids`` (N,) are new ones of their own."""
    found, order = best.detections.copy(), np.argsort(best.truth.image_ids)
    found["image_id"] = ids[order[np.searchsorted(best.truth.image_ids, found["image_id"], sorter=order)]]
    found["class"] = class_numbers(best.truth.names, truth.names)[found["class"]]
    return found[np.isin(found["image_id"], truth.image_ids) & (found["class"] >= 0)]


def class_numbers(own: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """For each of the ``own`` classes (K,) its number among ``names``, or -1."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(name, -1) for name in own], np.int64)


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
