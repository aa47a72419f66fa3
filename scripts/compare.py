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
    from conf.cli.program import start

    raise SystemExit(start("compare"))

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf import errors, schema
from conf.cli import from_checkpoint, run_files
from conf.options import MAY_CHANGE, flat, is_covered
from data import progress
from data.errors import as_started, printable
from train_utils import coco_eval
from train_utils.report import report_page
from train_utils.report.run_report import report_run
from train_utils.results import Detections, GroundTruth

METRICS = ("AP", "AP50", "AP75")
CONFIDENCE = 0.95  # of the intervals
SIMULATED = 200_000  # sums of two errors, for their quantiles
RECALLS = np.linspace(0, 1, 101)
NAMED_IMAGES = 3  # of those that one set has alone
# A resumed run may change these, but runs that differ in them are different settings.
DISTINCT = {"data.train", "data.val", "evaluate.every", "plugins", "train.epochs", "train.patience"}
IGNORED = ("train.seed", "name", *(option for option in MAY_CHANGE if option not in DISTINCT))


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    letter: str
    setting: dict[str, Any]
    runs: list[Path]
    best: list[coco_eval.Evaluation]  # of each run

    def mean(self, name: str = "AP") -> float:
        """The mean over the runs of a COCO metric at the best epoch."""
        return float(np.mean([best.metrics[name] for best in self.best]))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        values = [best.metrics["AP"] for best in self.best]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    @property
    def truth(self) -> GroundTruth:
        """What all runs were scored on."""
        return self.best[0].truth

    def sampled_aps(self, draws: np.ndarray) -> np.ndarray:
        """The AP of each run (rows) on each of the ``draws`` (columns)."""
        matches = [coco_eval.find_matches(best.truth, best.detections) for best in self.best]
        return np.array([resampled_ap(of_run, draws) for of_run in matches])


class Gain(NamedTuple):
    """The AP of a setting minus that of the first, or a part of it, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    def sentence(self) -> str:
        """The verdict: a gain is real if its interval excludes 0."""
        word = "gain" if self.value >= 0 else "loss"
        verdict = "is real" if self.low > 0 or self.high < 0 else "is unproven"
        interval = f"{CONFIDENCE:.0%} interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def compare(config: schema.CompareConfig) -> list[Gain]:
    """Print the comparison; return the gain of each setting over the first.

    A single run gets its report instead. Raises TrainError if runs cannot be read or compared.
    """
    folders = [Path(run_files.full_name(run)) for run in config.runs]
    if len(folders) == 1:
        print(f"page: {report_run(folders[0])}")
        return []
    groups = read_groups(folders)
    print_groups(groups)
    gains = []
    for other in groups[1:]:
        compared = groups[0], other, config.resamples, config.seed
        parts = [gain(*compared)] if is_same(groups[0].truth, other.truth) else split_gain(*compared)
        titles = f"{other.letter} against A", "  by the network, on common images", "  by images and labels"
        for title, part in zip(titles, parts, strict=False):
            print(f"{title}: {part.sentence()}.")
        gains.append(parts[0])
    if any(len(group.runs) == 1 for group in groups):
        print("A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m).")
    return gains


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Group the runs in these folders by setting, in the order of first appearance.

    Runs on other validation sets are other settings. Raises TrainError if a folder is not a run or
    has no evaluation, or if two runs of a setting have one seed.
    """
    groups: list[Group] = []
    by_seed: dict[tuple[str, Any], Path] = {}
    for folder in folders:
        options, best = flat(from_checkpoint.read_config(folder, "")), report_page.read_best(folder)
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        for group in groups:
            if group.setting == setting and is_same(group.truth, best.truth):
                break
        else:
            group = Group(chr(ord("A") + len(groups)), setting, [], [])
            groups.append(group)
        key = group.letter, options.get("train.seed")
        if key in by_seed:
            pair = f"{by_seed[key]} and {folder}"
            raise errors.TrainError(f"{pair} are one training, of train.seed={key[1]}. fix: name one of them")
        by_seed[key] = folder
        group.runs.append(folder)
        group.best.append(best)
    return groups


def is_same(truth: GroundTruth, other: GroundTruth) -> bool:
    """Whether images, by id, and labels are the same."""
    columns = vars(truth).keys() - {"file_names"}  # older files have none
    return all(np.array_equal(getattr(truth, column), getattr(other, column)) for column in columns)


