"""Reads COCO instance annotations (json) into flat columns.

The format: https://cocodataset.org/#format-data. Boxes are [left, top, width, height] in pixels.
Their numbers stay unchanged, so that an evaluation equals pycocotools on the file. The file is read
entry by entry, so it takes the memory of its columns, not of its json.
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, shown
from data.files.headers import read_headers
from data.files.reading import in_chunks
from data.formats.coco_fields import MAX_INT, Fields, is_number
from data.formats.json_lists import read_lists
from data.index.classes import choose_classes
from data.index.source import Findings, Source

BOX_KEYS = ("image_id", "category_id", "bbox")
LISTS = ("images", "categories", "annotations")


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Pause the garbage collector: parsing makes no cycles, and its walks take half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_paused_gc()
def read_coco(
    path: Path,
    image_root: Path,
    names: list[str] | None,
    lists: Callable[[Path, Mapping[str, Callable[[Any], None]]], set[str]] = read_lists,
) -> Source:
    """Read the json file ``path`` whose ``file_name`` entries are relative to ``image_root``.

    ``names`` chooses and orders the classes; ``None`` takes all categories, sorted by id. ``area``
    defaults to width times height and ``iscrowd`` to 0. Missing sizes come from the image files.
    Annotation ids appear in messages only. Raises ``DataError`` where the file is no COCO instances
    file.
    """
    findings, notes = Findings(), Findings()
    fields = Fields(path, notes)
    images, boxes = _Images(fields), _Boxes(fields)
    categories: list[dict[str, Any]] = []
    take = {"images": images.add, "annotations": boxes.add, "categories": categories.append}
    try:
        found = lists(path, take)
    except (ValueError, RecursionError) as error:  # ValueError: also no UTF-8, or a number of thousands of digits
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not valid JSON ({error}). fix: get the file again, or correct it") from error
    except TypeError as error:
        raise DataError(
            f"{path} is not a COCO instances file: it holds no object. fix: check data.<split>.annotations"
        ) from error
    missing = next((key for key in LISTS if key not in found), None)
    if missing is not None or not all(isinstance(record, dict) for record in categories):
        raise _no_list(missing or "categories", path)
    findings.add("incomplete annotations", boxes.broken)
    images.read_missing_sizes(image_root)
    areas, boxes_xywh = np.frombuffer(boxes.areas), np.frombuffer(boxes.xywh).reshape(-1, 4)
    return Source(
        path=path,
        image_root=image_root,
        file_names=images.file_names,
        image_ids=np.frombuffer(images.ids, dtype=np.int64),
        sizes=np.frombuffer(images.sizes, dtype=np.int64).reshape(-1, 2),
        box_image_ids=np.frombuffer(boxes.image_ids, dtype=np.int64),
        boxes_xywh=boxes_xywh,
        box_category_ids=np.frombuffer(boxes.category_ids, dtype=np.int64),
        areas=np.where(np.frombuffer(boxes.has_area, dtype=bool), areas, boxes_xywh[:, 2] * boxes_xywh[:, 3]),
        crowd=np.frombuffer(boxes.crowd, dtype=bool),
        categories=choose_classes(_category_names(categories, fields), names, path),
        box_name=boxes.name,
        findings=findings,
        notes=notes,
        unsized=images.without_size,
    )


class _Images:
    """Columns of the images."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.file_names: list[str] = []
        self.ids, self.sizes = array("q"), array("q")  # sizes: height, width
        self.without_size: list[int] = []  # rows

    def add(self, record: Any) -> None:
        """Takes the next entry of the file's list."""
        if not isinstance(record, dict):
            raise _no_list("images", self.fields.path)
        row = len(self.file_names)
        self.file_names.append(self.fields.text(record, row, "file_name", "image"))
        self.ids.append(self.fields.integer(record, row, "id", "image"))
        if record.get("height") is None or record.get("width") is None:
            self.without_size.append(row)
            self.sizes.extend((0, 0))
        else:
            self.sizes.append(self.fields.integer(record, row, "height", "image"))
            self.sizes.append(self.fields.integer(record, row, "width", "image"))

    def read_missing_sizes(self, image_root: Path) -> None:
        """Read missing sizes from the headers of the images."""
        if not self.without_size:
            return
        paths = [f"{image_root}/{self.file_names[row]}" for row in self.without_size]
        headers = np.concatenate(list(in_chunks(read_headers, paths, "reading image sizes")))
        columns = np.frombuffer(self.sizes, dtype=np.int64).reshape(-1, 2)
        columns[self.without_size] = headers[:, :2]
        names = [self.file_names[row] for row in self.without_size]
        self.fields.notes.add("images without width and height, which were read from the image files", names)


