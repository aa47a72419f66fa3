"""Read YOLO label files (one txt file per image) into flat columns.

A row is ``class cx cy w h``, in fractions of the image's width and height, or a polygon ``class x1
y1 x2 y2 ...``, which stands for its bounding box. Rows of a tracker or of key points look like
polygons, but all have as many columns.
"""

import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data import headers, io, layouts, remote
from data.config import DataConfig, Exif, Pair
from data.errors import DataError, shown
from data.io import Findings, Flags, LocatedSplit, Source, relative_name

MAX_FRACTION = 2  # larger numbers are pixels; just above 1, a box reaches out of its image
MAX_OF_POLYGON = 1.1  # tools cut polygons at the edges of the image, but for rounding
IMAGE_FOLDERS = ("images", "JPEGImages")  # the usual ones, with a folder "labels" beside them
BOX_COLUMNS, CORNER_COLUMNS = 5, 9  # of a row: class cx cy w h; class and four corners
CROSSED = 8  # stands for 9 columns whose points do not go round a convex shape, as a box with two key points
MANY_CROSSED = 0.2  # of the rows of 9 columns
COLUMNS = [np.dtype(kind) for kind in ("(2,)i8", "i8", "(4,)i4", "(4,)f8")]  # of _read_chunk
# In a data.yaml or obj.data.
SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}

Problems = list[tuple[str, str]]  # of unusable entries: kind and sentence


class _Listed(NamedTuple):
    """N images and their label files. There may be millions: no object for each."""

    images: list[str]
    labels: list[str]
    image_is_file: Flags
    label_is_file: Flags
    others: dict[str, list[str]]  # files that go with none of the images, by kind
    num_classes: int  # that label files may name
    seconds: dict[str, str]  # other label files of the images, each with the one that is read


def locate_yolo(
    config: DataConfig, split: str, pairs: Sequence[Pair], root: Path, image_root: remote.Place
) -> LocatedSplit:
    """Find the images and label files of each list, folder, data.yaml or obj.data, with its base.

    Images at an address come from a list; their label files lie where they would if the images were
    below ``root``. Raises ``DataError`` if there are no images, labels or names.
    """
    images, read = [], []
    named, left_out = [], list[str]()
    for place, base in pairs:
        is_set = place.is_file() and layouts.is_set_file(place)
        if isinstance(base, str) and (base.endswith(".tar") or base != image_root or is_set or place.is_dir()):
            why = "with label files, an address goes with lists of the pictures there, and tar files with none"
            raise DataError(f"data.{split}.images: {why}", f"data.{split}.annotations=<a list>, or a COCO json")
        places, starts = [place], [base if isinstance(base, Path) else root]
        if is_set:
            content = layouts.read_set_file(place)
            named += [content["names"]] if content.get("names") else []
            starts = layouts.starts_of(place, str(content.get("path") or ""))
            places = [layouts.find_place(entry, place, starts) for entry in _entries(content, split, place)]
        read += [place, *places]
        for each in places:
            images += find_images(each, starts, left_out)
    path = pairs[0][0] if len(pairs) == 1 else root
    if any(other != named[0] for other in named):
        raise DataError(f"data.{split}.annotations: the data.yaml files differ in their names", "make them agree")
    classes = named[0] if named else config.names
    if classes is None:
        names = "to a file of them in data.root, one per line (data.names=classes.txt)"
        raise DataError(f"{path} holds no class names", f"set data.names to those of classes 0, 1, ..., or {names}")
    categories = layouts.choose_classes(dict(enumerate(classes)), config.names, path)
    labels, seconds, others = find_labels(images)
    others[io.OF_SYSTEM] = left_out
    image_stamps, label_stamps = io.stamp_files(images), io.stamp_files([*labels, *seconds])
    image_is_file, label_is_file = image_stamps.is_file, label_stamps.is_file[: len(labels)]
    if isinstance(image_root, str):  # which are there, building the index finds out
        images = [f"{image_root}/{relative_name(image, root)}" for image in images]
        image_is_file = np.ones(len(images), bool)
    none = f"none of the {len(labels)} images of {path}"
    if not image_is_file.any():
        fix = f"set data.root or data.{split}.images to the folder that relative paths start from"
        raise DataError(f"{none} is there (first: {images[0][:300]})", fix)
    if not label_is_file.any():
        fix = "put the .txt files there, or set data.format to that of the set"
        raise DataError(f"{none} has a label file (first: {labels[0]})", fix)
    listed = _Listed(images, labels, image_is_file, label_is_file, others, len(classes), seconds)
    lists = io.stamp_files([str(place) for place in read if place.is_file()])
    stamps = [image_stamps.digest, label_stamps.digest, lists.digest, str(categories), str(others)]
    return LocatedSplit(stamps, image_root, lambda: read_yolo(listed, path, image_root, categories, config.exif))


