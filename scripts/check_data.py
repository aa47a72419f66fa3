"""Check a data set before a training on it costs anything; the data set is only read.

    python -m scripts.check_data data=bccd model=yolov3-tiny image_size=320
    python -m scripts.check_data --config-dir ~/mine data=cats out=report

Prints a report and writes it to a folder, as report.txt and labels.jpg, some images with their
boxes. *Problems* are wrong entries. *Notes* may be intended but are worth a look: empty images,
classes without boxes, anchors that do not fit the boxes. Exit code 0: no problems, 1: some, 2: no
such data set or option.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("check_data")
    raise SystemExit

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conf import ConfigError
from conf.network import load_network
from conf.schema_tools import CheckDataConfig
from data.anchors import LOW_RECALL, Sizes, fix_of_anchors, network_sizes, objects_per_image, recall
from data.config import DataConfig, OnError
from data.errors import DataError, printable
from data.files import counted, usable_cores
from data.images import ImageSource
from data.index import Annotations, check_same_classes, read_annotations
from data.source import REPORTED_FINDINGS
from data.validate import CUT, SCORED_EMPTY, SCORED_OUTSIDE
from models import Darknet
from train_utils.draw import Cell, save_sheet

SHEET_COLUMNS = 4
SPLITS = ("train", "val")
BOTH = "train and val"
TERMINAL_COLUMNS = 100
SHOWN_CLASSES = 80


def check(config: CheckDataConfig) -> CheckedSet:
    """Check the set, print the report and write it with the sheet."""
    with torch.device("meta"):  # neither memory nor random numbers
        model = Darknet(load_network(config.model), width=config.model.width)
    anchors = np.array(sorted({anchor for head in model.heads for anchor in head.anchors}))  # some .cfg have more
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    out = Path(config.out) if config.out is not None else Path("runs", "check_data", f"{config.data.name}_{stamp}")
    try:  # before anything is read
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be created ({error.strerror}). fix: name another folder") from error
    checked = check_dataset(config.data, config.image_size, anchors, config.min_iou)
    cells = [
        labelled(checked, split, index)
        for split, readable in checked.readable.items()
        for index in readable[:: max(1, len(readable) // max(1, config.pictures))][: config.pictures]
    ]
    if cells:
        save_sheet(cells, SHEET_COLUMNS, out / "labels.jpg")
    lines = [f"{config.data.name}: {config.data.root}", *text_report(checked)]
    (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[:-1]))
    print(f"{lines[-1]}, report: {out / 'report.txt'}")
    return checked


def labelled(checked: CheckedSet, split: str, index: int) -> Cell:
    """An image with its boxes, under its file name."""
    annotations = checked.splits[split]
    image = ImageSource(annotations, OnError.stop).read(index)
    assert image is not None  # with stop it raises
    classes, boxes = annotations.training_boxes(index)
    return Cell(image, boxes, classes, annotations.names, None, f"{split}: {annotations.file_name(index)}")


@dataclass(frozen=True)
class Issue:
    """Entries of one kind, with sentences for the first ones."""

    split: str  # train, val, or train and val
    kind: str
    count: int
    examples: list[str]


@dataclass(frozen=True)
class CheckedSet:
    """The result of a check."""

    splits: dict[str, Annotations]
    readable: dict[str, list[int]]  # positions of usable images
    problems: list[Issue]
    notes: list[Issue]
    recall: dict[str, float]  # share of the boxes that an anchor fits; NaN without boxes

    @property
    def num_problems(self) -> int:
        """The number of wrong entries."""
        return sum(issue.count for issue in self.problems)


def check_dataset(config: DataConfig, image_size: int, anchors: Sizes, min_iou: float) -> CheckedSet:
    """Read all labels and decode all images of both sets.

    ``anchors`` (k, 2) are those of the network at ``image_size`` pixels, which learn the boxes that
    overlap one by more than ``min_iou``. Raises ``DataError`` where a set as a whole is missing or
    broken.
    """
    problems: list[Issue] = []
    notes: list[Issue] = []
    splits: dict[str, Annotations] = {}
    recalls: dict[str, float] = {}
    for split in SPLITS:
        annotations, findings, taken = read_annotations(config, split)
        splits[split] = annotations
        for kind, count in taken.counts.items():
            is_wrong = kind in (CUT, SCORED_OUTSIDE, SCORED_EMPTY)
            _add(problems if is_wrong else notes, split, kind, taken.by_kind[kind], count)
        for kind, count in findings.counts.items():
            _add(problems, split, kind, findings.by_kind[kind], count)
        twice = repeated_boxes(annotations)
        examples = [_box_name(annotations, row) for row in twice[:REPORTED_FINDINGS].tolist()]
        _add(problems, split, "boxes given twice", examples, len(twice))
        empty = np.flatnonzero(objects_per_image(annotations) == 0)
        examples = [annotations.path(index) for index in empty[:REPORTED_FINDINGS].tolist()]
        _add(notes, split, "images without boxes", examples, len(empty))
        absent = np.flatnonzero(np.bincount(annotations.classes, minlength=len(annotations.names)) == 0)
        _add(notes, split, "classes without boxes", [annotations.names[number] for number in absent])
        sizes = network_sizes(annotations, image_size)
        reached = recalls[split] = recall(sizes, anchors, min_iou)
        if reached < LOW_RECALL:
            sentence = f"{1 - reached:.1%} of the boxes overlap no anchor by more than {min_iou:g}. Try "
            example = sentence + fix_of_anchors(reached, min_iou)
            _add(notes, split, "boxes that no anchor fits", [example], round((1 - reached) * len(sizes)))
    try:
        check_same_classes(splits["train"], splits["val"])
    except DataError as error:
        _add(problems, BOTH, "classes that differ", [_without_fix(error)])
    readable = _check_images(splits, problems)
    return CheckedSet(splits, readable, problems, notes, recalls)


def _add(issues: list[Issue], split: str, kind: str, sentences: Sequence[str], count: int | None = None) -> None:
    count = len(sentences) if count is None else count
    if count:
        issues.append(Issue(split, kind, count, [printable(sentence) for sentence in sentences[:REPORTED_FINDINGS]]))


def _without_fix(error: DataError) -> str:
    return str(error).partition(" fix: ")[0].rstrip(".")


def _check_images(splits: dict[str, Annotations], problems: list[Issue]) -> dict[str, list[int]]:
    """Decode all images, report those that fail or have the same pixels; return the usable ones."""
    readable: dict[str, list[int]] = {}
    first: dict[bytes, tuple[str, int]] = {}  # by the hash of its pixels
    twice: defaultdict[str, list[str]] = defaultdict(list)
    for split, part in splits.items():
        readable[split], failed = [], []
        hash_of = partial(_pixel_hash, ImageSource(part, OnError.stop))
        with ThreadPoolExecutor(len(usable_cores())) as pool:  # OpenCV decodes without the GIL
            hashes = pool.map(hash_of, range(len(part)))
            for index, result in enumerate(counted(hashes, f"decoding {split}", len(part))):
                if isinstance(result, str):
                    failed.append(result)
                    continue
                readable[split].append(index)
                other, number = first.setdefault(result, (split, index))
                if (other, number) != (split, index):
                    pair = f"{splits[other].path(number)} and {part.path(index)}"
                    twice[split if other == split else BOTH].append(pair)
        _add(problems, split, "images that cannot be read", failed)
    for where, pairs in twice.items():
        kind = "images given twice, once in each set" if where == BOTH else "images given twice"
        _add(problems, where, kind, pairs)
    return readable


def _pixel_hash(source: ImageSource, index: int) -> bytes | str:
    """The hash of an image's size and pixels, or a sentence on why it cannot be read."""
    try:
        image = source.read(index)
    except DataError as error:
        return _without_fix(error)
    assert image is not None  # with stop it raises
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16, key=b"%d x %d" % image.shape[:2]).digest()


