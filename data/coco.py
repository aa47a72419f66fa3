"""Read COCO instance annotations (json) into flat columns.

The format: https://cocodataset.org/#format-data. Boxes are [left, top, width, height] in pixels and
stay unchanged, so that an evaluation equals pycocotools on the file.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from data.errors import DataError, shown
from data.io import ROTATED, Findings, Float64, Int64, Source
from data.layouts import choose_classes, count_files, mapped, tail
from data.progress import tracked
from data.remote import Place, folder_of, in_shards

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
IGNORED = "annotations with ignore=1, which count like any other"
CHUNK = 2**16  # annotations that are objects at a time: all those of a large file would be gigabytes
MAX_INT = 2**63 - 1
Integer = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]


class _Image(msgspec.Struct, gc=False):
    id: Integer
    file_name: str | None = None
    coco_url: str | None = None  # of LVIS, in place of file_name
    neg_category_ids: Any = None  # of LVIS: classes that were looked for in vain
    height: Integer | None = None
    width: Integer | None = None


class _Annotation(msgspec.Struct, gc=False):
    image_id: Integer
    category_id: Integer
    id: Any = None  # only in messages
    bbox: tuple[float, ...] | None = None
    area: float | None = None
    iscrowd: int | bool = 0
    ignore: Any = None  # of some converters; pycocotools does not read it
    attributes: Any = None  # of CVAT: the rotation of a box, in degrees


class _Category(msgspec.Struct, gc=False):
    id: Integer
    name: str


class _Instances(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category]
    annotations: list[msgspec.Raw] | None = None  # a test set has none


class _Whole(_Instances):
    annotations: list[_Annotation] | None = None  # type: ignore[assignment]


def read_coco(path: Path, images: Place, names: list[str] | None, content: Mapping[str, Any] | None = None) -> Source:
    """Read the json file ``path`` whose ``file_name`` entries are relative to, or in, ``images``.

    ``names`` selects and orders the classes, else all are sorted by id; ``content`` is that of a
    plugin. Raises ``DataError`` if it is not a COCO instances file.
    """
    try:
        if content is None:
            text = memoryview(mapped(path))
            instances = _decoded(text[3:] if text[:3] == BYTE_ORDER_MARK else text)
        else:
            instances = msgspec.convert(content, type=_Whole, strict=False)
        for number, image in enumerate(instances.images):
            image.file_name = image.file_name or urlsplit(image.coco_url or "").path[1:]
            if not image.file_name:
                raise msgspec.ValidationError(f"Object missing required field `file_name` - at `$.images[{number}]`")
        findings, notes = Findings(), Findings()
        other_ids = dict[int, Any]()
        integers, numbers = [np.zeros((0, 5), np.int64)], [np.zeros((0, 5))]
        starts = range(0, len(instances.annotations or ()), CHUNK)
        for start in tracked(starts, len(starts), "reading annotations", "part"):
            columns = _columns(path, instances, start, other_ids=other_ids, findings=findings, notes=notes)
            integers.append(columns[0])
            numbers.append(columns[1])
    except msgspec.ValidationError as error:
        fix = "check data.<split>.annotations, or correct the file"
        raise DataError(f"{path} is not a COCO instances file: {error}", fix) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error})", "save it as UTF-8, or correct it") from error
    listed = [image.file_name for image in instances.images if image.neg_category_ids is not None]
    notes.add("images with LVIS's lists of classes, which scores do not use: they are COCO's", listed)
    if instances.annotations is None:
        notes.add("files without annotations, so that nothing is scored", [str(path)])
    whole, rest = np.concatenate(integers), np.concatenate(numbers)
    boxes_xywh, areas = rest[:, :4], rest[:, 4]
    del integers, numbers
    instances.annotations = None  # gigabytes of a large file
    return Source(
        path=path,
        image_root=folder_of(images),
        file_names=_file_names(instances.images, images, notes),
        image_ids=np.array([image.id for image in instances.images], np.int64),
        sizes=np.array([(i.height or 0, i.width or 0) for i in instances.images], np.int64).reshape(-1, 2),
        box_image_ids=whole[:, 1],
        boxes_xywh=boxes_xywh,
        box_category_ids=whole[:, 2],
        areas=np.where(np.isnan(areas), boxes_xywh[:, 2] * boxes_xywh[:, 3], areas),
        crowd=whole[:, 3] > 0,
        categories=choose_classes(_category_names(instances.categories, path), names, path),
        box_name=lambda row: f"annotation {shown(other_ids.get(int(whole[row, 0]), int(whole[row, 4])))}",
        findings=findings,
        notes=notes,
    )


def _columns(
    path: Path, instances: _Instances, start: int, *, other_ids: dict[int, Any], findings: Findings, notes: Findings
) -> tuple[Int64, Float64]:
    """Number, image, category, crowd, id (n, 5); box and area or NaN (n, 5) of CHUNK annotations.

    ``other_ids`` get those that are not integers, by number. Raises msgspec's errors.
    """
    entries: list[Any] = (instances.annotations or [])[start : start + CHUNK]
    if isinstance(entries[0], msgspec.Raw):
        try:
            joined = b"[" + b",".join(entries) + b"]"
            entries = msgspec.json.decode(joined, type=list[_Annotation], strict=False)
        except msgspec.ValidationError as error:
            at = re.search(r"\$\[(\d+)", str(error))
            where = str(error).replace(at[0], f"$.annotations[{start + int(at[1])}") if at else str(error)
            raise msgspec.ValidationError(where) from None
    integers, numbers = [], []
    for number, entry in enumerate(entries, start):
        name = entry.id
        if not isinstance(name, int) or abs(name) > MAX_INT:
            name = other_ids[number] = number if name is None else name
        if entry.bbox is None or len(entry.bbox) != 4 or entry.iscrowd not in (0, 1):
            problem = f"has the bbox {shown(entry.bbox)} instead of four numbers"
            if entry.iscrowd not in (0, 1):
                problem = f"has iscrowd={entry.iscrowd} instead of 0 or 1"
            findings.add("incomplete annotations", [f"{path}: annotation {shown(name)} {problem}"])
            continue
        if not entry.iscrowd and entry.ignore in (1, "1"):
            notes.add(IGNORED, [f"{path}: annotation {shown(name)}"])
        if not entry.iscrowd and isinstance(entry.attributes, dict) and entry.attributes.get("rotation"):
            notes.add(ROTATED, [f"{path}: annotation {shown(name)}"])
        plain = 0 if number in other_ids else name
        integers.append((number, entry.image_id, entry.category_id, bool(entry.iscrowd), plain))
        numbers.append((*entry.bbox, np.nan if entry.area is None else entry.area))
    return np.array(integers, np.int64).reshape(-1, 5), np.array(numbers, np.float64).reshape(-1, 5)


def _decoded(text: memoryview) -> _Instances:
    """The content of a json; 12 may be written as "12" or 12.0. Raises msgspec's errors."""
    try:
        return msgspec.json.decode(text, type=_Instances, strict=False)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        with suppress(ValueError):  # Python's reader is slower, and takes NaN where nobody needs a number
            return msgspec.convert(json.loads(str(text, "utf-8")), type=_Whole, strict=False)
        raise error


