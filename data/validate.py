"""Check what a reader returned and sort it into columns; ``on_error`` decides on bad entries."""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data import headers, io, remote
from data.annotations_read import Source
from data.config import OnError
from data.errors import DataError

BORDER_TOLERANCE = 1.0  # pixels: common tools round up to one pixel outside
MIN_INSIDE = 1e-3  # pixels of a box, in each direction, that must lie inside its image
CUT = "boxes that reach out of their image and are cut there"  # a fault of the source, as the next two and TINY_BOXES
SCORED_OUTSIDE = "boxes that reach out of their image and are scored unchanged"
SCORED_EMPTY = "boxes without area that are scored unchanged"
TINY = 2.0  # pixels
TINY_BOXES = f"boxes below {TINY:g} pixels, and no larger one, as if they were fractions of the image"
UNLIKE = "boxes read as [left, top, width, height] that look like "
MANY_OUTSIDE = 0.2  # of the boxes, beyond the right and lower edges: their numbers may mean something else
CROWDS = "crowds (iscrowd=1), which are not learnt"

# A kind of finding, which entries are good, and what is wrong with one that is not.
Checks = tuple[tuple[str, NDArray[np.bool_], Callable[[int], str]], ...]


def check_source(source: Source, split: str, on_error: OnError) -> dict[str, NDArray[np.generic]]:
    """Check a data set and return the columns of its index, boxes grouped by image.

    ``skip`` leaves bad entries out and collects them in ``source.findings``; otherwise the first
    one raises ``DataError``. ``source.notes`` lists boxes that reach out of their image; ``split``
    and ``on_error`` decide what becomes of them. A training set needs a box.
    """
    if not source.file_names:
        source.findings.stop()  # these say why
        raise DataError(f"{source.path} holds no images. fix: check data.{split}.annotations")
    image_used = _check_images(source, split)
    if on_error != OnError.skip:
        source.findings.stop()  # before boxes of a bad image are reported as those of an unknown one
    positions, box_used = _check_boxes(source, split, on_error, image_used)
    if on_error != OnError.skip:
        source.findings.stop()
    if not image_used.any() or (split == "train" and not (box_used & ~source.crowd).any()):
        first = f", first: {source.findings.first()[0]}" if source.findings.counts else ""
        left_out = f" ({source.findings.summary()} left out{first})" if first else ""
        left_out += ", all of them crowds, which teach nothing" * bool(box_used.any())
        raise DataError(
            f"{source.path} holds {int(image_used.sum())} usable images and {int(box_used.sum())} usable boxes"
            f"{left_out}. fix: check data.{split}.annotations, data.{split}.images and data.classes"
        )
    return _columns(source, image_used, positions, box_used)


def _usable(
    source: Source, entries: NDArray[np.bool_], checks: Checks, describe: Callable[[int, str], str]
) -> NDArray[np.bool_]:
    """Which of the ``entries`` pass all checks; the others are findings of the first they fail."""
    usable = entries.copy()
    for kind, good, problem in checks:
        rows = np.flatnonzero(usable & ~good)
        source.findings.add(kind, rows, describe=lambda row: describe(row, problem(row)))  # noqa: B023
        usable &= good
    return usable


