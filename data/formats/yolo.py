"""Read YOLO label files (one txt file per image) into flat columns.

A row is ``class cx cy w h``, in fractions of the image's width and height, or a polygon
``class x1 y1 x2 y2 ...``, which stands for the box around it. Image sizes come from file headers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.config import Exif
from data.errors import DataError, shown
from data.files.headers import KNOWN_TYPES, MAX_PIXELS, TooLargeError, read_header_of
from data.files.reading import in_chunks, read_file
from data.formats.yolo_files import find_images, find_labels
from data.images.orientation import IGNORED, TURNED
from data.index.cache import stamp_files
from data.index.classes import choose_classes
from data.index.source import Files, Findings, Source, relative_name

MAX_FRACTION = 2  # larger numbers are pixels; a little above 1, a box reaches out of its image
MAX_CLASS = 2**31


class _Listed(NamedTuple):
    image: str
    label: str
    image_is_file: bool
    label_exists: bool
    label_is_file: bool


class _Read(NamedTuple):
    """The content of some images' headers and label files."""

    sizes: NDArray[np.int64]  # (n, 2) height, width; (0, 0): no file, (-1, -1): unusable
    tagged: list[str]  # images with an EXIF tag that turns them
    rows: NDArray[np.float64]  # (m, 7): position, line, class, cx, cy, w, h; m boxes in fractions
    problems: list[tuple[str, str]]  # kind and sentence of each unusable entry


def locate_yolo(
    pairs: Sequence[tuple[Path, Path]], image_root: Path, split: str, names: list[str] | None, exif: Exif
) -> Files:
    """Find the images and label files of ``pairs`` (see ``find_images``).

    ``names`` are those of classes 0, 1, ...; where a data.yaml has names, they choose and order
    among these. Raises ``DataError`` where there are no images, labels or names.
    """
    found = [find_images(place, base, split) for place, base in pairs]
    known = [part.names for part in found if part.names is not None]
    if any(other != known[0] for other in known):
        raise DataError(f"data.{split}.annotations: the data.yaml files differ in their names. fix: make them agree")
    path = pairs[0][0] if len(pairs) == 1 else image_root
    if not known and names is None:
        raise DataError(
            f"{path} holds no class names. fix: set data.names to those of classes 0, 1, ..., or name a data.yaml"
        )
    classes = list(known[0] if known else names or [])
    categories = choose_classes(dict(enumerate(classes)), names, path)
    listed: list[_Listed] = []
    digests = []
    for group in (group for part in found for group in part.groups):
        image_stamps = stamp_files(group)
        labels, label_stamps = find_labels(group)
        flags = (image_stamps.is_file, label_stamps.exists, label_stamps.is_file)
        listed += [_Listed(*item) for item in zip(group, labels, *(flag.tolist() for flag in flags), strict=True)]
        digests += [image_stamps.digest, label_stamps.digest]
    first = listed[0].image[:300]
    if not any(item.image_is_file for item in listed):
        raise DataError(
            f"none of the {len(listed)} images of {path} is there (first: {first}). "
            f"fix: set data.root or data.{split}.images to the folder that relative paths start from"
        )
    if not any(item.label_exists for item in listed):
        raise DataError(
            f"none of the {len(listed)} images of {path} has a label file (first: {listed[0].label}). "
            "fix: put the .txt files there, or set data.format to that of the set"
        )
    return Files(
        hashed=[read for part in found for read in part.read],
        stamps=digests,
        image_root=image_root,
        read=partial(read_yolo, listed, path, image_root, len(classes), categories, exif),
    )


