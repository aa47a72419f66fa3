"""Choose, check and sort what a reader returned; ``on_error`` decides on bad entries."""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data import headers, io, remote
from data.config import OnError
from data.errors import DataError
from data.io import Flags, Int64, Source
from data.layouts import class_numbers

COPY = re.compile(r"\.rf\.[0-9A-Za-z]+$")  # Roboflow names its augmented copies x_jpg.rf.<hash>.jpg
BORDER_TOLERANCE = 1.0  # pixels: common tools round up to one pixel outside
MIN_INSIDE = 1e-3  # pixels of a box, in each direction, that must lie inside its image
CUT = "boxes that reach out of their image and are cut there"  # a fault, as the next two and TINY_BOXES
SCORED_OUTSIDE = "boxes that reach out of their image and are scored unchanged"
SCORED_EMPTY = "boxes without area that are scored unchanged"
TINY = 2.0  # pixels
TINY_BOXES = f"boxes below {TINY:g} pixels, and no larger one, as if they were fractions of the image"
UNLIKE = "boxes read as [left, top, width, height] that look like "
MANY_OUTSIDE = 0.2  # of the boxes, beyond the right and lower edges: their numbers may mean something else
CROWDS = "crowds (iscrowd=1), which are not learnt"
REPEATED = "repeated boxes"  # learnt as one, and scored as several
Columns = dict[str, NDArray[np.generic]]  # of an index, by name

# A kind of finding, which entries are good, and what is wrong with one that is not.
Checks = tuple[tuple[str, Any, Callable[[int], str]], ...]  # kind, Flags of the good entries, what is wrong


def ids_by_name(names: Sequence[str]) -> list[int]:
    """Image ids: the numbers in the file names (000000000139.jpg: 139), else 1, 2, ... as sorted.

    They must be distinct and below 2**53, up to which programs with float64 keep them exactly.
    """
    stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
    if all(map(str.isdecimal, stems)):
        numbers = list(map(int, stems))
        if len(set(numbers)) == len(numbers) and max(numbers, default=0) < 2**53:
            return numbers
    ranks = np.argsort(np.argsort(np.array(names, np.str_), kind="stable"), kind="stable")
    return list(map(int, ranks + 1))


def is_for_validation(file_names: Sequence[str], share: float) -> Flags:
    """Which images (N,) are for validation: about ``share``, by a hash of the name.

    Folder and suffix do not count, so an image stays in its split when others come, go or move, and
    in any order or format of the list.
    """
    chosen = []
    for name in file_names:
        stem = COPY.sub("", os.path.splitext(os.path.basename(name))[0])  # all copies stay in one split
        text = f"0 {unicodedata.normalize('NFC', stem)}"  # macOS writes accents as separate characters
        digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        chosen.append(int.from_bytes(digest) < share * 2**64)
    return np.array(chosen, bool)


def select_split(source: Source, split: str, share: float) -> Source:
    """The ``train`` or ``val`` part of a source. Raises ``DataError`` if a part would be empty."""
    for_val = is_for_validation(source.file_names, share)
    total, count = len(for_val), int(for_val.sum())
    if total and count in (0, total):
        fix = "another share, or files of different names (folders do not count)"
        taken = f"{count} of the {total} images of {source.path} for validation"
        raise DataError(f"data.split={share:g} takes {taken}", fix)
    images = for_val if split == "val" else ~for_val
    # Boxes of unknown images stay in both parts: the checks report them.
    of_the_other = np.isin(source.box_image_ids, source.image_ids[~images])
    boxes = np.flatnonzero(~of_the_other | np.isin(source.box_image_ids, source.image_ids[images]))
    return replace(
        _with_boxes(source, boxes),
        file_names=list(compress(source.file_names, images)),
        image_ids=source.image_ids[images],
        sizes=source.sizes[images],
    )


