"""Reads COCO instance annotations (json) into flat columns.

The format: https://cocodataset.org/#format-data. Boxes are [left, top, width, height] in pixels; the numbers are kept
as they stand, so that an evaluation on them equals pycocotools on the file.
"""

from __future__ import annotations

import difflib
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.source import Findings, Source

BOX_KEYS = ("image_id", "category_id", "bbox")


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
    to width times height and ``iscrowd`` to 0. Raises ``DataError`` where the file is no COCO instances file.
    """
    content = _parse(path)
    images = _records(content, "images", path)
    categories = _records(content, "categories", path)
    findings = Findings()
    boxes, boxes_xywh = _usable_boxes(_records(content, "annotations", path), findings, path)

    def box_name(position: int) -> str:
        return f"annotation {boxes[position].get('id', position)}"

    areas = boxes_xywh[:, 2] * boxes_xywh[:, 3]
    given = [(row, box["area"]) for row, box in enumerate(boxes) if isinstance(box.get("area"), int | float)]
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
        categories=_choose(_category_names(categories, path), names, path),
        box_name=box_name,
        findings=findings,
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
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
        missing = next((key for key in BOX_KEYS if key not in record), None)
        if missing is None and _is_box(record["bbox"]):
            usable.append(record)
            continue
        what = f"has no {missing!r}" if missing else f"has the bbox {record['bbox']!r} instead of four numbers"
        broken.append(f"{path}: annotation {record.get('id', position)} {what}")
    findings.add("incomplete annotations", broken)
    return usable, np.array([record["bbox"] for record in usable], dtype=np.float64).reshape(-1, 4)


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(number) in (int, float) for number in value)


def _integers(records: list[dict[str, Any]], key: str, what: str, path: Path) -> NDArray[np.int64]:
    return np.array([_typed(record, row, key, int, what, path) for row, record in enumerate(records)], dtype=np.int64)


def _strings(records: list[dict[str, Any]], key: str, what: str, path: Path) -> list[str]:
    return [_typed(record, row, key, str, what, path) for row, record in enumerate(records)]


def _typed(record: dict[str, Any], row: int, key: str, kind: type, what: str, path: Path) -> Any:
    value = record.get(key)
    if type(value) is not kind:  # not isinstance: true is an int to Python, and 1.0 would lose its fraction in silence
        expected = "a whole number" if kind is int else "a text"
        raise DataError(f"{path}: {what} {record.get('id', row)} has {key}={value!r}. fix: make it {expected}")
    return value


def _category_names(categories: list[dict[str, Any]], path: Path) -> dict[int, str]:
    ids = _integers(categories, "id", "category", path).tolist()
    names = _strings(categories, "name", "category", path)
    by_id = dict(zip(ids, names, strict=True))
    for values, key in ((ids, "id"), (names, "name")):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise DataError(f"{path} has two categories with the {key} {twice!r}. fix: give each its own {key}")
    if not by_id:
        raise DataError(f"{path} defines no categories. fix: check data.<split>.annotations")
    return dict(sorted(by_id.items()))


def _choose(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """The categories named in ``names``, in that order."""
    if names is None:
        return by_id
    id_of = {name: number for number, name in by_id.items()}
    for name in names:
        if name not in id_of:
            near = difflib.get_close_matches(name, id_of, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its categories are {', '.join(id_of)}"
            raise DataError(
                f"data.names holds {name!r}, which is no category of {path}: {hint} fix: correct data.names"
            )
    return {id_of[name]: name for name in names}
