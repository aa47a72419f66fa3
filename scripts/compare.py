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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf import TrainError, schema
from conf.cli import run_files
from conf.options import MAY_CHANGE, flat, is_covered
from data.errors import printable
from data.io import expand
from data.progress import counted, log
from train_utils.bootstrap import Gain, draw_images, gain, resampled_aps, with_interval
from train_utils.coco_eval import Evaluation, format_metric
from train_utils.report import report_page

METRICS = ("AP", "AP50", "AP75")
PARTS = ("by the network, on common images", "by images and labels")
# A resumed run may change these, but runs that differ in them are different settings.
DISTINCT = {"data.train", "data.val", "evaluate.every", "plugins", "train.epochs", "train.patience"}
IGNORED = ("train.seed", "name", *(set(MAY_CHANGE) - DISTINCT))


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    letter: str
    setting: dict[str, Any]
    runs: list[Path]
    seeds: list[Any]  # of each run
    best: list[Evaluation]  # of each run

    def mean(self, name: str = "AP") -> float:
        """The mean over the runs of a COCO metric at the best epoch."""
        return float(np.mean([best.metrics[name] for best in self.best]))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        values = [best.metrics["AP"] for best in self.best]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


def compare(config: schema.CompareConfig) -> list[Gain]:
    """Print the comparison; return the gain of each setting over the first.

    A single run gets its report instead. Raises TrainError if runs cannot be read or compared.
    """
    folders = []
    for run in config.runs:
        top, names = expand(run)
        is_pattern = names and not os.path.exists(run)
        folders += [top / name for name in names] if is_pattern else [Path(run_files.full_name(run))]
    if len(folders) == 1:
        log.info(f"page: {report_page.write_report(folders[0])}; several runs, as 'runs/a/*', are compared")
        return []
    groups = read_groups(folders)
    print_groups(groups)
    first = groups[0]
    gains = []
    for other in groups[1:]:
        if is_same(first, other.best[0]):
            parts = [gain(first.best, other.best, config.resamples, config.seed)]
        else:
            parts = split_gain(first, other, config.resamples, config.seed)
        log.info(f"{other.letter} against A: {parts[0].sentence()}.")
        for title, part in zip(PARTS, parts[1:], strict=False):
            log.info(f"  {title}: {part.sentence()}.")
        gains.append(parts[0])
    if any(len(group.runs) == 1 for group in groups):
        log.info("A setting with one run may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m).")
    return gains


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Group the runs in these folders by setting, in the order of first appearance.

    Runs on other training or validation sets are other settings. Raises TrainError if a folder is
    not a run or has no evaluation, or if two runs of a setting have one seed.
    """
    groups: list[Group] = []
    for folder in folders:
        options = flat(run_files.read_config(folder, ""))
        seed = options.get("train.seed")
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        best = report_page.read_best(folder)
        setting |= flat({"trained_on": best.about.get("trained_on", {})})
        for group in groups:
            if group.setting == setting and is_same(group, best):
                break
        else:
            group = Group(chr(ord("A") + len(groups)), setting, [], [], [])
            groups.append(group)
        if seed in group.seeds:
            pair = f"{group.runs[group.seeds.index(seed)]} and {folder} are one training, of train.seed={seed}"
            raise TrainError(pair, "name one of them")
        group.runs.append(folder)
        group.seeds.append(seed)
        group.best.append(best)
    return groups


def is_same(group: Group, best: Evaluation) -> bool:
    """Whether both were scored on the same images, by id, and labels."""
    truth, other = vars(group.best[0].truth), vars(best.truth)
    columns = truth.keys() - {"file_names"}  # older files have none
    return all(np.array_equal(truth[column], other[column]) for column in columns)


def print_groups(groups: Sequence[Group]) -> None:
    """Print the settings' metrics, the options that differ, and the folders."""
    metrics = [["setting", "runs", *METRICS, "spread of AP"]]
    options = [["option", *(group.letter for group in groups)]]
    folders = [["setting", "epochs", "folder"]]
    settings: dict[str, Any] = {}
    for group in groups:
        values = map(format_metric, [*map(group.mean, METRICS), group.spread()])
        metrics.append([group.letter, str(len(group.runs)), *values])
        for run in group.runs:
            epochs = f"{run_files.progress_of(run)[0] or '-'} of {group.setting['train.epochs']}"
            folders.append([group.letter, epochs, str(run)])
        settings |= group.setting
    for key in settings:
        texts = [str(group.setting.get(key, "-")) for group in groups]
        if len(set(texts)) > 1:
            options.append([key, *texts])
    for table in (metrics, options, folders):
        shown = [list(map(printable, row)) for row in table]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            log.info("  ".join(map(str.ljust, row, widths)).rstrip())
        log.info("")