def repeated_boxes(annotations: Annotations) -> NDArray[np.int64]:
    """The rows (n,) that repeat an earlier one: same image, class, box and crowd flag."""
    images = np.repeat(np.arange(len(annotations)), np.diff(annotations.offsets))
    keys = (images, annotations.classes, annotations.crowd, *annotations.boxes_xywh.T)
    order = np.lexsort(keys)  # stable: of equal rows the earlier first
    same = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        same &= key[order[1:]] == key[order[:-1]]
    return np.sort(order[1:][same])


def _box_name(annotations: Annotations, row: int) -> str:
    """The name of a box in messages: its image, class and numbers."""
    image = int(np.searchsorted(annotations.offsets, row, side="right")) - 1
    numbers = ", ".join(f"{number:g}" for number in annotations.boxes_xywh[row])
    return f"{annotations.path(image)}: {annotations.names[annotations.classes[row]]} [{numbers}] (x, y, w, h)"


def text_report(checked: CheckedSet) -> list[str]:
    """Lines of a report: figures, classes, notes and problems; the last line is the verdict."""
    lines: list[str] = []
    for split, part in checked.splits.items():
        lines.append(
            f"{split}: {len(part):,} images, {len(part.classes):,} boxes, recall of the anchors "
            f"{checked.recall[split]:.4f}"
        )
    lines += ["", *_class_table(checked.splits)]
    for title, issues in (("notes", checked.notes), ("problems", checked.problems)):
        lines += ["", f"{title}:"] if issues else []
        for issue in issues:
            lines.append(f"  {issue.split}: {issue.kind} ({issue.count:,})")
            lines += [f"    {example}" for example in issue.examples]
            if len(issue.examples) == REPORTED_FINDINGS < issue.count:
                lines.append(f"    ... and {issue.count - REPORTED_FINDINGS:,} more")
    count = checked.num_problems
    images = sum(map(len, checked.splits.values()))
    return [*lines, "", f"{count:,} problem{'' if count == 1 else 's'} in {images:,} images"]


def _class_table(splits: dict[str, Annotations]) -> list[str]:
    """The boxes of each class in each set, most boxes first."""
    counts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for split, part in splits.items():
        boxes = np.bincount(part.classes, minlength=len(part.names)).tolist()
        for name, number in zip(part.names, boxes, strict=True):
            counts[name][split] = number
    width = min(max(map(len, ["class", *counts])), TERMINAL_COLUMNS - 12 * len(splits))
    rows = sorted(counts.items(), key=lambda row: -sum(row[1].values()))
    lines = ["class".ljust(width) + "".join(f"{split + ' boxes':>12s}" for split in splits)]
    for name, row in rows[:SHOWN_CLASSES]:
        cells = (f"{row[split]:,}" if split in row else "-" for split in splits)
        lines.append(name[:width].ljust(width) + "".join(f"{cell:>12s}" for cell in cells))
    if len(rows) > SHOWN_CLASSES:
        lines.append(f"... and {len(rows) - SHOWN_CLASSES} more classes")
    return lines


def main(config: CheckDataConfig) -> None:
    """Check the data set; exit with code 1 if there are problems."""
    if check(config).num_problems:
        sys.exit(1)
