"""Convert the rows of a CSV file to a COCO json of the images in a folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.files.headers import IMAGE_SUFFIXES, read_headers
from data.files.near_files import NearFiles
from data.formats.csv_boxes import Row
from data.index.classes import read_names


def to_coco(rows: Sequence[Row], csv_path: Path, images: Path, names: Path | None, empty: bool) -> dict[str, Any]:
    """The content of a COCO json: images sorted by name, annotations numbered by their rows.

    ``names`` orders the classes, see ``class_order``; otherwise they are sorted, numbers by value.
    ``empty`` includes images of the folder that no row names. Images are turned by their EXIF tag,
    as browsers show them, unless the rows give their stored size. Raises ``DataError`` naming the
    row that does not fit.
    """
    files = _Images(images)
    file_of = {row.image: "" for row in rows}
    for row in rows:
        file_of[row.image] = file_of[row.image] or files.find(row, csv_path)
    listed = sorted({*file_of.values(), *(files.all if empty else ())})
    image_ids = {name: number for number, name in enumerate(listed, start=1)}
    sizes = _sizes(rows, csv_path, file_of, images, listed)
    by_name = class_order([row.class_name for row in rows if row.class_name is not None], names)
    boxes = [row for row in rows if row.xywh is not None]
    are_fractions = all(0 <= value <= 1 for row in boxes for value in row.xywh or ())
    annotations = []
    for row in boxes:
        assert row.class_name is not None and row.xywh is not None
        name = file_of[row.image]
        height, width = sizes[name]
        if height <= 0:
            raise DataError(
                f"{csv_path}:{row.number} names {name}, which is not an image of a known type. fix: replace it"
            )
        if row.class_name not in by_name:
            raise DataError(f"{csv_path}:{row.number} is of class {row.class_name!r}, which {names} lacks. fix: add it")
        left, top, box_width, box_height = row.xywh
        if are_fractions:
            left, top, box_width, box_height = left * width, top * height, box_width * width, box_height * height
        if left >= width or top >= height or left + box_width <= 0 or top + box_height <= 0:
            size = f"{width} x {height} pixels"
            raise DataError(f"{csv_path}:{row.number} has a box outside {name} of {size}. fix: correct the row")
        annotations.append(
            {
                "id": row.number,
                "image_id": image_ids[name],
                "category_id": by_name[row.class_name][0],
                "bbox": [left, top, box_width, box_height],
                "area": box_width * box_height,
                "iscrowd": int(row.crowd),
            }
        )
    return {
        "images": [
            {"id": image_ids[name], "file_name": name, "height": sizes[name][0], "width": sizes[name][1]}
            for name in listed
        ],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in sorted(set(by_name.values()))],
    }


def _sizes(
    rows: Sequence[Row], csv_path: Path, file_of: dict[str, str], images: Path, listed: list[str]
) -> dict[str, tuple[int, int]]:
    """Height and width of each listed image, turned by its tag unless rows give the stored size."""
    headers = read_headers([f"{images}/{name}" for name in listed]).tolist()
    stored = {name: (height, width) for name, (height, width, _) in zip(listed, headers, strict=True)}
    sizes = {
        name: (width, height) if tag > 4 else (height, width)
        for name, (height, width, tag) in zip(listed, headers, strict=True)
    }
    for row in rows:
        name = file_of[row.image]
        if row.size is not None and row.size != sizes[name] and stored[name][0] > 0:
            if row.size != stored[name]:
                there, here = (f"{width} x {height}" for height, width in (row.size, stored[name]))
                problem = f"gives {name} {there} pixels, but the file has {here}"
                raise DataError(f"{csv_path}:{row.number} {problem}. fix: use the image that belongs to the row")
            sizes[name] = row.size
    return sizes


def class_order(found: Sequence[str], names: Path | None) -> dict[str, tuple[int, str]]:
    """Category id (from 1) and name of each class, by its name in the rows.

    ``names`` is a file of class names, or a CSV of two columns. ``name,0`` gives the order
    (keras-retinanet). ``/m/01g317,Person`` gives the name of a label (Open Images); classes that
    do not occur are left out, the others keep the file's order.
    """
    if names is None:
        ordered = sorted(set(found), key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    elif names.suffix.lower() != ".csv":
        ordered, _ = read_names(names)
    else:
        pairs = _pairs_of(names)
        if not all(second.strip().isdecimal() for _, second in pairs):
            occurring = [(label, name) for label, name in pairs if label in set(found)]
            return {label: (number, name) for number, (label, name) in enumerate(occurring, start=1)}
        ordered = [name for name, _ in sorted(pairs, key=lambda pair: int(pair[1]))]
    return {name: (number, name) for number, name in enumerate(ordered, start=1)}


def _pairs_of(names: Path) -> list[list[str]]:
    """The rows of a CSV of two columns."""
    try:
        pairs = [cells for cells in csv.reader(names.read_text(encoding="utf-8-sig").splitlines()) if cells]
    except OSError as error:
        raise DataError(f"names={names} cannot be read ({error.strerror}). fix: name a file of classes") from error
    if not pairs or any(len(cells) != 2 for cells in pairs):
        raise DataError(f"names={names} has no two columns: name,number or label,name. fix: correct it")
    return pairs


class _Images:
    """The images of a folder, by the names that rows may use."""

    def __init__(self, root: Path) -> None:
        self.root, self.near = root, NearFiles()
        self.all = sorted(
            os.path.relpath(f"{parent}/{name}", root)
            for parent, _, files in os.walk(root)
            for name in files
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")
        )
        self.by_name: dict[str, list[str]] = {}
        for name in self.all:
            base = os.path.basename(name)
            for key in {name, base, os.path.splitext(base)[0]}:
                self.by_name.setdefault(key, []).append(name)

    def find(self, row: Row, csv_path: Path) -> str:
        """The image of a row: by path, by file name anywhere below, or by name without suffix."""
        for key in (os.path.normpath(row.image), os.path.basename(row.image)):
            found = self.by_name.get(key, [])
            if key in found:
                return key
            if len(found) == 1:
                return found[0]
            if found:
                both = " and ".join(found[:2])
                raise DataError(f"{csv_path}:{row.number} names {row.image}, which may be {both}. fix: give its folder")
        hint = self.near.hint(str(self.root / row.image))
        raise DataError(
            f"{csv_path}:{row.number} names {row.image}, which is not in {self.root}{hint}. fix: images=<their folder>"
        )