def read_yolo(
    listed: list[_Listed], path: Path, image_root: Path, num_classes: int, categories: dict[int, str], exif: Exif
) -> Source:
    """Read sizes and boxes of the listed images, turned upright with ``exif=apply``.

    ``path`` is for messages. Image ids count from 1, category ids are the numbers in the label
    files. An object's area is that of its box. Unreadable entries go to the findings.
    """
    findings, notes, parts, start = Findings(), Findings(), list[_Read](), 0
    for part in in_chunks(partial(_read_chunk, exif=exif), listed, "reading labels"):
        part.rows[:, 0] += start
        notes.add(TURNED if exif == Exif.apply else IGNORED, part.tagged)
        for kind, sentence in part.problems:
            findings.add(kind, [sentence])
        parts.append(part)
        start += len(part.sizes)
    sizes = np.concatenate([part.sizes for part in parts])
    rows = np.concatenate([part.rows for part in parts])

    def where(row: NDArray[np.float64]) -> str:
        return f"{listed[int(row[0])].label}:{int(row[1])}"

    in_range = (rows[:, 2] >= 0) & (rows[:, 2] < num_classes)
    finite = np.isfinite(rows[:, 3:]).all(axis=1)  # the checks report the others
    in_pixels = finite & (np.abs(rows[:, 3:]) > MAX_FRACTION).any(axis=1)
    findings.add(
        "rows of a class that has no name",
        [
            f"{where(row)} is of class {row[2]:.0f}, but there are names for {num_classes} classes, from 0 on"
            for row in rows[~in_range]
        ],
    )
    findings.add(
        "rows in pixels",
        [
            f"{where(row)} holds {np.abs(row[3:]).max():g} where YOLO has fractions of the image's width and height"
            for row in rows[in_range & in_pixels]
        ],
    )
    rows = rows[in_range & ~in_pixels]
    usable = np.flatnonzero(sizes[:, 0] >= 0)
    image_of_row = rows[:, 0].astype(np.int64)
    boxes_xywh = _in_pixels(rows[:, 3:], sizes[image_of_row])
    return Source(
        path=path,
        image_root=image_root,
        file_names=[relative_name(listed[position].image, image_root) for position in usable.tolist()],
        image_ids=usable + 1,
        sizes=sizes[usable],
        box_image_ids=image_of_row + 1,
        boxes_xywh=boxes_xywh,
        box_category_ids=rows[:, 2].astype(np.int64),
        areas=boxes_xywh[:, 2] * boxes_xywh[:, 3],
        crowd=np.zeros(len(rows), dtype=bool),
        categories=categories,
        box_name=lambda position: where(rows[position]),
        findings=findings,
        notes=notes,
    )


def _in_pixels(boxes: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert cx, cy, w, h (n, 4) in fractions to left, top, width, height in pixels."""
    width_height = sizes[:, ::-1].astype(np.float64)
    with np.errstate(invalid="ignore"):  # the checks report values that are not finite
        return np.concatenate([(boxes[:, :2] - boxes[:, 2:] / 2) * width_height, boxes[:, 2:] * width_height], axis=1)


def _read_chunk(listed: Sequence[_Listed], exif: Exif) -> _Read:
    sizes = np.zeros((len(listed), 2), dtype=np.int64)
    rows: list[list[float]] = []
    tagged: list[str] = []
    problems: list[tuple[str, str]] = []
    for position, item in enumerate(listed):
        if not item.image_is_file:
            continue  # reported by the checks of images
        try:
            header, what = read_header_of(item.image), f"is not an image of a known type ({KNOWN_TYPES}), or damaged"
        except OSError as error:
            header, what = None, f"cannot be read ({error.strerror})"
        except TooLargeError:
            header, what = None, f"has more than the {MAX_PIXELS:,} pixels that are read"
        if header is None:
            sizes[position] = -1
            problems.append(("files that are no images", f"{item.image} {what}"))
            continue
        sizes[position] = header.size(header.orientation if exif == Exif.apply else 1)
        if header.orientation != 1:
            tagged.append(item.image)
        if item.label_is_file:
            found, faults = read_label_file(item.label)
            rows += [[position, *row] for row in found]
            problems += faults
        elif item.label_exists:
            problems.append(("label files that cannot be read", f"{item.label} is not a file"))
    return _Read(sizes, tagged, np.array(rows, dtype=np.float64).reshape(-1, 7), problems)


def read_label_file(path: str) -> tuple[list[list[float]], list[tuple[str, str]]]:
    """Rows of line, class, cx, cy, w, h; and kind and sentence of each unusable row."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except OSError as error:
        return [], [("label files that cannot be read", f"{path} cannot be read ({error.strerror})")]
    except UnicodeDecodeError:
        return [], [("label files that cannot be read", f"{path} is not a text file in UTF-8")]
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            values = list(map(float, fields))
        except ValueError:
            problem = f"holds {shown(line.strip())} instead of numbers separated by blanks"
        else:
            if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
                problem = f"has {len(values)} columns instead of 5: class cx cy w h"
            elif not (abs(values[0]) < MAX_CLASS and values[0].is_integer()):
                problem = f"is of class {shown(fields[0])} instead of a whole number"
            else:
                rows.append([number, *(values if len(values) == 5 else _around(values))])
                continue
        problems.append(("rows that are no boxes", f"{path}:{number} {problem}"))
    return rows, problems


def _around(values: list[float]) -> list[float]:
    """Class, cx, cy, w, h of the box around a polygon: class, x1, y1, x2, y2, ..."""
    if not all(map(math.isfinite, values)):  # min and max may ignore a NaN
        return [values[0], math.nan, math.nan, math.nan, math.nan]
    xs, ys = values[1::2], values[2::2]
    left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
    return [values[0], (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
