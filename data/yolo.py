"""Read YOLO label files (one txt file per image) into flat columns.

A row is ``class cx cy w h``, in fractions of the image's width and height, or a polygon
``class x1 y1 x2 y2 ...``, which stands for the box around it. Image sizes come from file headers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.config import Exif
from data.errors import DataError, shown
from data.files import in_chunks, read_file
from data.headers import IGNORED, KNOWN_TYPES, MAX_PIXELS, TURNED, TooLargeError, read_header_of
from data.index_cache import Stamps, stamp_files
from data.set_files import (
    IMAGE_SUFFIXES,
    SET_SUFFIXES,
    YAML_SUFFIXES,
    choose_classes,
    darknet_folders,
    darknet_options,
    darknet_path,
    load_yaml,
    names_of_yaml,
    read_lines,
    read_names,
)
from data.source import Files, Findings, Source, relative_name

MAX_FRACTION = 2  # larger numbers are pixels; a little above 1, a box reaches out of its image
IMAGE_FOLDERS = ("images", "JPEGImages")  # the usual ones, with a folder "labels" beside them
SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation")}  # of a data.yaml or obj.data


class _Listed(NamedTuple):
    image: str
    label: str
    image_is_file: bool
    label_exists: bool
    label_is_file: bool


class _Read(NamedTuple):  # from the headers and label files of some images
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
    lists = [find_images(place, base, split) for place, base in pairs]
    named = [part.names for part in lists if part.names is not None]
    if any(other != named[0] for other in named):
        raise DataError(f"data.{split}.annotations: the data.yaml files differ in their names. fix: make them agree")
    path = pairs[0][0] if len(pairs) == 1 else image_root
    if not named and names is None:
        raise DataError(
            f"{path} holds no class names. fix: set data.names to those of classes 0, 1, ..., or name a data.yaml"
        )
    classes = list(named[0] if named else names or [])
    categories = choose_classes(dict(enumerate(classes)), names, path)
    listed: list[_Listed] = []
    digests = []
    for group in (group for part in lists for group in part.groups):
        image_stamps = stamp_files(group)
        labels, label_stamps = find_labels(group)
        flags = (image_stamps.is_file, label_stamps.exists, label_stamps.is_file)
        listed += [_Listed(*item) for item in zip(group, labels, *(flag.tolist() for flag in flags), strict=True)]
        digests += [image_stamps.digest, label_stamps.digest]
    if not any(item.image_is_file for item in listed):
        raise DataError(
            f"none of the {len(listed)} images of {path} is there (first: {listed[0].image[:300]}). "
            f"fix: set data.root or data.{split}.images to the folder that relative paths start from"
        )
    if not any(item.label_exists for item in listed):
        raise DataError(
            f"none of the {len(listed)} images of {path} has a label file (first: {listed[0].label}). "
            "fix: put the .txt files there, or set data.format to that of the set"
        )
    return Files(
        stamps=[*digests, stamp_files([str(file) for part in lists for file in part.read]).digest],
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
    for part in in_chunks(partial(_read_chunk, num_classes=num_classes, exif=exif), listed, "reading labels"):
        part.rows[:, 0] += start
        notes.add(TURNED if exif == Exif.apply else IGNORED, part.tagged)
        for kind, sentence in part.problems:
            findings.add(kind, [sentence])
        parts.append(part)
        start += len(part.sizes)
    sizes = np.concatenate([part.sizes for part in parts])
    rows = np.concatenate([part.rows for part in parts])

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
        box_name=lambda row: f"{listed[image_of_row[row]].label}:{int(rows[row, 1])}",
        findings=findings,
        notes=notes,
    )


def _in_pixels(boxes: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert cx, cy, w, h (n, 4) in fractions to left, top, width, height in pixels."""
    width_height = sizes[:, ::-1].astype(np.float64)
    with np.errstate(invalid="ignore"):  # the checks report values that are not finite
        return np.concatenate([(boxes[:, :2] - boxes[:, 2:] / 2) * width_height, boxes[:, 2:] * width_height], axis=1)


def _read_chunk(listed: Sequence[_Listed], num_classes: int, exif: Exif) -> _Read:
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
            boxes, faults = read_label_file(item.label, num_classes)
            rows += [[position, *row] for row in boxes]
            problems += faults
        elif item.label_exists:
            problems.append(("label files that cannot be read", f"{item.label} is not a file"))
    return _Read(sizes, tagged, np.array(rows, dtype=np.float64).reshape(-1, 7), problems)


