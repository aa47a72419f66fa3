"""Reads COCO instance annotations (json) into flat columns.

The format: https://cocodataset.org/#format-data. Boxes are [left, top, width, height] in pixels; the numbers are kept
as they stand, so that an evaluation on them equals pycocotools on the file.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.classes import choose_classes
from data.errors import DataError, shown
from data.source import Findings, Source

BOX_KEYS = ("image_id", "category_id", "bbox")
MAX_INT = 2**63 - 1


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Parsing makes millions of objects and no cycles; the collector's walks over them take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_paused_gc()
def read_coco(path: Path, image_root: Path, names: list[str] | None) -> Source:
    """Reads the json file ``path`` whose ``file_name`` entries start at ``image_root``.

    ``names`` chooses and orders the classes; ``None`` takes all categories in the order of their ids. ``area`` defaults
    to width times height and ``iscrowd`` to 0; ``segmentation`` is not read, and the ids of annotations only name them
    in messages. Raises ``DataError`` where the file is no COCO instances file.
    """
    content = _parse(path)
    images = _records(content, "images", path)
    categories = _records(content, "categories", path)
    findings = Findings()
    boxes, boxes_xywh = _usable_boxes(_records(content, "annotations", path), findings, path)

    def box_name(position: int) -> str:
        return f"annotation {shown(boxes[position].get('id', position))}"

    areas = boxes_xywh[:, 2] * boxes_xywh[:, 3]
    given = [(row, box["area"]) for row, box in enumerate(boxes) if box.get("area") is not None]
    if given:
        rows, values = zip(*given, strict=True)
        areas[list(rows)] = values
    return Source(
        path=path,
        image_root=image_root,
        file_names=_strings(images, "file_name", "image", path),
        image_ids=_integers(images, "id", "image", path),
        sizes=np.stack([_integers(images, side, "image", path) for side in ("height", "width")], axis=1),
        box_image_ids=_integers(boxes, "image_id", "annotation", path),
        boxes_xywh=boxes_xywh,
        box_category_ids=_integers(boxes, "category_id", "annotation", path),
        areas=areas,
        crowd=np.array([bool(box.get("iscrowd", 0)) for box in boxes], dtype=bool),
        categories=choose_classes(_category_names(categories, path), names, path),
        box_name=box_name,
        findings=findings,
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise DataError(f"{path} is not valid JSON ({error}). fix: get the file again, or correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a COCO instances file: it holds no object. fix: check data.<split>.annotations")
    return content


def _records(content: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    records = content.get(key)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(
            f"{path} is not a COCO instances file: it has no list of {key!r}. fix: check data.<split>.annotations"
        )
    return records


def _usable_boxes(
    records: list[dict[str, Any]], findings: Findings, path: Path
) -> tuple[list[dict[str, Any]], NDArray[np.float64]]:
    """The annotations that have what a box needs, and their boxes (M, 4); the others go to ``findings``."""
    usable: list[dict[str, Any]] = []
    broken: list[str] = []
    for position, record in enumerate(records):
        problem = _box_problem(record)
        if problem is None:
            usable.append(record)
        else:
            broken.append(f"{path}: annotation {shown(record.get('id', position))} {problem}")
    findings.add("incomplete annotations", broken)
    return usable, np.array([record["bbox"] for record in usable], dtype=np.float64).reshape(-1, 4)


def _box_problem(record: dict[str, Any]) -> str | None:
    """What an annotation lacks of a box, as the rest of a sentence."""
    missing = next((key for key in BOX_KEYS if key not in record), None)
    if missing is not None:
        return f"has no {missing!r}"
    box, area = record["bbox"], record.get("area")
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        return f"has the bbox {shown(box)} instead of four numbers"
    if area is not None and not _is_number(area):
        return f"has the area {shown(area)} instead of a number"
    if record.get("iscrowd", 0) not in (0, 1):
        return f"has iscrowd={shown(record['iscrowd'])} instead of 0 or 1"
    return None


def _is_number(value: Any) -> bool:
    """Whether a float can hold it: true is an int to Python, and a json may spell out an int of a thousand digits."""
    return type(value) is float or (type(value) is int and -MAX_INT <= value <= MAX_INT)


def _integers(records: list[dict[str, Any]], key: str, what: str, path: Path) -> NDArray[np.int64]:
    values = [_typed(record, row, key, int, what, path) for row, record in enumerate(records)]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        value = next(value for value in values if abs(value) > MAX_INT)
        raise DataError(f"{path}: an {what} has {key}={shown(value)}. fix: make it a number of 64 bits") from error


def _strings(records: list[dict[str, Any]], key: str, what: str, path: Path) -> list[str]:
    return [_typed(record, row, key, str, what, path) for row, record in enumerate(records)]


def _typed(record: dict[str, Any], row: int, key: str, kind: type, what: str, path: Path) -> Any:
    value = record.get(key)
    if type(value) is not kind:  # not isinstance: true is an int to Python, and 1.0 would lose its fraction in silence
        expected = "a whole number" if kind is int else "a text"
        name = shown(record.get("id", row))
        raise DataError(f"{path}: {what} {name} has {key}={shown(value)}. fix: make it {expected}")
    return value


def _category_names(categories: list[dict[str, Any]], path: Path) -> dict[int, str]:
    ids = _integers(categories, "id", "category", path).tolist()
    names = _strings(categories, "name", "category", path)
    by_id = dict(zip(ids, names, strict=True))
    for values, key in ((ids, "id"), (names, "name")):
        (value, count), *_ = Counter(values).most_common(1) or [(None, 0)]
        if count > 1:
            raise DataError(f"{path} has two categories with the {key} {value!r}. fix: give each its own {key}")
    if not by_id:
        raise DataError(f"{path} defines no categories. fix: check data.<split>.annotations")
    return dict(sorted(by_id.items()))
