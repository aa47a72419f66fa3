"""Read YOLO label files (one txt file per image) into flat columns.

A row is ``class cx cy w h``, in fractions of the image's width and height, or a polygon ``class x1
y1 x2 y2 ...``, which stands for its bounding box. Image sizes come from file headers. Rows of a
tracker or of key points look like polygons, but all have as many columns.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data import headers, io, layouts, remote
from data.annotations_read import Findings, LocatedSplit, Source, relative_name
from data.config import Exif
from data.errors import DataError, shown

MAX_FRACTION = 2  # larger numbers are pixels; just above 1, a box reaches out of its image
MAX_OF_POLYGON = 1.1  # tools cut polygons at the edges of the image, but for rounding
IMAGE_FOLDERS = ("images", "JPEGImages")  # the usual ones, with a folder "labels" beside them
BOX_COLUMNS, CORNER_COLUMNS = 5, 9  # of a row: class cx cy w h; class and four corners
CROSSED = 8  # stands for 9 columns whose points do not go round a convex shape, as a box with two key points
MANY_CROSSED = 0.2  # of the rows of 9 columns
COLUMNS = [np.dtype(kind) for kind in ("(2,)i8", "i8", "(4,)i4", "(4,)f8")]  # of _read_chunk
# In a data.yaml or obj.data.
SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


class _Listed(NamedTuple):
    """N images and their label files. There may be millions: no object for each."""

    images: list[str]
    labels: list[str]
    image_is_file: NDArray[np.bool_]
    label_is_file: NDArray[np.bool_]


def locate_yolo(
    pairs: Sequence[tuple[Path, remote.Place]], root: Path, split: str, names: list[str] | None, exif: Exif
) -> LocatedSplit:
    """Find the images and label files of each list, folder, data.yaml or obj.data, with its base.

    A data.yaml has a folder, a list, or several of these for each split; ``download`` is neither
    fetched nor run. Images at an address come from a list; their label files lie where they would
    if the images were below ``root``. ``names`` are those of classes 0, 1, ..., or select and order
    the names of a data.yaml. Raises ``DataError`` if there are no images, labels or names.
    """
    groups: list[list[str]] = []
    read = [place for place, _ in pairs if place.is_file()]
    named: list[list[str]] = []
    bases = {base for _, base in pairs}
    image_root = bases.pop() if len(bases) == 1 else root
    is_address = isinstance(image_root, str)
    for place, base in pairs:
        is_list = place.is_file() and not layouts.is_set_file(place)
        if isinstance(base, str) and (base.endswith(".tar") or base != image_root or not is_list):
            why = "with label files, an address goes with lists of the pictures there, and tar files with none"
            raise DataError(f"data.{split}.images: {why}. fix: data.{split}.annotations=<a list>, or a COCO json")
        if is_list or not place.is_file():
            groups.append(find_images(place, [base if isinstance(base, Path) else root]))
            continue
        content = layouts.read_set_file(place)
        named += [content["names"]] if content.get("names") else []
        starts = layouts.starts_of(place, str(content.get("path") or ""))
        for entry in _entries(content, split, place):
            images = layouts.find_place(entry, place, starts)
            read += [images] if images.is_file() else []
            groups.append(find_images(images, starts))
    path = pairs[0][0] if len(pairs) == 1 else root
    if any(other != named[0] for other in named):
        raise DataError(f"data.{split}.annotations: the data.yaml files differ in their names. fix: make them agree")
    classes = named[0] if named else names
    if classes is None:
        raise DataError(
            f"{path} holds no class names. fix: set data.names to those of classes 0, 1, ..., or to a file of them in "
            "data.root, one per line (data.names=classes.txt)"
        )
    categories = layouts.choose_classes(dict(enumerate(classes)), names, path)
    addresses, labels, are_files = list[str](), list[str](), list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]()
    digests, others = list[str](), dict[str, list[str]]()
    for group in groups:
        image_stamps = io.stamp_files(group)
        there, beside = find_labels(group)
        label_stamps = io.stamp_files(there)
        for kind, files in beside.items():
            others.setdefault(kind, []).extend(files)
        addresses += [f"{image_root}/{relative_name(path, root)}" for path in group] if is_address else group
        labels += there
        # Which are there at an address, building the index finds out.
        are_files.append((image_stamps.is_file | is_address, label_stamps.is_file))
        digests += [image_stamps.digest, label_stamps.digest]
    listed = _Listed(addresses, labels, *map(np.concatenate, zip(*are_files, strict=True)))
    if not listed.image_is_file.any():
        raise DataError(
            f"none of the {len(labels)} images of {path} is there (first: {addresses[0][:300]}). "
            f"fix: set data.root or data.{split}.images to the folder that relative paths start from"
        )
    if not listed.label_is_file.any():
        raise DataError(
            f"none of the {len(labels)} images of {path} has a label file (first: {labels[0]}). "
            "fix: put the .txt files there, or set data.format to that of the set"
        )
    return LocatedSplit(
        stamps=[*digests, io.stamp_files(list(map(str, read))).digest, str(categories), str(others)],
        image_root=image_root,
        read=lambda: read_yolo(
            listed, path, image_root, num_classes=len(classes), categories=categories, exif=exif, others=others
        ),
    )


def read_yolo(
    listed: _Listed, path: Path, image_root: remote.Place, *, num_classes: int, categories: dict[int, str],
    exif: Exif, others: dict[str, list[str]],
) -> Source:  # fmt: skip
    """Read sizes and boxes of the listed images, turned upright with ``exif=apply``.

    ``path`` is for messages; ``others`` are files that go with none of the images, by kind. Image
    ids count from 1, category ids are the numbers in the label files. The area of an object is that
    of its box. Unreadable entries become findings.
    """
    findings, notes = Findings(), Findings()
    columns = [bytearray() for _ in COLUMNS]  # they grow in place: to join parts takes twice the memory
    read = partial(_read_chunk, listed=listed, num_classes=num_classes, exif=exif)
    size = io.chunk_size(image_root)
    for part, problems in io.in_chunks(read, range(len(listed.images)), "reading labels", size):
        for column, values in zip(columns, part, strict=True):
            column.extend(values.tobytes())
        for kind, sentence in problems:
            findings.add(kind, [sentence])
    sizes, turned, rows, boxes_xywh = map(np.frombuffer, columns, COLUMNS)
    for kind, files in others.items():
        notes.add(kind, files)
    unlabelled = np.flatnonzero(listed.image_is_file & ~listed.label_is_file)
    notes.add("images without a label file, taken as background", unlabelled, describe=listed.images.__getitem__)
    notes.add(headers.TURNED, turned, describe=listed.images.__getitem__)
    images = zip(listed.images, listed.labels, listed.label_is_file.tolist(), strict=True)
    first = dict[str, str]()
    shared = [image for image, label, is_file in images if is_file and first.setdefault(label, image) != image]
    notes.add("images that have the label file of another image, too", shared)

    def box_name(row: int) -> str:
        return f"{listed.labels[rows[row, 0]]}:{rows[row, 1]}"

    is_longer = rows[:, 3] > BOX_COLUMNS
    lengths = set(rows[is_longer, 3].tolist())
    has_nine = lengths <= {CORNER_COLUMNS, CROSSED}
    crossed = (rows[:, 3] == CROSSED).sum() / max(1, is_longer.sum())
    if is_longer.sum() > 1 and (crossed > MANY_CROSSED if has_nine else len(lengths) == 1):
        count = CORNER_COLUMNS if has_nine else min(lengths)
        why = f"{count} columns, as all rows but boxes: not polygons, but a tracker's row or key points"
        unlike = np.flatnonzero(is_longer)
        findings.add("rows that are not boxes", unlike, describe=lambda row: f"{box_name(row)} has {why}")
        rows, boxes_xywh = rows[~is_longer], boxes_xywh[~is_longer]
    polygons = np.flatnonzero(rows[:, 3] > BOX_COLUMNS)
    notes.add("polygons, of which the bounding boxes are learnt", polygons, describe=box_name)
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
        crowd=np.zeros(len(rows), dtype=bool),
        categories=categories,
        box_name=box_name,
        findings=findings,
        notes=notes,
    )


def _read_chunk(
    numbers: Sequence[int], listed: _Listed, num_classes: int, exif: Exif
) -> tuple[tuple[NDArray[Any], ...], list[tuple[str, str]]]:
    """COLUMNS of some listed images; kind and sentence of each unusable entry.

    Height and width, 0: not an image; the numbers of turned images; of the rows image, line, class
    and number of columns; their boxes_xywh in pixels.
    """
    sizes, turned, rows, problems = [], [], [], []
    for number in numbers:
        # Without a header it is for the checks to report.
        header = headers.header_of(listed.images[number]) if listed.image_is_file[number] else None
        orientation = header.orientation if header and exif == Exif.apply else 1
        sizes.append(header.size(orientation) if header else (0, 0))
        turned += [number] * (orientation != 1)
        if header and listed.label_is_file[number]:
            found, wrong = read_label_file(listed.labels[number], num_classes)
            rows += [(number, *row, *sizes[-1]) for row in found]
            problems += wrong
    columns = np.array(rows, dtype=np.float64).reshape(-1, 10)
    centres, extents, width_height = columns[:, 3:5], columns[:, 5:7], columns[:, :7:-1]
    boxes_xywh = np.concatenate([(centres - extents / 2) * width_height, extents * width_height], axis=1)
    of_rows = columns[:, [0, 1, 2, 7]].astype(np.int32)
    return (np.array(sizes, dtype=np.int64), np.array(turned, dtype=np.int64), of_rows, boxes_xywh), problems


def read_label_file(path: str, num_classes: int) -> tuple[list[list[float]], list[tuple[str, str]]]:
    """Line, class, cx, cy, w, h, number of columns of rows; kind and sentence of unusable ones."""
    try:
        text = layouts.read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return [], [("label files that cannot be read", f"{path} cannot be read ({error})")]
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append([number, *_parse(line, num_classes)])
        except ValueError as error:
            problems.append(("rows that are not boxes", f"{path}:{number} holds {shown(line)}: {str(error)[:200]}"))
    return rows, problems


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
        if max(map(abs, box)) > MAX_OF_POLYGON:
            raise ValueError(f"{max(map(abs, box)):g} in a polygon of fractions, or a tracker's row or key points")
        if length == CORNER_COLUMNS:
            edges = np.diff([complex(*point) for point in zip(box[::2], box[1::2], strict=True)] * 2)[:5]
            turns = (edges[1:] * edges[:-1].conj()).imag
            length = CROSSED if turns.min() * turns.max() < 0 else length
        left, right, top, bottom = min(box[::2]), max(box[::2]), min(box[1::2]), max(box[1::2])
        box = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    if (largest := max(map(abs, box))) > MAX_FRACTION:
        raise ValueError(f"{largest:g} where YOLO has fractions of the image's width and height")
    return [number, *box, length]


def _entries(content: dict[str, Any], split: str, path: Path) -> list[str]:
    """The lists and folders that a data.yaml or obj.data names for a split."""
    content = {str(key).lower(): value for key, value in content.items()}  # CVAT writes "Train"
    entries = next((content[key] for key in SPLIT_KEYS[split] if content.get(key)), None)
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, str) for entry in entries):
        more = "" if split != "val" else ", or data.split=0.1 to take a tenth of the training images"
        raise DataError(f"{path} names no images under {split!r}. fix: give it a folder or a list there{more}")
    return entries


def find_images(place: Path, starts: Sequence[Path]) -> list[str]:
    """The absolute paths of all images below a folder, sorted, or of a list with one path per line.

    In a folder the suffix decides, and hidden files do not count. Relative paths of a list start at
    one of ``starts``, or at the list's folder: wherever most exist. They may begin with the place
    where that folder was, as CVAT's "data/". Raises ``DataError``.
    """
    if place.is_dir():
        images = io.files_below(Path(os.path.normpath(place)), layouts.IMAGE_SUFFIXES)
    else:
        lines = [line.strip().replace("\\", "/") for line in layouts.read_lines(place)]  # as Windows writes
        images = layouts.find_files([line for line in lines if line], (*starts, place.parent))
    if not images:
        suffixes = " ".join(sorted(layouts.IMAGE_SUFFIXES))
        raise DataError(f"{place} holds no images. fix: name a folder that does ({suffixes}), or a list of paths")
    return images


def find_labels(images: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The path of each image's label file, whether or not it exists, and other files by kind.

    It is in a folder ``labels`` in place of one of IMAGE_FOLDERS in the image's path, or beside the
    image, or in ``labels`` below, beside or in place of the last folders of the path: in the first
    of these with a file of the image's name. Other files are label files of no image, and files
    beside images that are of no known type.
    """
    places: dict[str, list[str]] = {}  # of images: where their label files may be
    labels_of: dict[str, dict[str, str]] = {}  # names of label files by stem, in such a place
    stems_in: dict[str, set[str]] = {}  # of the images in a folder, listed or not
    used: dict[str, set[str]] = {}  # places of labels with the folders of their images
    labels = []
    for image in images:
        parent, _, name = image.rpartition("/")
        if parent not in places:
            names = layouts.names_in(parent)
            types = [(name, os.path.splitext(name)[1].lower()) for name in names]
            stems_in[parent] = {os.path.splitext(name)[0] for name, kind in types if kind in layouts.IMAGE_SUFFIXES}
            places[parent] = _label_folders(parent)
            for place in places[parent]:
                if place not in labels_of:
                    files = [name for name in layouts.names_in(place) if name[-4:].lower() == ".txt"]
                    labels_of[place] = {file[:-4]: file for file in files if file not in layouts.CLASS_FILES}
        stem = name.rpartition(".")[0] or name
        stems_in[parent].add(stem)  # it may be at an address
        place = next((place for place in places[parent] if stem in labels_of[place]), places[parent][0])
        used.setdefault(place, set()).add(parent)
        labels.append(f"{place}/{labels_of[place].get(stem, stem + '.txt')}")
    lonely = [
        f"{place}/{file}"
        for place, parents in used.items()
        for stem, file in labels_of[place].items()
        if not any(stem in stems_in[parent] for parent in parents)
        if place not in stems_in or _has_boxes(f"{place}/{file}")  # beside images there may be any text
    ]
    kinds = {"label files of no image": sorted(lonely), layouts.UNKNOWN: layouts.unknown_files(places)}
    return labels, {kind: files for kind, files in kinds.items() if files}


def _has_boxes(path: str) -> bool:
    """Whether the first row of a text file has the numbers of a box or polygon."""
    with suppress(OSError, ValueError, DataError):
        first = next(filter(str.strip, layouts.read_file(path, 4096).decode().splitlines()), "")
        return len(list(map(float, first.split()))) >= BOX_COLUMNS
    return False


def _label_folders(parent: str) -> list[str]:
    """Where the label files of the images in a folder may be, the usual places first."""
    parts = parent.split("/")
    replaced = {at: "/".join([*parts[:at], "labels", *parts[at + 1 :]]) for at in reversed(range(1, len(parts)))}
    usual = [replaced[at] for folder in IMAGE_FOLDERS for at in replaced if parts[at] == folder]
    above, _, last = parent.rpartition("/")
    lately = list(replaced.values())[:2]  # in place of any of the last two folders
    return list(dict.fromkeys([*usual, parent, f"{parent}/labels", f"{above}/labels/{last}", *lately]))
