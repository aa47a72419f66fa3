"""Reads Pascal VOC annotations (one xml file per image) into flat columns.

Corners are taken as they stand: left = xmin, width = xmax - xmin, as the usual COCO versions of VOC sets do. Objects
marked difficult are objects like all others.
"""

from __future__ import annotations

import difflib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.source import Findings, Source

CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Object(NamedTuple):
    name: str  # such as "object 3 of a.xml"
    image_id: int
    category_id: int
    box_xywh: tuple[float, float, float, float]


def voc_annotation_files(image_list: Path, voc_root: Path) -> list[Path]:
    """The xml files of the images in ``image_list``, one image name without suffix per line."""
    try:
        lines = image_list.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{image_list} is no text file. fix: name a list such as ImageSets/Main/train.txt") from error
    # The lists of a single class, such as ImageSets/Main/cat_train.txt, have a second column: 1, 0 or -1.
    paths = [voc_root / "Annotations" / f"{line.split()[0]}.xml" for line in lines if line.strip()]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"{image_list} names {missing[0].stem}, but there is no {missing[0]} ({len(missing)} such names of "
            f"{len(paths)}). fix: set data.<split>.images to the folder that holds Annotations and JPEGImages"
        )
    return paths


def read_voc(image_list: Path, voc_root: Path, names: list[str] | None) -> Source:
    """Reads the images of a list; ``names`` are the classes, in order.

    Image ids count from 1 in the order of the list, category ids from 1 in the order of ``names``; an object's area is
    that of its box. Raises ``DataError`` where a file is no VOC annotation.
    """
    assert names is not None  # DataConfig.__post_init__ sees to it
    category_ids = {name: number for number, name in enumerate(names, start=1)}
    findings = Findings()
    file_names, sizes = [], []
    objects: list[_Object] = []
    for image_id, path in enumerate(voc_annotation_files(image_list, voc_root), start=1):
        tree = _parse(path)
        sizes.append([_size(tree, side, path) for side in ("height", "width")])
        file_names.append(f"JPEGImages/{_image_name(tree, path)}")
        objects += _objects(tree, path, image_id, category_ids, findings)
    boxes_xywh = np.array([item.box_xywh for item in objects], dtype=np.float64).reshape(-1, 4)
    return Source(
        path=image_list,
        image_root=voc_root,
        file_names=file_names,
        image_ids=np.arange(1, len(file_names) + 1),
        sizes=np.array(sizes, dtype=np.int64).reshape(-1, 2),
        box_image_ids=np.array([item.image_id for item in objects], dtype=np.int64),
        boxes_xywh=boxes_xywh,
        box_category_ids=np.array([item.category_id for item in objects], dtype=np.int64),
        areas=boxes_xywh[:, 2] * boxes_xywh[:, 3],
        crowd=np.zeros(len(objects), dtype=bool),
        categories={number: name for name, number in category_ids.items()},
        box_name=lambda position: objects[position].name,
        findings=findings,
    )


def _parse(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is not valid XML ({error}). fix: get the file again, or correct it") from error


def _size(tree: ElementTree.Element, side: str, path: Path) -> int:
    text = tree.findtext(f"size/{side}", default="")
    if not text.strip().isdecimal():
        raise DataError(f"{path} has the {side} {text!r} in <size>. fix: write the image's {side} in pixels there")
    return int(text)


def _image_name(tree: ElementTree.Element, path: Path) -> str:
    """The image's file name; files edited by hand often lack the suffix, or name another image than their own."""
    suffix = Path(tree.findtext("filename", default="")).suffix
    return path.stem + (suffix or ".jpg")


def _objects(
    tree: ElementTree.Element, path: Path, image_id: int, category_ids: dict[str, int], findings: Findings
) -> list[_Object]:
    """The objects of one image; those that cannot be taken go to ``findings``."""
    objects = []
    for number, element in enumerate(tree.iterfind("object"), start=1):
        name = f"object {number} of {path.name}"
        class_name = element.findtext("name", default="").strip()
        if class_name not in category_ids:
            near = difflib.get_close_matches(class_name, category_ids, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            findings.add(
                "objects of a class not in use",
                [f"{path}: {name} is of class {class_name!r}, which data.names does not list{hint}"],
            )
            continue
        corners = [_number(element.findtext(f"bndbox/{corner}", default="")) for corner in CORNERS]
        if None in corners:
            findings.add("incomplete objects", [f"{path}: {name} has no bndbox with {', '.join(CORNERS)}"])
            continue
        left, top, right, bottom = (corner or 0.0 for corner in corners)
        objects.append(_Object(name, image_id, category_ids[class_name], (left, top, right - left, bottom - top)))
    return objects


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