def select_classes(source: Source, chosen: Any) -> Source:
    """Keep all images, and the boxes of ``data.classes`` alone. Raises ``DataError`` for others."""
    ids, names = list(source.categories), list(source.categories.values())
    kept = {ids[number]: names[number] for number in class_numbers(chosen, names, "data.classes")}
    # Boxes with an unknown id stay: the checks report them.
    is_other = np.isin(source.box_category_ids, list(source.categories.keys() - kept))
    counts = Counter(source.box_category_ids[is_other].tolist()).most_common(5)
    most = ", ".join(f"{source.categories[number]} {count}" for number, count in counts)
    source.notes.add("boxes that data.classes leaves out", [most] * bool(most), int(is_other.sum()))
    return replace(_with_boxes(source, np.flatnonzero(~is_other)), categories=kept)


def merge_classes(source: Source) -> Source:
    """Count all classes as the one "object", which has the id of the first."""
    known = list(source.categories)
    source.notes.add("classes that count as object", list(source.categories.values()))
    ids = np.where(np.isin(source.box_category_ids, known), known[0], source.box_category_ids)
    return replace(source, box_category_ids=ids, categories={known[0]: "object"})


def _with_boxes(source: Source, boxes: Int64) -> Source:
    columns = ("box_image_ids", "boxes_xywh", "box_category_ids", "areas", "crowd")
    chosen = {name: getattr(source, name)[boxes] for name in columns}
    name_of = source.box_name
    return replace(source, **chosen, box_name=lambda row: name_of(int(boxes[row])))


def check_source(source: Source, split: str, on_error: OnError) -> Columns:
    """Check a data set and return the columns of its index, boxes grouped by image.

    ``skip`` leaves bad entries out and collects them in ``source.findings``; otherwise the first
    one raises ``DataError``. A training set needs a box.
    """
    if not source.file_names:
        source.findings.stop()  # these say why
        raise DataError(f"{source.path} holds no images", f"check data.{split}.annotations")
    image_used = _check_images(source, split)
    if on_error != OnError.skip:
        source.findings.stop()  # before boxes of a bad image are reported as those of an unknown one
    positions, box_used = _check_boxes(source, split, on_error, image_used)
    if on_error != OnError.skip:
        source.findings.stop()
    if not image_used.any() or (split == "train" and not (box_used & ~source.crowd).any()):
        problem = f"{source.path} holds {image_used.sum()} usable images and {box_used.sum()} usable boxes"
        if source.findings.counts:
            problem += f" ({source.findings.summary()} left out, first: {source.findings.first()[0]})"
        if box_used.any():
            problem += ", all of them crowds, which teach nothing"
        raise DataError(problem, f"check data.{split}.annotations, data.{split}.images and data.classes")
    return _columns(source, image_used, positions, box_used)


def _usable(source: Source, entries: Flags, checks: Checks, describe: Callable[[int, str], str]) -> Flags:
    """Which of the ``entries`` pass all checks; the others are findings of the first they fail."""
    usable = entries.copy()
    for kind, good, problem in checks:
        rows = np.flatnonzero(usable & ~good)
        source.findings.add(kind, rows, describe=lambda row: describe(row, problem(row)))  # noqa: B023
        usable &= good
    return usable