def read_label_file(path: str, num_classes: int) -> tuple[list[list[float]], list[tuple[str, str]]]:
    """Rows of line, class, cx, cy, w, h; and kind and sentence of each unusable row."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except OSError as error:
        return [], [("label files that cannot be read", f"{path} cannot be read ({error.strerror})")]
    except UnicodeDecodeError:
        return [], [("label files that cannot be read", f"{path} is not a text file in UTF-8")]
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            row, (kind, problem) = _row(line.strip(), num_classes)
            if row is None:
                problems.append((kind, f"{path}:{number} {problem}"))
            else:
                rows.append([number, *row])
    return rows, problems


def _row(line: str, num_classes: int) -> tuple[list[float] | None, tuple[str, str]]:
    """Class, cx, cy, w, h of a line; or ``None``, and kind and sentence of its fault."""
    fields, kind = line.split(), "rows that are no boxes"
    try:
        values = list(map(float, fields))
    except ValueError:
        return None, (kind, f"holds {shown(line)} instead of numbers separated by blanks")
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        return None, (kind, f"has {len(values)} columns instead of 5: class cx cy w h")
    number, *box = values
    if not number.is_integer():
        return None, (kind, f"is of class {shown(fields[0])} instead of a whole number")
    if not 0 <= number < num_classes:
        problem = f"is of class {number:.0f}, but there are names for {num_classes} classes, from 0 on"
        return None, ("rows of a class that has no name", problem)
    if not all(map(math.isfinite, box)):  # the checks report it
        return [number, math.nan, math.nan, math.nan, math.nan], ("", "")
    if len(box) > 4:  # a polygon
        left, right, top, bottom = min(box[::2]), max(box[::2]), min(box[1::2]), max(box[1::2])
        box = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    if (largest := max(map(abs, box))) > MAX_FRACTION:
        return None, ("rows in pixels", f"holds {largest:g} where YOLO has fractions of the image's width and height")
    return [number, *box], ("", "")


@dataclass
class ImageLists:
    """The images of a data.yaml, obj.data, list or folder."""

    groups: list[list[str]] = field(default_factory=list)  # absolute paths, by the folder or list they come from
    names: list[str] | None = None  # of the classes, if known
    read: list[Path] = field(default_factory=list)  # the files read to find all this


def find_images(place: Path, base: Path, split: str) -> ImageLists:
    """The images of ``place``: a data.yaml, an obj.data, a list of paths or a folder.

    Paths in a list are relative to ``base`` (Darknet) or to the list's own folder (COCO's YOLO
    lists), whichever makes more of them exist. Raises ``DataError`` for anything else.
    """
    if place.is_dir():
        return ImageLists([_images_below(place)])
    if place.suffix.lower() in YAML_SUFFIXES:
        return _from_yaml(place, base, split)
    if place.suffix.lower() == ".data":
        return _from_darknet(place, base, split)
    return ImageLists([_listed(place, [base])], read=[place])


def find_labels(images: list[str]) -> tuple[list[str], Stamps]:
    """The path of each image's label file, whether or not it exists, and the stamps of these.

    Labels lie in ``labels`` instead of the last ``images`` in the image's path, in ``labels``
    instead of ``JPEGImages``, or beside the image. The first of these that finds any label file
    holds for the whole group; if none does, the very first.
    """
    for folder in (*IMAGE_FOLDERS, None):
        labels = _label_paths(images, folder)
        stamps = stamp_files(labels)
        if stamps.exists.any():
            return labels, stamps
    labels = _label_paths(images, IMAGE_FOLDERS[0])
    return labels, stamp_files(labels)


def _label_paths(images: list[str], folder: str | None) -> list[str]:
    """The label files if they lie in ``labels`` instead of ``folder``; ``None``: beside images."""
    folders: dict[str, str] = {}  # of images to that of their labels
    labels = []
    for image in images:
        parent, _, name = image.rpartition("/")
        if parent not in folders:
            parts = parent.split("/")
            if folder in parts:
                parts[len(parts) - 1 - parts[::-1].index(folder)] = "labels"
            folders[parent] = "/".join(parts)
        labels.append(f"{folders[parent]}/{name.rpartition('.')[0] or name}.txt")
    return labels


def _images_below(folder: Path) -> list[str]:
    """All images in a folder and below, by suffix, without hidden ones, sorted by path."""

    def stop(error: OSError) -> None:
        raise error

    images, visited = [], set()
    for parent, folders, files in os.walk(os.path.normpath(folder), onerror=stop, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:  # a link to a folder above
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        images += [
            f"{parent}/{name}"
            for name in files
            if name[name.rfind(".") :].lower() in IMAGE_SUFFIXES and not name.startswith(".")
        ]
    if not images:
        raise DataError(f"{folder} holds no images. fix: name a folder that does ({' '.join(sorted(IMAGE_SUFFIXES))})")
    return sorted(images)


def _listed(path: Path, starts: list[Path]) -> list[str]:
    """The images of a list with one path per line.

    Relative paths start at the one of ``starts``, or the list's own folder, where most exist.
    """
    lines = [line.strip() for line in read_lines(path, "train.txt, with one image path per line")]
    lines = [line.replace("\\", "/") for line in lines if line]  # it may be written on Windows
    if not lines:
        raise DataError(f"{path} lists no image. fix: write one path per line, or name another list")
    bases = list(dict.fromkeys((*starts, path.parent)))
    if len(bases) > 1 and not all(line.startswith("/") for line in lines):
        # Stable: of equals the first.
        bases.sort(key=lambda base: -int(stamp_files([os.path.join(base, line) for line in lines]).is_file.sum()))
    return [os.path.normpath(os.path.join(bases[0], line)) for line in lines]


def _from_darknet(path: Path, base: Path, split: str) -> ImageLists:
    """The images of the list that Darknet's obj.data names for a split, and its class names."""
    options = darknet_options(path)
    entry = next((options[key] for key in SPLIT_KEYS[split] if options.get(key)), None)
    if entry is None:
        raise _no_images(path, "valid" if split == "val" else split)
    place = darknet_path(entry, path, base)
    if place.is_dir():
        lists = ImageLists([_images_below(place)], read=[path])
    else:
        lists = ImageLists([_listed(place, darknet_folders(path, base))], read=[path, place])
    if "names" in options:
        names_file = darknet_path(options["names"], path, base)
        lists.names, _ = read_names(names_file)
        lists.read.append(names_file)
        count = options.get("classes", len(lists.names))
        if str(count) != str(len(lists.names)):
            names = f"{names_file} holds {len(lists.names)} names"
            raise DataError(f"{path} has classes={count}, but {names}. fix: correct one of them")
    return lists