class _Boxes:
    """Columns of the complete annotations, and sentences about the others."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.count = 0  # annotations so far
        self.broken: list[str] = []
        self.image_ids, self.category_ids = array("q"), array("q")
        self.xywh, self.areas = array("d"), array("d")
        self.has_area, self.crowd = bytearray(), bytearray()
        self._ids = array("q")  # for messages; 0 where it is no 64-bit integer,
        self._odd_ids: dict[int, str] = {}  # which is here by row

    def add(self, record: Any) -> None:
        """Takes the next entry of the file's list."""
        if not isinstance(record, dict):
            raise _no_list("annotations", self.fields.path)
        position, row = self.count, len(self.crowd)
        self.count += 1
        box = record.get("bbox")
        problem = _box_problem(record, box)
        if problem is not None:
            self.broken.append(f"{self.fields.path}: annotation {shown(record.get('id', position))} {problem}")
            return
        assert box is not None  # else there is a problem
        self.image_ids.append(self.fields.integer(record, row, "image_id", "annotation"))
        self.category_ids.append(self.fields.integer(record, row, "category_id", "annotation"))
        self.xywh.extend(box)
        area = record.get("area")
        self.areas.append(0.0 if area is None else area)
        self.has_area.append(area is not None)
        self.crowd.append(bool(record.get("iscrowd", 0)))
        identity = record.get("id", position)
        if type(identity) is not int or not -MAX_INT <= identity <= MAX_INT:
            self._odd_ids[row], identity = shown(identity), 0
        self._ids.append(identity)

    def name(self, row: int) -> str:
        """The name of a row's box in messages."""
        return f"annotation {self._odd_ids.get(row, self._ids[row])}"


def _no_list(key: str, path: Path) -> DataError:
    return DataError(
        f"{path} is not a COCO instances file: it has no list of {key!r}. fix: check data.<split>.annotations"
    )


def _box_problem(record: dict[str, Any], box: Any) -> str | None:
    """What is wrong with an annotation, as the rest of a sentence."""
    for key in BOX_KEYS:
        if key not in record:
            return f"has no {key!r}"
    area = record.get("area")
    if not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))):
        return f"has the bbox {shown(box)} instead of four numbers"
    if area is not None and not is_number(area):
        return f"has the area {shown(area)} instead of a number"
    if record.get("iscrowd", 0) not in (0, 1):
        return f"has iscrowd={shown(record['iscrowd'])} instead of 0 or 1"
    return None


def _category_names(categories: list[dict[str, Any]], fields: Fields) -> dict[int, str]:
    ids = [fields.integer(record, row, "id", "category") for row, record in enumerate(categories)]
    names = [fields.text(record, row, "name", "category") for row, record in enumerate(categories)]
    path = fields.path
    by_id = dict(zip(ids, names, strict=True))
    for values, key in ((ids, "id"), (names, "name")):
        (value, count), *_ = Counter(values).most_common(1) or [(None, 0)]
        if count > 1:
            raise DataError(f"{path} has two categories with the {key} {value!r}. fix: give each its own {key}")
    if not by_id:
        raise DataError(f"{path} defines no categories. fix: check data.<split>.annotations")
    return dict(sorted(by_id.items()))