def _check_images(source: Source, split: str) -> NDArray[np.bool_]:
    """Which images (N,) are usable."""
    count, root = len(source.file_names), source.image_root
    paths = [os.path.join(root, name) for name in source.file_names]
    if isinstance(root, str):
        sizes = np.array(remote.sizes_of(paths), dtype=np.int64)
        exists, source.num_bytes = sizes >= 0, int(sizes[sizes > 0].sum())
    else:
        exists = io.stamp_files(paths).is_file
    source.missing_files = list(compress(paths, ~exists))
    if not exists.any():  # a wrong folder, which skipping would hide
        raise DataError(
            f"none of the {count} images of {source.path} is in {root}: {source.file_names[:3]}. "
            f"fix: set data.root or data.{split}.images to the folder that the file names start from"
        )
    again = [name for name, times in Counter(source.file_names).items() for _ in range(times - 1)]
    source.notes.add("images that are named again", again)
    first = np.zeros(count, dtype=bool)
    first[np.unique(source.image_ids, return_index=True)[1]] = True
    # Each side first: the product of two absurd ones may overflow.
    readable = (source.sizes <= headers.MAX_PIXELS).all(axis=1) & (source.sizes.prod(axis=1) <= headers.MAX_PIXELS)

    def pixels(row: int) -> str:
        height, width = source.sizes[row].tolist()
        return f"is {width:,} x {height:,} pixels"

    checks: Checks = (
        ("images with an id in use", first, lambda row: f"has the image id {source.image_ids[row]} of another image"),
        ("missing image files", exists, lambda row: f"is not in {root}"),
        (
            "images without size",
            np.asarray((source.sizes > 0).all(axis=1)),
            lambda row: f"{pixels(row)}, or not an image of a known type ({headers.KNOWN_TYPES})",
        ),
        ("images that are too large", readable, lambda row: f"{pixels(row)}, at most {headers.MAX_PIXELS:,} are read"),
    )
    every_image = np.ones(count, dtype=bool)
    return _usable(source, every_image, checks, lambda row, text: f"{source.path}: {source.file_names[row]} {text}")


def _check_boxes(
    source: Source, split: str, on_error: OnError, image_used: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The position of each box's image (M,), and which boxes are usable. Cuts boxes in place."""
    order = np.argsort(source.image_ids, kind="stable")
    positions = np.searchsorted(source.image_ids, source.box_image_ids, sorter=order)
    positions = order[np.minimum(positions, len(order) - 1)]  # of equal ids the first, which is kept
    has_image = source.image_ids[positions] == source.box_image_ids
    finite = np.isfinite(source.boxes_xywh).all(axis=1) & np.isfinite(source.areas)
    has_area = (source.boxes_xywh[:, 2:] > 0).all(axis=1) & (source.areas >= 0)
    beyond, is_inside = _reach(source, positions)
    reaches_out = beyond > BORDER_TOLERANCE
    scored = np.bool_(split != "train" and on_error != OnError.stop)
    may_reach_out = np.bool_(on_error != OnError.stop)
    has_category = np.isin(source.box_category_ids, list(source.categories))
    not_in_use = f"which is not one of the {len(source.categories)} classes in use"

    def image_of(row: int) -> str:
        height, width = source.sizes[positions[row]]
        return f"its image of {width:g} x {height:g} pixels"

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
            lambda row: f"has category {source.box_category_ids[row]}, {not_in_use}",
        ),
        ("boxes that are not finite", finite, lambda row: "holds a number that is not finite"),
        ("boxes without area", has_area | scored, lambda row: "has no area"),
        ("boxes outside their image", is_inside | scored, lambda row: f"lies outside {image_of(row)}"),
        (
            "boxes that reach out of their image",
            ~reaches_out | may_reach_out,
            lambda row: f"{overshoot(row)} (data.on_error=clip cuts it there)",
        ),
    )
    # Boxes of an image that is left out go with it.
    usable = _usable(source, ~has_image | image_used[positions], checks, describe)
    rows = np.flatnonzero(usable & reaches_out)
    rows = rows[np.argsort(-beyond[rows], kind="stable")]  # the farthest first
    source.notes.add(SCORED_OUTSIDE if scored else CUT, rows, describe=lambda row: describe(row, overshoot(row)))
    for kind, which, problem in (
        (SCORED_EMPTY, usable & ~has_area, "has no area: no detection can match it"),
        ("boxes of images that are left out", has_image & ~image_used[positions], "goes with it"),
        (CROWDS, usable & source.crowd & (split == "train"), "is a crowd"),
    ):
        source.notes.add(kind, np.flatnonzero(which), describe=partial(describe, problem=problem))
    sides = source.boxes_xywh[usable, 2:]
    if len(sides) and sides.max() < TINY:
        source.notes.add(TINY_BOXES, np.flatnonzero(usable), describe=partial(describe, problem="is tiny"))
    if other := looks_like(source.boxes_xywh[usable], source.sizes[positions[usable]], source.areas[usable]):
        source.notes.add(UNLIKE + other, np.flatnonzero(usable), describe=partial(describe, problem="is one"))
    if not scored:
        start, extents = np.hsplit(source.boxes_xywh[rows], 2)
        end, start = np.minimum(start + extents, source.sizes[positions[rows], ::-1]), np.maximum(start, 0)
        source.boxes_xywh[rows] = np.concatenate([start, end - start], axis=1)
    return positions, usable