def read_yolo(listed: _Listed, path: Path, image_root: remote.Place, categories: dict[int, str], exif: Exif) -> Source:
    """Read sizes and boxes of the listed images, turned upright with ``exif=apply``.

    Image ids count from 1, category ids are the numbers in the label files.
    """
    findings, notes = Findings(), Findings()
    columns = [bytearray() for _ in COLUMNS]  # they grow in place: to join parts takes twice the memory
    read = partial(_read_chunk, listed=listed, exif=exif)
    for part, problems in io.in_chunks(read, range(len(listed.images)), "reading labels", image_root):
        for column, values in zip(columns, part, strict=True):
            column.extend(values.tobytes())
        for kind, sentence in problems:
            findings.add(kind, [sentence])
    sizes, turned, rows, boxes_xywh = map(np.frombuffer, columns, COLUMNS)
    for kind, files in listed.others.items():
        notes.add(kind, files)
    differing = [pair for pair in listed.seconds.items() if _differ(*pair, listed.num_classes)]
    says = "{0[0]} is for the image of {0[1]}, too, and differs".format
    findings.add("second label files that differ", differing, describe=says)
    image_name = listed.images.__getitem__
    unlabelled = np.flatnonzero(listed.image_is_file & ~listed.label_is_file)
    notes.add("images without a label file, taken as background", unlabelled, describe=image_name)
    notes.add(headers.TURNED, turned, describe=image_name)
    image_of = dict(zip(reversed(listed.labels), reversed(listed.images), strict=True))  # the first of several
    of_another = [image_of[label] != image for image, label in zip(listed.images, listed.labels, strict=True)]
    shared = np.flatnonzero(of_another & listed.label_is_file)
    notes.add("images that have the label file of another image, too", shared, describe=image_name)

    def box_name(row: int) -> str:
        return f"{listed.labels[rows[row, 0]]}:{rows[row, 1]}"

    longer = np.flatnonzero(rows[:, 3] > BOX_COLUMNS)
    lengths = rows[longer, 3].tolist()
    kinds = set(lengths)
    are_alike = len(kinds) == 1
    if kinds <= {CORNER_COLUMNS, CROSSED}:
        are_alike = lengths.count(CROSSED) > MANY_CROSSED * len(lengths)
    if are_alike and len(longer) > 1:
        count = CORNER_COLUMNS if CROSSED in kinds else kinds.pop()
        why = f"{count} columns, as all rows but boxes: not polygons, but a tracker's row or key points"
        findings.add("rows that are not boxes", longer, describe=lambda row: f"{box_name(row)} has {why}")
        rows, boxes_xywh = np.delete(rows, longer, axis=0), np.delete(boxes_xywh, longer, axis=0)
    else:
        notes.add("polygons, of which the bounding boxes are learnt", longer, describe=box_name)
    return Source(
        path=path,
        image_root=image_root,
        file_names=[relative_name(image, image_root) for image in listed.images],
        image_ids=np.arange(1, len(sizes) + 1),
        sizes=sizes,
        box_image_ids=rows[:, 0].astype(np.int64) + 1,
        boxes_xywh=boxes_xywh,
        box_category_ids=rows[:, 2].astype(np.int64),
        areas=boxes_xywh[:, 2] * boxes_xywh[:, 3],
        crowd=np.zeros(len(rows), bool),
        categories=categories,
        box_name=box_name,
        findings=findings,
        notes=notes,
    )