def _check_images(source: Source, split: str) -> Flags:
    """Which images (N,) are usable."""
    count, root = len(source.file_names), source.image_root
    paths = list(map(partial(os.path.join, root), source.file_names))
    if isinstance(root, str):
        sizes = np.array(remote.sizes_of(paths), np.int64)
        exists, source.num_bytes = sizes >= 0, int(sizes[sizes > 0].sum())
    else:
        exists = io.stamp_files(paths).is_file
    source.missing_files = list(compress(paths, ~exists))
    if not exists.any():  # a wrong folder, which skipping would hide
        fix = f"set data.root or data.{split}.images to the folder that the file names start from"
        raise DataError(f"none of the {count} images of {source.path} is in {root}: {source.file_names[:3]}", fix)
    again = Counter(source.file_names) - Counter(set(source.file_names))
    source.notes.add("images that are named again", list(again.elements()))
    first = np.isin(np.arange(count), np.unique(source.image_ids, return_index=True)[1])
    # As floats: the product of two absurd sides may overflow.
    readable = source.sizes.astype(np.float64).prod(axis=1) <= headers.MAX_PIXELS

    def size(row: int) -> str:
        height, width = source.sizes[row].tolist()
        return f"is {width:,} x {height:,} pixels"

    checks: Checks = (
        ("images with an id in use", first, lambda row: f"has the image id {source.image_ids[row]} of another image"),
        ("missing image files", exists, lambda row: f"is not in {root}"),
        (
            "images without size",
            (source.sizes > 0).all(axis=1),
            lambda row: f"{size(row)}, or not an image of a known type ({headers.KNOWN_TYPES})",
        ),
        ("images that are too large", readable, lambda row: f"{size(row)}, at most {headers.MAX_PIXELS:,} are read"),
    )
    every_image = np.ones(count, bool)
    return _usable(
        source, every_image, checks, lambda row, text: f"{source.path}: {source.file_names[row][:300]} {text}"
    )


def _check_boxes(source: Source, split: str, on_error: OnError, image_used: Flags) -> tuple[Int64, Flags]:
    """The position of each box's image (M,), and which boxes are usable. Cuts boxes in place."""
    order = np.argsort(source.image_ids, kind="stable")
    positions = np.searchsorted(source.image_ids, source.box_image_ids, sorter=order)
    positions = order[np.minimum(positions, len(order) - 1)]  # of equal ids the first, which is kept
    has_image = source.image_ids[positions] == source.box_image_ids
    has_category = np.isin(source.box_category_ids, list(source.categories))
    finite = np.isfinite(source.boxes_xywh).all(axis=1) & np.isfinite(source.areas)
    start, extents = np.hsplit(source.boxes_xywh, 2)
    has_area = (extents > 0).all(axis=1) & (source.areas >= 0)
    limits = source.sizes[positions, ::-1].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        end = start + extents
        beyond = np.maximum(-start, end - limits).max(axis=1)  # pixels out of the image, negative inside
        is_inside = (np.minimum(end, limits) - np.maximum(start, 0) > MIN_INSIDE).all(axis=1)
    reaches_out = beyond > BORDER_TOLERANCE
    scored = split != "train" and on_error != OnError.stop

    def image_of(row: int) -> str:
        return f"its image of {limits[row, 0]:g} x {limits[row, 1]:g} pixels"

    def overshoot(row: int) -> str:
        return f"reaches {beyond[row]:,.2f} px out of {image_of(row)}"

    def describe(row: int, problem: str) -> str:
        image = source.file_names[positions[row]] if has_image[row] else f"image id {source.box_image_ids[row]}"
        numbers = ", ".join(f"{number:g}" for number in source.boxes_xywh[row])
        return f"{source.path}: {source.box_name(row)} of {image}, box [{numbers}] (x, y, w, h), {problem}"

    checks: Checks = (
        ("boxes of an unknown image", has_image, lambda row: "belongs to no image of the file"),
        (
            "boxes of a class not in use",
            has_category,
            lambda row: f"has category {source.box_category_ids[row]}, which is not in use",
        ),
        ("boxes that are not finite", finite, lambda row: "holds a number that is not finite"),
        ("boxes without area", has_area | scored, lambda row: "has no area"),
        ("boxes outside their image", is_inside | scored, lambda row: f"lies outside {image_of(row)}"),
        (
            "boxes that reach out of their image",
            ~reaches_out | (on_error != OnError.stop),
            lambda row: f"{overshoot(row)} (data.on_error=clip cuts it there)",
        ),
    )
    # Boxes of an image that is left out go with it.
    usable = _usable(source, ~has_image | image_used[positions], checks, describe)
    rows = np.flatnonzero(usable & reaches_out)
    rows = rows[np.argsort(-beyond[rows], kind="stable")]  # the farthest first
    kind = SCORED_OUTSIDE if scored else CUT
    source.notes.add(kind, rows, describe=lambda row: describe(row, overshoot(row)))
    boxes = source.boxes_xywh[usable]
    is_tiny = boxes[:, 2:].max(initial=0) < TINY
    other = looks_like(boxes, source.sizes[positions[usable]], source.areas[usable])
    for kind, which, problem in (
        (SCORED_EMPTY, usable & ~has_area, "has no area: no detection can match it"),
        ("boxes of images that are left out", has_image & ~image_used[positions], "goes with it"),
        (CROWDS, usable & source.crowd & (split == "train"), "is a crowd"),
        (TINY_BOXES, usable & is_tiny, "is tiny"),
        (f"{UNLIKE}{other}", usable & (other is not None), "is one"),
    ):
        source.notes.add(kind, np.flatnonzero(which), describe=partial(describe, problem=problem))
    if not scored:
        low, high = np.maximum(start[rows], 0), np.minimum(end[rows], limits[rows])
        source.boxes_xywh[rows] = np.hstack([low, high - low])
    labels = np.column_stack([positions, source.box_category_ids, source.crowd, source.boxes_xywh])
    first = np.unique(labels[usable], axis=0, return_index=True)[1]
    again = np.delete(np.flatnonzero(usable), first)
    source.notes.add(REPEATED, again, describe=partial(describe, problem="repeats another"))
    return positions, usable