def print_groups(groups: Sequence[Group]) -> None:
    """Print the settings' metrics, the options that differ, and the folders."""
    metrics = [["setting", "runs", *METRICS, "spread of AP"]]
    folders = [["setting", "folder"]]
    for group in groups:
        values = [*map(group.mean, METRICS), group.spread()]
        metrics.append([group.letter, str(len(group.runs)), *map(coco_eval.format_metric, values)])
        folders += [[group.letter, str(run)] for run in group.runs]
    options = [["option", *(group.letter for group in groups)]]
    for key in dict.fromkeys(key for group in groups for key in group.setting):
        row = [key, *(str(group.setting.get(key, "-")) for group in groups)]
        if len(set(row[1:])) > 1:
            options.append(row)
    for table in (metrics, options, folders):
        rows = [[*map(printable, row)] for row in table]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
        print()


def gain(first: Group, second: Group, resamples: int, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    A bootstrap, which draws the same images for all runs, gives the error over images. Where a
    setting has several runs, Student's t with the pooled variance of AP adds the error over seeds.
    """
    draws = draw_images(len(first.truth.image_ids), resamples, seed)
    return with_interval(first.sampled_aps(draws), second.sampled_aps(draws), seed)


def split_gain(first: Group, second: Group, resamples: int, seed: int) -> list[Gain]:
    """Print how the sets of two settings differ; return the gain and its two parts, as above.

    The bootstrap draws from the images of both sets, the same for all three. Raises TrainError if
    the sets share no labelled image.
    """
    truth = second.truth
    ids = image_ids((first.truth, truth))
    both, every = ids[0].keys() & ids[1].keys(), ids[0] | ids[1]
    names = [name for name in truth.names if name in first.truth.names]
    # The others become crowds: images and classes without boxes do not count.
    on_common = np.isin(truth.image_ids[truth.image_of_box], [ids[1][key] for key in both])
    of_common = np.isin(np.array(truth.names)[truth.classes], names)
    common = replace(truth, crowd=truth.crowd | ~(on_common & of_common))
    if common.crowd.all():
        raise errors.TrainError(
            f"{second.runs[0]} was scored on another validation set than {first.runs[0]}, and no labelled image of one"
            " name is known to be in both. fix: score it on the same: "
            f"{as_started('python eval.py')} ckpt=... data=... out=<its folder>"
        )
    draws = dict(zip(every, draw_images(len(every), resamples, seed).T, strict=True))
    drawn_common = np.transpose([draws[key] * (key in both) for key in ids[1]])
    whole, network, rows = [], [], []
    for group, own in zip((first, second), ids, strict=True):
        images = {own[key]: ids[1][key] for key in both}
        classes = {group.truth.names.index(name): truth.names.index(name) for name in names}
        rows.append(labels(group.truth, images, classes))
        moved = [renumbered(best.detections, images, classes) for best in group.best]
        shared = [best._replace(truth=common, detections=found) for best, found in zip(group.best, moved, strict=True)]
        whole.append(group.sampled_aps(np.transpose([draws[key] for key in own])))
        network.append(group._replace(best=shared).sampled_aps(drawn_common))
    print_change((first.letter, second.letter), ids, rows)
    of_data = [whole[0] - network[0], whole[1] - network[1]]
    parts = (whole, network, of_data)
    return [with_interval(before, after, seed) for before, after in parts]


def image_ids(truths: Sequence[GroundTruth]) -> list[dict[Any, int]]:
    """The ids of two sets' images by name, height and width, in their order.

    Names are without folders if no others agree.
    """
    for shorten in (str, os.path.basename):
        found = []
        for truth in truths:
            rows = sorted(zip(truth.image_ids.tolist(), truth.file_names, truth.sizes.tolist(), strict=False))
            found.append({(shorten(name), *size): number for number, name, size in rows})
        if found[0].keys() & found[1].keys() and [*map(len, found)] == [len(truth.image_ids) for truth in truths]:
            return found
    return [{}, {}]


def labels(truth: GroundTruth, images: dict[int, int], classes: dict[int, int]) -> list[tuple[float, ...]]:
    """Image, left, top, width, height and class of boxes that count, by their new numbers."""
    owners = truth.image_ids[truth.image_of_box].tolist()
    found = []
    for image, index, box, crowd in zip(owners, truth.classes, truth.boxes_xywh.tolist(), truth.crowd, strict=True):
        if image in images and index in classes and not crowd:
            found.append((images[image], *box, classes[index]))
    return found


def renumbered(found: Detections, images: dict[int, int], classes: dict[int, int]) -> Detections:
    """Those of these images and classes, by their new numbers."""
    kept = found[np.isin(found["image_id"], [*images]) & np.isin(found["class"], [*classes])]
    kept["image_id"] = [images[number] for number in kept["image_id"].tolist()]
    kept["class"] = [classes[number] for number in kept["class"].tolist()]
    return kept


def print_change(letters: Sequence[str], ids: Sequence[dict[Any, int]], of_both: Sequence[list[Any]]) -> None:
    """Print what one of two sets has alone: images, and labels of the images ``of_both``."""
    boxes = [Counter(row[:-1] for row in rows) for rows in of_both]
    same, placed = (Counter(of_both[0]) & Counter(of_both[1])).total(), (boxes[0] & boxes[1]).total()
    print(f"{letters[0]} and {letters[1]} were scored on different sets:")
    images = progress.counted(len(ids[0].keys() & ids[1].keys()), "image")
    print(f"  {images} in both; of their labels {same:,} the same, {placed - same:,} of another class")
    for letter, own, other, rows in zip(letters, ids, reversed(ids), of_both, strict=True):
        alone = [printable(name) for name, *_ in sorted(own.keys() - other.keys())]
        listed = ", ".join(alone[:NAMED_IMAGES]) + (", ..." if len(alone) > NAMED_IMAGES else "")
        images = progress.counted(len(alone), "image") + (f" ({listed})" if alone else "")
        print(f"  only in {letter}: {images}; {progress.counted(len(rows) - placed, 'label')} on the common ones")


def draw_images(images: int, resamples: int, seed: int) -> np.ndarray:
    """How often each of N images is in samples of N with replacement, int (1 + resamples, N).

    The first one holds each image once.
    """
    draws = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), resamples)
    return np.concatenate([np.ones((1, images), int), draws])


def with_interval(first: np.ndarray, second: np.ndarray, seed: int) -> Gain:
    """The gain from one setting to another, by the ``sampled_aps`` of their runs."""
    gains = second.mean(0) - first.mean(0)
    values = gains[0] + gains[1:] - gains[1:].mean()
    freedom = len(first) + len(second) - 2
    if freedom:
        squares = first[:, 0].var() * len(first) + second[:, 0].var() * len(second)
        error = (squares / freedom * (1 / len(first) + 1 / len(second))) ** 0.5
        generator = np.random.default_rng(seed)
        values = generator.choice(values, SIMULATED) + error * generator.standard_t(freedom, SIMULATED)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(float(gains[0]), float(low), float(high), "images and seeds" if freedom else "images")


def resampled_ap(matches: coco_eval.Matches, draws: np.ndarray) -> np.ndarray:
    """AP (R,) of data sets that hold image i ``draws[:, i]`` times; ``draws`` is int (R, N).

    It is pycocotools' mean over the classes with boxes, the IoUs and 101 recalls of the best
    precision at that recall or a higher one.
    """
    total, present = np.zeros(len(draws)), np.zeros(len(draws))
    with progress.Progress(len(matches.boxes), "AP of samples", enabled=True, unit="class") as bar:
        for index, boxes in enumerate(matches.boxes):
            of_class = np.flatnonzero(matches.classes == index)
            of_class = of_class[np.argsort(-matches.scores[of_class], kind="stable")]
            right, wrong, images = matches.right[:, of_class], matches.wrong[:, of_class], matches.images[of_class]
            for sample, labels in enumerate(draws @ boxes):
                if labels:
                    times = draws[sample, images]
                    present[sample] += 1
                    total[sample] += sum(map(ap_at_iou, right * times, wrong * times, [labels] * len(right)))
            bar.advance(1)
    return total / np.maximum(present, 1) / len(matches.right)


def ap_at_iou(right: np.ndarray, wrong: np.ndarray, labels: int) -> float:
    """AP of a class at one IoU from how often each detection, by falling score, is right, wrong."""
    found, reported, is_right = right.cumsum(), (right + wrong).cumsum(), right > 0
    precision = found[is_right] / reported[is_right]
    best = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(found[is_right] / labels, RECALLS)
    return float(best[at[at < len(best)]].sum()) / len(RECALLS)