def _read_chunk(numbers: Sequence[int], listed: _Listed, exif: Exif) -> tuple[tuple[NDArray[Any], ...], Problems]:
    """Of some listed images: COLUMNS, and kind and sentence of each unusable entry.

    Height and width, 0: not an image; the numbers of turned images; of the rows image, line, class
    and number of columns; their boxes_xywh in pixels.
    """
    sizes, turned = [], []
    rows, problems = [], []
    for number in numbers:
        # Without a header it is for the checks to report.
        header = headers.header_of(listed.images[number]) if listed.image_is_file[number] else None
        orientation = header.orientation if header and exif == Exif.apply else 1
        sizes.append(header.size(orientation) if header else (0, 0))
        turned += [number] * (orientation != 1)
        if header and listed.label_is_file[number]:
            found, wrong = read_label_file(listed.labels[number], listed.num_classes)
            rows += [(number, *row, *sizes[-1]) for row in found]
            problems += wrong
    columns = np.array(rows, np.float64).reshape(-1, 10)
    centres, extents = columns[:, 3:5], columns[:, 5:7]
    width_height = columns[:, :7:-1]
    boxes_xywh = np.hstack([(centres - extents / 2) * width_height, extents * width_height])
    of_rows = columns[:, [0, 1, 2, 7]].astype(np.int32)
    return (np.array(sizes, np.int64), np.array(turned, np.int64), of_rows, boxes_xywh), problems


def read_label_file(path: str, num_classes: int) -> tuple[list[list[float]], Problems]:
    """Line, class, cx, cy, w, h, number of columns of rows; kind and sentence of unusable ones."""
    try:
        text = layouts.text_of(layouts.read_file(path), path)
    except (OSError, DataError) as error:
        why = error.sentence if isinstance(error, DataError) else f"{path} cannot be read ({error})"
        return [], [("label files that cannot be read", why)]
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append([number, *_parse(line, num_classes)])
        except ValueError as error:
            problems.append(("rows that are not boxes", f"{path}:{number} holds {shown(line)}: {str(error)[:200]}"))
    return rows, problems


def _differ(second: str, label: str, num_classes: int) -> bool:
    """Whether a second label file has other boxes; any text may lie beside an image."""
    (theirs, wrong), (ours, _) = read_label_file(second, num_classes), read_label_file(label, num_classes)
    if wrong and not theirs:
        return False
    return sorted(row[1:] for row in ours) != sorted(row[1:] for row in theirs)


def _parse(line: str, num_classes: int) -> list[float]:
    """Class, cx, cy, w, h and number of columns of a line. Raises ``ValueError``."""
    number, *box = map(float, line.split())
    length = len(box) + 1
    if len(box) != 4 and (len(box) < 6 or len(box) % 2):
        raise ValueError(f"{length} columns instead of {BOX_COLUMNS}, class cx cy w h")
    if number % 1 or not 0 <= number < num_classes:  # of NaN, number % 1 is NaN
        raise ValueError(f"class {number:g}, but there are names for {num_classes} classes, from 0 on")
    if not all(map(math.isfinite, box)):
        raise ValueError("a number that is not finite")
    if len(box) > 4:  # a polygon
        largest = max(map(abs, box))
        if largest > MAX_OF_POLYGON:
            raise ValueError(f"{largest:g} in a polygon of fractions, or a tracker's row or key points")
        if length == CORNER_COLUMNS:
            edges = np.diff([complex(*point) for point in zip(box[::2], box[1::2], strict=True)] * 2)[:5]
            turns = (edges[1:] * edges[:-1].conj()).imag
            length = CROSSED if turns.min() * turns.max() < 0 else length
        left, right = min(box[::2]), max(box[::2])
        top, bottom = min(box[1::2]), max(box[1::2])
        box = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    if (largest := max(map(abs, box))) > MAX_FRACTION:
        raise ValueError(f"{largest:g} where YOLO has fractions of the image's width and height")
    return [number, *box, length]


def _entries(content: dict[str, Any], split: str, path: Path) -> list[str]:
    """The lists and folders that a data.yaml or obj.data names for a split."""
    given = {str(key).lower(): value for key, value in content.items()}  # CVAT writes "Train"
    entries = next((given[key] for key in SPLIT_KEYS[split] if given.get(key)), None)
    entries = entries if isinstance(entries, list) else [entries]
    if set(map(type, entries)) != {str}:
        more = "" if split != "val" else ", or data.split=0.1 to take a tenth of the training images"
        raise DataError(f"{path} names no images under {split!r}", f"give it a folder or a list there{more}")
    return entries


