"""What a reader (coco.py, voc.py, yolo.py) returns: unchecked flat columns and findings."""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError, printable
from data.layouts import class_numbers
from data.remote import Place

REPORTED_FINDINGS = 20
Entries = Sequence[Any] | NDArray[Any]
ROTATED = "boxes with an attribute rotation, which are read as if it were 0"
COPY = re.compile(r"\.rf\.[0-9A-Za-z]+$")  # Roboflow names its augmented copies x_jpg.rf.<hash>.jpg


@dataclass
class Findings:
    """Bad or changed entries of a data set, counted by kind, with a sentence on the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, entries: Entries, count: int | None = None, describe: Callable[[Any], str] = str) -> None:
        """Record ``count`` findings, or one per entry, of which the first are described.

        ``kind`` names them in the plural.
        """
        if len(entries):
            self.counts[kind] = self.counts.get(kind, 0) + (len(entries) if count is None else count)
            first = self.examples.setdefault(kind, [])
            first.extend(printable(describe(entry)) for entry in entries[: REPORTED_FINDINGS - len(first)])

    def summary(self) -> str:
        """The counts, such as ``boxes without area (2), missing image files (1)``."""
        return ", ".join(f"{kind} ({count})" for kind, count in self.counts.items())

    def first(self) -> list[str]:
        """The first sentences of all kinds."""
        return [sentence for examples in self.examples.values() for sentence in examples][:REPORTED_FINDINGS]

    def stop(self) -> None:
        """Raise ``DataError`` with the first finding and the number of all, if there are any."""
        if self.counts:
            total = sum(self.counts.values())
            more = "" if total == 1 else f" ({total} bad entries in all: {self.summary()})"
            fix = "fix: correct the source, or set data.on_error=skip to leave such entries out"
            raise DataError(f"{self.first()[0]}{more}. {fix}")


@dataclass
class Source:
    """N images and M boxes in the order of their files. Boxes refer to images by id."""

    path: Path  # the annotation file, list or folder, for messages
    image_root: Place
    file_names: list[str]  # relative to image_root, absolute outside of it
    image_ids: NDArray[np.int64]  # (N,)
    sizes: NDArray[np.int64]  # (N, 2) height, width
    box_image_ids: NDArray[np.int64]  # (M,)
    boxes_xywh: NDArray[np.float64]  # (M, 4) left, top, width, height in pixels
    box_category_ids: NDArray[np.int64]  # (M,)
    areas: NDArray[np.float64]  # (M,)
    crowd: NDArray[np.bool_]  # (M,)
    categories: dict[int, str]  # the classes in order: category id to name
    box_name: Callable[[int], str]  # the box at a position in messages, such as "annotation 17"
    findings: Findings  # entries the reader could not use
    notes: Findings = field(default_factory=Findings)  # entries that were used but changed
    num_bytes: int = 0  # of all images at an address or in tar files
    missing_files: list[str] = field(default_factory=list)  # images that are not there now, and may be later


@dataclass
class LocatedSplit:
    """The files of a split, not read yet. If one changes, a new index is built."""

    stamps: list[str]  # digests of names, sizes and times
    image_root: Place
    read: Callable[[], Source]


def relative_name(path: str, root: Place) -> str:
    """An absolute path relative to ``root``; unchanged if it lies elsewhere."""
    return path.removeprefix(f"{str(root).rstrip('/')}/")


def ids_by_name(names: Sequence[str]) -> list[int]:
    """Image ids: the numbers in the file names (000000000139.jpg: 139), else 1, 2, ... as sorted.

    They are counted if the names are not distinct numbers below 2**53, up to which programs that
    read numbers of a JSON as float64 keep them exactly.
    """
    stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
    if all(map(str.isdecimal, stems)):
        numbers = list(map(int, stems))
        if len(set(numbers)) == len(numbers) and max(numbers, default=0) < 2**53:
            return numbers
    ranks = np.argsort(np.argsort(np.array(names, dtype=np.str_), kind="stable"), kind="stable")
    return [rank + 1 for rank in ranks.tolist()]


def numbered_by_name(source: Source) -> Source:
    """A source with the ids of ``ids_by_name``, as predict.py gives them to the same pictures."""
    ids = np.array(ids_by_name(source.file_names), dtype=np.int64)
    of_boxes = ids[np.searchsorted(source.image_ids, source.box_image_ids)]
    return replace(source, image_ids=ids, box_image_ids=of_boxes)


def is_for_validation(file_names: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Which images (N,) are for validation: about ``share``, by a hash of the name.

    Folder and suffix do not count, so an image stays in its split when others come, go or move, and
    in any order or format of the list.
    """
    stems = (os.path.splitext(os.path.basename(name))[0] for name in file_names)
    stems = (COPY.sub("", stem) for stem in stems)  # all copies of an image stay in one split
    # macOS writes accents as separate characters.
    texts = (f"0 {unicodedata.normalize('NFC', stem)}".encode("utf-8", "surrogateescape") for stem in stems)
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in texts]
    return np.array([value < share * 2**64 for value in hashes], dtype=bool)


def select_split(source: Source, split: str, share: float) -> Source:
    """The ``train`` or ``val`` part of a source. Raises ``DataError`` if a part would be empty."""
    for_val = is_for_validation(source.file_names, share)
    total, count = len(for_val), int(for_val.sum())
    if total and count in (0, total):
        raise DataError(
            f"data.split={share:g} takes {count} of the {total} images of {source.path} for validation. "
            "fix: another share, or files of different names (folders do not count)"
        )
    images = np.flatnonzero(for_val if split == "val" else ~for_val)
    # Boxes of unknown images stay in both parts: the checks report them.
    of_the_other = np.isin(source.box_image_ids, np.delete(source.image_ids, images))
    boxes = np.flatnonzero(~of_the_other | np.isin(source.box_image_ids, source.image_ids[images]))
    return replace(
        _with_boxes(source, boxes),
        file_names=[source.file_names[row] for row in images.tolist()],
        image_ids=source.image_ids[images],
        sizes=source.sizes[images],
    )


def select_classes(source: Source, chosen: Any) -> Source:
    """Keep the boxes of ``data.classes`` only, and all images.

    Raises ``DataError`` if the set lacks a class.
    """
    by_id = list(source.categories.items())
    kept = dict(by_id[number] for number in class_numbers(chosen, [name for _, name in by_id], "data.classes"))
    # Boxes with an unknown id stay: the checks report them.
    is_other = np.isin(source.box_category_ids, list(source.categories.keys() - kept))
    counts = Counter(source.box_category_ids[is_other].tolist()).most_common(5)
    most = ", ".join(f"{source.categories[number]} {count}" for number, count in counts)
    source.notes.add("boxes that data.classes leaves out", [most] * bool(most), int(is_other.sum()))
    return replace(_with_boxes(source, np.flatnonzero(~is_other)), categories=kept)


def _with_boxes(source: Source, boxes: NDArray[np.int64]) -> Source:
    """A source with only the boxes of these rows."""
    name_of = source.box_name
    return replace(
        source,
        box_image_ids=source.box_image_ids[boxes],
        boxes_xywh=source.boxes_xywh[boxes],
        box_category_ids=source.box_category_ids[boxes],
        areas=source.areas[boxes],
        crowd=source.crowd[boxes],
        box_name=lambda row: name_of(int(boxes[row])),
    )