def _file_names(images: list[_Image], root: Place, notes: Findings) -> list[str]:
    """The names relative to ``root``; with / for the backslash of Windows, unless a file has it."""
    names = []
    for image in images:
        name = str(image.file_name)
        if "\\" in name and not (isinstance(root, Path) and (root / name).is_file()):
            name = name.replace("\\", "/")
        names.append(os.path.normpath(name) if "./" in name or "//" in name else name)
    if isinstance(root, str):
        return in_shards(names, root) if root.endswith(".tar") else names
    if names and os.path.isfile(root / names[0]):
        return names
    dropped, _ = count_files(names, [root])  # folders that are not here
    if dropped:
        notes.add("images found by the end of their file_name", names)
        names = [tail(name, dropped) for name in names]
    return names


def _category_names(categories: list[_Category], path: Path) -> dict[int, str]:
    if not categories:
        raise DataError(f"{path} defines no categories", "check data.<split>.annotations")
    names, ids = dict[Any, str](), dict[Any, str]()
    for category in categories:
        for key, known in (("id", names), ("name", ids)):
            value = getattr(category, key)
            if value in known:
                raise DataError(f"{path} has two categories with the {key} {value!r}", f"give each its own {key}")
            known[value] = category.name
    return dict(sorted(names.items()))