def find_images(place: Path, starts: Sequence[Path], left_out: list[str]) -> list[str]:
    """The absolute paths of all images below a folder, sorted, or of a list with one path per line.

    Relative paths of a list start at one of ``starts``, or at the list's folder: wherever most
    exist. They may begin with the place where that folder was, as CVAT's "data/".
    """
    if place.is_dir():
        images = io.files_below(Path(os.path.normpath(place)), layouts.IMAGE_SUFFIXES, left_out)
    else:
        lines = [line.strip().replace("\\", "/") for line in layouts.read_lines(place)]  # as Windows writes
        names, bases = [line for line in lines if line], (*starts, place.parent)
        dropped, counts = layouts.count_files(names, bases)
        base = bases[counts.index(max(counts))]
        images = [os.path.normpath(os.path.join(base, layouts.tail(name, dropped))) for name in names]
    if not images:
        suffixes = " ".join(sorted(layouts.IMAGE_SUFFIXES))
        raise DataError(f"{place} holds no images", f"name a folder that does ({suffixes}), or a list of paths")
    return images


def find_labels(images: list[str]) -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """The path of each image's label file, whether or not it exists, and other files by kind.

    It is in the first place of ``_label_folders`` with a file of the image's name; returned with it
    is this file for each second one.
    """
    names_in, places_of = cache(_label_names), cache(_label_folders)
    stems_in = defaultdict[str, set[str]](set)  # of the images in a folder, listed or not
    used = defaultdict[str, set[str]](set)  # places of labels: the stems of their images
    labels, seconds = [], dict[str, str]()
    for image in images:
        parent, _, name = image.rpartition("/")
        stem = _stem(name)
        stems_in[parent].add(stem)
        found = [f"{place}/{name}" for place in places_of(parent) for name in names_in(place).get(stem, ())]
        labels.append(found[0] if found else f"{places_of(parent)[0]}/{stem}.txt")
        seconds |= dict.fromkeys(found[1:], labels[-1])
        used[os.path.dirname(labels[-1])].add(parent)
    for parent, stems in stems_in.items():
        stems.update(map(_stem, filter(layouts.is_image, layouts.names_in(parent))))
    lonely = []
    for place, parents in used.items():
        of_images = set().union(*(stems_in[parent] for parent in parents))
        by_stem = names_in(place)
        files = [f"{place}/{file}" for stem in by_stem.keys() - of_images for file in by_stem[stem]]
        # Beside images there may be any text.
        lonely += [file for file in files if place not in stems_in or read_label_file(file, sys.maxsize)[0]]
    for label in labels:  # that of another image is no second one
        seconds.pop(label, None)
    others = {"label files of no image": sorted(lonely), layouts.UNKNOWN: layouts.unknown_files(stems_in)}
    return labels, seconds, others


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _label_names(folder: str) -> dict[str, list[str]]:
    """The label files in a folder by their names without suffix: a.txt, and perhaps a.TXT."""
    by_stem = defaultdict[str, list[str]](list)
    for name in sorted(layouts.names_in(folder), reverse=True):
        if name.lower().endswith(".txt") and name not in layouts.CLASS_FILES:
            by_stem[_stem(name)].append(name)
    return by_stem


def _label_folders(parent: str) -> list[str]:
    """Where the label files of the images in a folder may be, the usual places first.

    In ``labels`` in place of one of IMAGE_FOLDERS, beside the images, or in ``labels`` below,
    beside or in place of the last folders.
    """
    parts = parent.split("/")
    deepest_first = range(len(parts) - 1, 0, -1)[: layouts.MOST_FOLDERS]
    replaced = {at: "/".join([*parts[:at], "labels", *parts[at + 1 :]]) for at in deepest_first}
    usual = [replaced[at] for folder in IMAGE_FOLDERS for at in replaced if parts[at] == folder]
    above, _, last = parent.rpartition("/")
    lately = list(replaced.values())[:2]  # in place of any of the last two folders
    return list(dict.fromkeys([*usual, parent, f"{parent}/labels", f"{above}/labels/{last}", *lately]))