def looks_like(boxes: NDArray[Any], sizes: NDArray[Any], areas: NDArray[Any]) -> str | None:
    """What the numbers of boxes (M, 4) seem to be if not left, top, width, height; else None.

    ``sizes`` (M, 2) are height and width of the images, ``areas`` (M,) those of the objects.
    """
    start, extent = np.hsplit(boxes, 2)
    limit = sizes[:, ::-1] + BORDER_TOLERANCE
    of_corners = np.isclose(areas, (extent - start).prod(axis=1)) & ~np.isclose(areas, extent.prod(axis=1))
    outside = (start + extent > limit).any(axis=1)
    if len(boxes) < 2 or not (of_corners.all() or outside.mean() > MANY_OUTSIDE):
        return None
    for name, low, high in (
        ("[left, top, right, bottom]", start, extent),
        ("[centre x, centre y, width, height]", start - extent / 2, start + extent / 2),
    ):
        if ((low >= -BORDER_TOLERANCE) & (low < high) & (high <= limit)).all():
            return name
    return None


def _columns(source: Source, image_used: Flags, positions: Int64, box_used: Flags) -> Columns:
    """The columns of the usable entries; boxes in the order of images, then of the file."""
    new_position = np.cumsum(image_used) - 1
    rows = np.flatnonzero(box_used)
    rows = rows[np.argsort(positions[rows], kind="stable")]
    boxes_per_image = np.bincount(new_position[positions[rows]], minlength=int(image_used.sum()))
    encoded = [name.encode("utf-8", "surrogateescape") for name in compress(source.file_names, image_used)]
    category_ids = np.array(list(source.categories), np.int64)
    by_id = np.argsort(category_ids)
    classes = by_id[np.searchsorted(category_ids, source.box_category_ids[rows], sorter=by_id)]
    return {
        "name_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "name_offsets": np.cumsum([0, *map(len, encoded)]),
        "image_ids": source.image_ids[image_used],
        "sizes": source.sizes[image_used].astype(np.int32),
        "offsets": np.cumsum([0, *boxes_per_image]),
        "boxes_xywh": source.boxes_xywh[rows],
        "classes": classes.astype(np.int32),
        "crowd": source.crowd[rows],
        "areas": source.areas[rows],
        "category_ids": category_ids,
    }