def split_gain(first: Group, second: Group, resamples: int, seed: int) -> list[Gain]:
    """Print how the sets of two settings differ; return the gain and its PARTS.

    The bootstrap draws from the images of both sets, the same for all three. Raises TrainError if
    the sets have no image or no class in common.
    """
    truth = second.best[0].truth
    names = list(first.best[0].truth.names)
    ids, others = image_ids(first, str), image_ids(second, str)
    if not ids.keys() & others.keys():
        ids, others = image_ids(first, os.path.basename), image_ids(second, os.path.basename)
    images = {ids[key]: others[key] for key in ids.keys() & others.keys()}
    classes = {names.index(name): index for index, name in enumerate(truth.names) if name in names}
    if not images or not classes:
        what = f"{second.runs[0]} was scored on another validation set than {first.runs[0]}"
        fix = "runs with validation images and classes in common"
        raise TrainError(f"{what}, and no image and class are known to be in both", fix)
    log.info(f"{first.letter} and {second.letter} were scored on different sets:")
    log.info(f"  {counted(len(images), 'image')} in both")
    log.info(f"  {counted(len(ids) - len(images), 'image')} only in {first.letter}")
    log.info(f"  {counted(len(others) - len(images), 'image')} only in {second.letter}")
    column = {key: number for number, key in enumerate(ids | others)}
    drawn = draw_images(len(column), resamples, seed)
    of_first = drawn[:, [column[key] for key in ids]]
    of_second = drawn[:, [column[key] for key in others]]
    of_common = of_second * [key in ids for key in others]
    # A class without boxes but crowds does not count.
    common = replace(truth, crowd=truth.crowd | ~np.isin(truth.classes, list(classes.values())))
    moved = [renumbered(best, images, classes)._replace(truth=common) for best in first.best]
    kept = [best._replace(truth=common) for best in second.best]
    before = resampled_aps(first.best, of_first)
    after = resampled_aps(second.best, of_second)
    before_on_common = resampled_aps(moved, of_common)
    after_on_common = resampled_aps(kept, of_common)
    return [
        with_interval(before, after, seed),
        with_interval(before_on_common, after_on_common, seed),
        with_interval(before - before_on_common, after - after_on_common, seed),
    ]


def image_ids(group: Group, shorten: Callable[[str], str]) -> dict[Any, int]:
    """The ids of its images in their order, by name, height and width; none if names repeat."""
    truth = group.best[0].truth
    ids = {}
    rows = zip(truth.image_ids.tolist(), truth.file_names, truth.sizes.tolist(), strict=False)
    for number, name, size in sorted(rows):
        ids[shorten(name), *size] = number
    return ids if len(ids) == len(truth.image_ids) else {}


def renumbered(best: Evaluation, images: dict[int, int], classes: dict[int, int]) -> Evaluation:
    """With the detections on these images and of these classes alone, by their new numbers."""
    found = best.detections
    for column, numbers in (("image_id", images), ("class", classes)):
        found = found[np.isin(found[column], list(numbers))]
        found[column] = [numbers[old] for old in found[column].tolist()]
    return best._replace(detections=found)
