"""Check a whole data set: labels, every image, and train against val. Writes nothing.

*Problems* are wrong entries. *Notes* may be intended but are worth a look: empty images, images
that look alike, classes without boxes, boxes or anchors that do not suit the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.audit.anchor_fit import Sizes
from data.audit.boxes import box_name, boxes_given_twice, statistics
from data.audit.duplicates import alike, same_pixels
from data.audit.images import ImageFacts, check_images
from data.audit.summary import LOW_RECALL, fix_of_anchors, objects_per_image
from data.config import DataConfig
from data.errors import DataError, printable
from data.index.annotations import Annotations, check_same_classes, read_annotations
from data.index.source import REPORTED_FINDINGS, Findings
from data.index.validate import CUT, SCORED_EMPTY, SCORED_OUTSIDE

SPLITS = ("train", "val")
BOTH = "train and val"
SMALL_SHARE = 0.01  # of boxes below the smallest stride; more are worth a note


@dataclass(frozen=True)
class Network:
    """What the check needs to know about the network."""

    name: str
    image_size: int  # side in pixels in training
    strides: list[int]
    anchors: Sizes  # (k, 2) width, height in pixels
    min_iou: float  # an anchor learns the boxes that overlap it by more


@dataclass(frozen=True)
class CheckedSet:
    """The result of a check; ``report`` is plain data with fixed keys."""

    report: dict[str, Any]
    splits: dict[str, Annotations]
    readable: dict[str, list[int]]  # positions of usable images
    pairs: list[tuple[tuple[str, int], tuple[str, int]]]  # split and position of some equal or similar images


class _Issues:
    """Entries counted by kind, with sentences for the first ones."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def add(self, split: str, kind: str, sentences: Sequence[str], count: int | None = None) -> None:
        count = len(sentences) if count is None else count
        if count:
            examples = [printable(sentence) for sentence in sentences[:REPORTED_FINDINGS]]
            self.entries.append({"split": split, "kind": kind, "count": count, "examples": examples})


def check_dataset(
    config: DataConfig, network: Network, threads: int | None, progress: Callable[[str, int], Callable[[int], None]]
) -> CheckedSet:
    """Read all labels and decode all images of both sets.

    ``progress(split, images)`` is called once for each set; the function that it returns is called
    with the number of images just done. Raises ``DataError`` where a set as a whole is missing or
    broken.
    """
    problems, notes = _Issues(), _Issues()
    splits: dict[str, Annotations] = {}
    facts: list[ImageFacts] = []
    for split in SPLITS:
        annotations, findings, taken = read_annotations(config, split)
        splits[split] = annotations
        for kind, count in taken.counts.items():
            issues = problems if kind in (CUT, SCORED_OUTSIDE, SCORED_EMPTY) else notes
            issues.add(split, kind, taken.by_kind[kind], count)
        _check_labels(split, annotations, findings, problems, notes)
    for split, annotations in splits.items():
        facts.append(check_images(annotations, threads, progress(split, len(annotations))))
        by_kind: defaultdict[str, list[str]] = defaultdict(list)
        for _, kind, sentence in facts[-1].problems:
            by_kind[kind].append(sentence)
        for kind, sentences in by_kind.items():
            problems.add(split, kind, sentences)
    try:
        check_same_classes(splits["train"], splits["val"])
    except DataError as error:
        problems.add(BOTH, "classes that differ", [str(error).partition(" fix: ")[0].rstrip(".")])
    pairs = _compare_images(splits, _joined(facts), problems, notes)
    figures = {split: _statistics(split, annotations, network, notes) for split, annotations in splits.items()}
    report = {
        "data": config.name,
        "root": config.root,
        "network": {
            "name": network.name,
            "image_size": network.image_size,
            "strides": network.strides,
            "anchors": network.anchors.tolist(),
            "min_iou": network.min_iou,
        },
        "num_images": sum(map(len, splits.values())),
        "num_problems": sum(entry["count"] for entry in problems.entries),
        "problems": problems.entries,
        "notes": notes.entries,
        "splits": figures,
    }
    readable = {split: np.flatnonzero(part.readable).tolist() for split, part in zip(splits, facts, strict=True)}
    return CheckedSet(report, splits, readable, pairs)