def looks_like(boxes: NDArray[Any], sizes: NDArray[Any], areas: NDArray[Any]) -> str | None:
    """What the numbers of boxes (M, 4) seem to be if not left, top, width, height; else None.

    ``sizes`` (M, 2) are height and width of the images, ``areas`` (M,) those of the objects.
    """
    start, extent = np.hsplit(boxes, 2)
    limit = sizes[:, ::-1] + BORDER_TOLERANCE
    of_corners = np.isclose(areas, (extent - start).prod(axis=1)) & ~np.isclose(areas, extent.prod(axis=1))
    if len(boxes) < 2 or not (of_corners.all() or (start + extent > limit).any(axis=1).mean() > MANY_OUTSIDE):
        return None
    corners = "[left, top, right, bottom]", start, extent
    centres = "[centre x, centre y, width, height]", start - extent / 2, start + extent / 2
    fits = (
        (name, (low >= -BORDER_TOLERANCE) & (low < high) & (high <= limit)) for name, low, high in (corners, centres)
    )
    return next((name for name, inside in fits if inside.all()), None)


def _reach(source: Source, positions: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """By how many pixels each box (M,) leaves its image, negative inside; if a part lies inside."""
    height, width = source.sizes[positions].T.astype(np.float64)
    x, y, w, h = source.boxes_xywh.T
    with np.errstate(invalid="ignore", over="ignore"):
        right, bottom = x + w, y + h
        beyond = np.maximum(np.maximum(-x, -y), np.maximum(right - width, bottom - height))
        is_inside = np.minimum(right, width) - np.maximum(x, 0) > MIN_INSIDE
        is_inside &= np.minimum(bottom, height) - np.maximum(y, 0) > MIN_INSIDE
    return beyond, is_inside


def _columns(
    source: Source, image_used: NDArray[np.bool_], positions: NDArray[np.int64], box_used: NDArray[np.bool_]
) -> dict[str, NDArray[np.generic]]:
    """The columns of the usable entries; boxes in the order of images, then of the file."""
    new_position = np.cumsum(image_used) - 1
    rows = np.flatnonzero(box_used)
    rows = rows[np.argsort(positions[rows], kind="stable")]
    boxes_per_image = np.bincount(new_position[positions[rows]], minlength=int(image_used.sum()))
    encoded = [name.encode("utf-8", "surrogateescape") for name in compress(source.file_names, image_used)]
    category_ids = np.array(list(source.categories), dtype=np.int64)
    by_id = np.argsort(category_ids)
    classes = by_id[np.searchsorted(category_ids, source.box_category_ids[rows], sorter=by_id)]
    return {
        "name_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "name_offsets": np.concatenate([[0], np.cumsum([len(name) for name in encoded])]).astype(np.int64),
        "image_ids": source.image_ids[image_used],
        "sizes": source.sizes[image_used].astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(boxes_per_image)]).astype(np.int64),
        "boxes_xywh": source.boxes_xywh[rows],
        "classes": classes.astype(np.int32),
        "crowd": source.crowd[rows],
        "areas": source.areas[rows],
        "category_ids": category_ids,
    }