def _no_images(path: Path, key: str) -> DataError:
    more = "" if key == "train" else ", or data.split=0.1 to take a tenth of the training images"
    return DataError(f"{path} names no images under {key!r}. fix: give it a folder or a list there{more}")


def _from_yaml(path: Path, base: Path, split: str) -> ImageLists:
    """The images that a data.yaml names for a split, by its keys train, val, path and names.

    train and val hold a folder, a list file, or a YAML list of these. A relative ``path`` or entry
    starts at the file's own folder or else at ``base``; ``path`` also at the current folder, at its
    ``datasets`` or at the one beside it, as in Ultralytics' programs. Roboflow writes
    "../train/images" for a folder beside the file, so entries are also tried without "../".
    ``download`` is neither fetched nor run.
    """
    content = load_yaml(path)
    if "kpt_shape" in content:
        raise DataError(f"{path} is for key points (kpt_shape), whose rows are no boxes. fix: name a set for detection")
    entries = next((content[key] for key in SPLIT_KEYS[split] if content.get(key)), None)
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, str) for entry in entries):
        raise _no_images(path, split)
    start = content.get("path") or ""
    if not isinstance(start, str):
        raise DataError(f"{path} has path={shown(start)}. fix: make it a folder")
    folders = [path.parent, base, *(Path.cwd() / below for below in ("", "datasets", "../datasets") if start)]
    starts = list(dict.fromkeys([*(folder / start for folder in folders), path.parent, base]))
    lists = ImageLists(names=names_of_yaml(content, path), read=[path])
    for entry in entries:
        short = re.sub(r"^(\.\./)+", "", entry)
        candidates = dict.fromkeys(Path(os.path.normpath(root / name)) for name in (entry, short) for root in starts)
        place = next((candidate for candidate in candidates if candidate.exists()), None)
        if place is None or place.suffix.lower() in SET_SUFFIXES:
            places = ", ".join(str(candidate) for candidate in candidates)
            raise DataError(
                f"{path} names {entry} for {split!r}, but there is no such list or folder (looked for {places}). "
                "fix: correct its path, or get the images first"
            )
        part = find_images(place, next(filter(Path.is_dir, starts)), split)
        lists.groups += part.groups
        lists.read += part.read
    return lists