def _check_labels(split: str, annotations: Annotations, findings: Findings, problems: _Issues, notes: _Issues) -> None:
    for kind, count in findings.counts.items():
        problems.add(split, kind, findings.by_kind[kind], count)
    twice = boxes_given_twice(annotations)
    examples = [box_name(annotations, row) for row in twice[:REPORTED_FINDINGS].tolist()]
    problems.add(split, "boxes given twice", examples, len(twice))
    empty = np.flatnonzero(objects_per_image(annotations) == 0)
    examples = [annotations.path(index) for index in empty[:REPORTED_FINDINGS].tolist()]
    notes.add(split, "images without boxes", examples, len(empty))
    absent = np.flatnonzero(np.bincount(annotations.classes, minlength=len(annotations.names)) == 0)
    notes.add(split, "classes without boxes", [annotations.names[number] for number in absent])


def _statistics(split: str, annotations: Annotations, network: Network, notes: _Issues) -> dict[str, Any]:
    figures = statistics(annotations, network.image_size, network.strides, network.anchors, network.min_iou)
    smallest = min(network.strides)
    small = figures["longer_side_below_stride"][str(smallest)]
    if small is not None and small > SMALL_SHARE:
        sentence = f"{small:.1%} of the boxes are smaller than {smallest} pixels, the smallest stride, in images of "
        sentence += f"{network.image_size}. A larger image_size helps"
        notes.add(split, "small boxes", [sentence], round(small * figures["boxes"]))
    recall = figures["recall"]
    if recall is not None and recall < LOW_RECALL:
        sentence = f"{1 - recall:.1%} of the boxes overlap no anchor of {network.name} by more than "
        sentence += f"{network.min_iou:g}. Try {fix_of_anchors(recall, network.min_iou)}"
        notes.add(split, "boxes that no anchor fits", [sentence], round((1 - recall) * figures["boxes"]))
    return figures


def _compare_images(
    splits: dict[str, Annotations], facts: ImageFacts, problems: _Issues, notes: _Issues
) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Report equal and similar images, within and across the sets; return some pairs of them."""
    first_of_val = len(splits["train"])

    def place(position: int) -> tuple[str, int]:
        in_val = position >= first_of_val
        return SPLITS[in_val], position - first_of_val * in_val

    twice: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for group in same_pixels(facts):
        parts = ([i for i in group if i < first_of_val], [i for i in group if i >= first_of_val])
        for split, part in zip(SPLITS, parts, strict=True):
            twice[split] += [(part[0], other) for other in part[1:]]
        if all(parts):
            twice[BOTH] += [(parts[0][0], other) for other in parts[1]]
    near: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for first, second in alike(facts).tolist():
        crosses = first < first_of_val <= second
        near[BOTH if crosses else place(first)[0]].append((first, second))
    pairs = []
    for issues, kind, found in ((problems, "images given twice", twice), (notes, "images that look alike", near)):
        for split in (*SPLITS, BOTH):
            shown = [(place(first), place(second)) for first, second in found[split][:REPORTED_FINDINGS]]
            name = f"{kind}, once in each set" if split == BOTH else kind
            sentences = [" and ".join(splits[part].path(index) for part, index in pair) for pair in shown]
            issues.add(split, name, sentences, len(found[split]))
            pairs += shown
    return pairs


def _joined(facts: Iterable[ImageFacts]) -> ImageFacts:
    """Concatenate the facts of all sets."""
    parts = list(facts)
    arrays = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in ("readable", "pixel_hash", "look", "colour")
    }
    return ImageFacts(**arrays, problems=[])
