"""Read COCO instance annotations (json) into flat columns.

The format: https://cocodataset.org/#format-data. Boxes are [left, top, width, height] in pixels and
stay unchanged, so that an evaluation equals pycocotools on the file. msgspec checks the types and
skips what is not needed, such as polygons.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from data.annotations_read import Findings, Source, relative_name
from data.errors import DataError, shown
from data.layouts import COMPARED_NAMES, choose_classes, find_files, read_file

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_INT = 2**63 - 1
Integer = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]


class _Image(msgspec.Struct, gc=False):
    id: Integer
    file_name: str
    height: Integer = 0  # the checks report images without size
    width: Integer = 0


class _Annotation(msgspec.Struct, gc=False):
    image_id: Integer
    category_id: Integer
    id: Any = None  # only in messages
    bbox: tuple[float, ...] | None = None
    area: float | None = None
    iscrowd: int | bool = 0


class _Category(msgspec.Struct, gc=False):
    id: Integer
    name: str


class _Instances(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category]
    annotations: list[_Annotation] | None = None  # a test set has none


def read_coco(
    path: Path, image_root: Path, names: list[str] | None, content: Mapping[str, Any] | None = None
) -> Source:
    """Read the json file ``path`` whose ``file_name`` entries are relative to ``image_root``.

    ``names`` selects and orders the classes; ``None`` takes all categories, sorted by id. ``area``
    defaults to width times height and ``iscrowd`` to 0. Annotation ids appear only in messages. A
    plugin passes the ``content`` itself, as a dictionary. Raises ``DataError`` if it is not a COCO
    instances file.
    """
    try:
        if content is None:
            instances = _decoded(read_file(path).removeprefix(BYTE_ORDER_MARK))
        else:
            instances = msgspec.convert(content, type=_Instances, strict=False)
    except msgspec.ValidationError as error:
        raise DataError(
            f"{path} is not a COCO instances file: {error}. fix: check data.<split>.annotations, or correct the file"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}). fix: get the file again, or correct it") from error
    findings, notes, usable = Findings(), Findings(), list[tuple[int, _Annotation]]()
    if instances.annotations is None:
        notes.add("files without annotations, so that nothing is scored", [str(path)])
    for number, entry in enumerate(instances.annotations or []):
        if entry.bbox is None or len(entry.bbox) != 4:
            problem = f"has the bbox {shown(entry.bbox)} instead of four numbers"
        elif entry.iscrowd not in (0, 1):
            problem = f"has iscrowd={entry.iscrowd} instead of 0 or 1"
        else:
            usable.append((number, entry))
            continue
        findings.add("incomplete annotations", [f"{path}: {_name(number, entry)} {problem}"])
    entries = [entry for _, entry in usable]
    boxes_xywh = np.array([entry.bbox for entry in entries], dtype=np.float64).reshape(-1, 4)
    areas = np.array([np.nan if entry.area is None else entry.area for entry in entries], dtype=np.float64)
    return Source(
        path=path,
        image_root=image_root,
        file_names=_file_names(instances.images, image_root, notes),
        image_ids=np.array([image.id for image in instances.images], dtype=np.int64),
        sizes=np.array([(image.height, image.width) for image in instances.images], dtype=np.int64).reshape(-1, 2),
        box_image_ids=np.array([entry.image_id for entry in entries], dtype=np.int64),
        boxes_xywh=boxes_xywh,
        box_category_ids=np.array([entry.category_id for entry in entries], dtype=np.int64),
        areas=np.where(np.isnan(areas), boxes_xywh[:, 2] * boxes_xywh[:, 3], areas),
        crowd=np.array([bool(entry.iscrowd) for entry in entries], dtype=bool),
        categories=choose_classes(_category_names(instances.categories, path), names, path),
        box_name=lambda row: _name(*usable[row]),
        findings=findings,
        notes=notes,
    )


def _decoded(text: bytes) -> _Instances:
    """The content of a json; 12 may be written as "12" or 12.0. Raises msgspec's errors."""
    try:
        return msgspec.json.decode(text, type=_Instances, strict=False)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        with suppress(ValueError):  # Python's reader is slower, and takes NaN where nobody needs a number
            return msgspec.convert(json.loads(text), type=_Instances, strict=False)
        raise error


def _name(number: int, entry: _Annotation) -> str:
    return f"annotation {shown(number if entry.id is None else entry.id)}"


def _file_names(images: list[_Image], root: Path, notes: Findings) -> list[str]:
    """The names relative to ``root``; with / for the backslash of Windows, unless a file has it.

    If there is none of the first ones, the names may begin with folders that are not here.
    """
    names = (image.file_name for image in images)
    given = [name.replace("\\", "/") if "\\" in name and not (root / name).is_file() else name for name in names]
    if any(os.path.isfile(root / name) for name in given[:COMPARED_NAMES]):
        return given
    found = find_files(given, [root]) if given else []
    if not any(map(os.path.isfile, found[:COMPARED_NAMES])):
        return given
    notes.add("images found by the end of their file_name", given)
    return [relative_name(path, root) for path in found]


def _category_names(categories: list[_Category], path: Path) -> dict[int, str]:
    """The name of each category id, in the order of the ids."""
    if not categories:
        raise DataError(f"{path} defines no categories. fix: check data.<split>.annotations")
    for key in ("id", "name"):
        ((value, times),) = Counter(getattr(category, key) for category in categories).most_common(1)
        if times > 1:
            raise DataError(f"{path} has two categories with the {key} {value!r}. fix: give each its own {key}")
    return dict(sorted((category.id, category.name) for category in categories))
