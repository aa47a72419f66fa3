"""Read Pascal VOC annotations (one xml file per image, in a list or folder) into flat columns.

As in the usual COCO versions of VOC, left = xmin and width = xmax - xmin. Objects marked difficult
or truncated count like any other: evaluation follows COCO, which ignores crowds instead.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from data import io, layouts
from data.annotations_read import ROTATED, Findings, LocatedSplit, Source, relative_name
from data.errors import DataError, shown

BoxXywh = tuple[float, float, float, float]  # left, top, width, height
_Below = Callable[[str], dict[str, list[str]]]
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Listed(NamedTuple):
    """An image of a list, or of an xml file."""

    stem: str
    xml: str
    image_folders: tuple[str, ...]  # where the image usually is; messages name the last one
    top: str  # else it is below this folder


class _Annotation(NamedTuple):
    """The content of an xml file."""

    file_name: str  # of the image, below <folder>; may be empty
    size: tuple[int, int]  # height, width
    objects: list[tuple[str, BoxXywh | None]]  # class and left, top, width, height; None: a corner is missing
    rotated: int  # number of objects that CVAT says are rotated


def locate_voc(pairs: Sequence[tuple[Path, Path]], image_root: Path, names: list[str] | None) -> LocatedSplit:
    """Find the files of image lists or folders of xml files, each with its folder of images.

    The names in a list stand for files in ``Annotations`` and ``JPEGImages`` of that folder, or
    anywhere else below it. Raises ``DataError`` if there are no xml files.
    """
    listed: list[_Listed] = []
    digests = []
    for place, voc_root in pairs:
        items = _items_below(place, voc_root) if place.is_dir() else _items_of_list(place, voc_root)
        stamps = io.stamp_files([item.xml for item in items])
        if not stamps.is_file.any():
            where = f"names no image that has an xml file in {os.path.dirname(items[0].xml)}" if items else "holds none"
            raise DataError(
                f"{place} {where}. fix: set data.<split>.images to the folder that holds Annotations and JPEGImages"
            )
        listed += items
        digests.append(stamps.digest)
    path = pairs[0][0] if len(pairs) == 1 else image_root
    digests.append(io.stamp_files(sorted({folder for item in listed for folder in item.image_folders})).digest)
    return LocatedSplit(
        stamps=[*digests, io.stamp_files([str(place) for place, _ in pairs if place.is_file()]).digest],
        image_root=image_root,
        read=lambda: read_voc(listed, path, image_root, names),
    )


def _items_of_list(image_list: Path, voc_root: Path) -> list[_Listed]:
    xml_folder, image_folder = (_folder_or(voc_root, name) for name in ("Annotations", "JPEGImages"))
    items = []
    for line in filter(None, map(str.strip, layouts.read_lines(image_list))):
        if line.split()[1:] and not os.path.isfile(f"{xml_folder}/{line}.xml"):
            line = layouts.first_column(line)  # noqa: PLW2901
        stem, suffix = os.path.splitext(line.replace("\\", "/"))
        stem = stem if suffix.lower() in layouts.IMAGE_SUFFIXES else line
        items.append(_Listed(stem, f"{xml_folder}/{stem}.xml", (image_folder,), str(voc_root)))
    if not any(os.path.isfile(item.xml) for item in items):
        by_stem: dict[str, list[str]] = {}
        for xml in io.files_below(voc_root, {".xml"}):
            by_stem.setdefault(Path(xml).stem, []).append(xml)
        for at, item in enumerate(items):
            xmls = by_stem.get(Path(f"{item.stem}.x").stem, [item.xml])
            likely = [xml for xml in xmls if image_list.stem in xml.split("/")] or xmls
            if len(likely) > 1:
                fix = f"fix: data.<split>.annotations={os.path.dirname(likely[0])}"
                raise DataError(f"{image_list} names {item.stem}: is that {likely[0]} or {likely[1]}? {fix}")
            items[at] = item._replace(xml=likely[0])
    return items


def _items_below(folder: Path, images: Path) -> list[_Listed]:
    """The xml files below a folder. Their images are beside them or below ``images``."""
    items = []
    for xml in map(Path, io.files_below(folder, {".xml"})):
        below = xml.parent.relative_to(folder)
        places = (xml.parent, Path(_folder_or(images, "JPEGImages"), below), images / below)
        items.append(_Listed(xml.stem, str(xml), tuple(dict.fromkeys(map(str, places))), str(images)))
    return items


def _folder_or(parent: Path, name: str) -> str:
    return str(parent / name if (parent / name).is_dir() else parent)


def read_voc(listed: list[_Listed], path: Path, image_root: Path, names: list[str] | None) -> Source:
    """Read the listed images; ``names`` are the classes in order, ``path`` is for messages.

    Image ids count from 1 in the order of the lists, category ids from 1 in that of ``names``. The
    area of an object is that of its box. Unreadable entries become findings.
    """
    assert names is not None  # by DataConfig.__post_init__
    category_ids = {name: number for number, name in enumerate(names, start=1)}
    findings, notes = Findings(), Findings()
    folders = {folder for item in listed for folder in item.image_folders if os.path.isdir(folder)}
    image_names = {folder: frozenset(os.listdir(folder)) for folder in folders}
    below = cache(_images_below)
    file_names, image_ids, sizes = list[str](), list[int](), list[tuple[int, int]]()
    boxes, labels = list[BoxXywh](), list[tuple[int, int, int]]()  # label: image id, category id, number in its file
    chunks = io.in_chunks(lambda items: [_parse(item.xml) for item in items], listed, "reading labels")
    annotations = [annotation for chunk in chunks for annotation in chunk]
    for image_id, (item, annotation) in enumerate(zip(listed, annotations, strict=True), start=1):
        if isinstance(annotation, str):
            findings.add("unusable annotation files", [annotation])
            continue
        image, is_guess = _image_of(item, annotation.file_name, image_names, below)
        notes.add("images chosen among several of one name", [image] * is_guess)
        notes.add(ROTATED, [item.xml] * annotation.rotated)
        image_ids.append(image_id)
        file_names.append(relative_name(image, image_root))
        sizes.append(annotation.size)
        for number, (name, box) in enumerate(annotation.objects, start=1):
            where = f"{item.xml}: object {number} of {item.stem}.xml"
            if name not in category_ids:
                problem = f"{where} is of class {shown(name)}, which data.names does not list"
                findings.add("objects of a class not in use", [problem])
            elif box is None:
                findings.add("incomplete objects", [f"{where} has no bndbox with all of {CORNERS}"])
            else:
                boxes.append(box)
                labels.append((image_id, category_ids[name], number))
    boxes_xywh = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    columns = np.array(labels, dtype=np.int64).reshape(-1, 3)
    return Source(
        path=path,
        image_root=image_root,
        file_names=file_names,
        image_ids=np.array(image_ids, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64).reshape(-1, 2),
        box_image_ids=columns[:, 0],
        boxes_xywh=boxes_xywh,
        box_category_ids=columns[:, 1],
        areas=boxes_xywh[:, 2] * boxes_xywh[:, 3],
        crowd=np.zeros(len(boxes), dtype=bool),
        categories={number: name for name, number in category_ids.items()},
        box_name=lambda position: f"object {labels[position][2]} of {listed[labels[position][0] - 1].stem}.xml",
        findings=findings,
        notes=notes,
    )


def _images_below(folder: str) -> dict[str, list[str]]:
    """All images below a folder by their stems."""
    images: dict[str, list[str]] = {}
    for image in io.files_below(Path(folder), layouts.IMAGE_SUFFIXES):
        images.setdefault(Path(image).stem, []).append(image)
    return images


def _image_of(item: _Listed, file_name: str, present: dict[str, frozenset[str]], below: _Below) -> tuple[str, bool]:
    """The image of an xml file: named like it, as in ``<filename>``, or like it with any suffix.

    Files edited by hand often lack the suffix in ``<filename>``, or name another image. Of images
    elsewhere below the set's folder, that whose folders are most like the xml file's is taken.
    Returned with it is whether there are others as like.
    """
    base = os.path.basename(file_name)
    stem = os.path.basename(item.stem)
    first = item.stem + (os.path.splitext(base)[1] or ".jpg")
    names = (first, base, *(item.stem + suffix for suffix in sorted(layouts.IMAGE_SUFFIXES)))
    matches = [f"{folder}/{name}" for folder in item.image_folders for name in names if name in present.get(folder, ())]
    if matches:
        others = {os.path.basename(image) for image in matches} - {base}
        return matches[0], os.path.basename(matches[0]) != base and len(others) > 1
    elsewhere = below(item.top).get(stem) or below(item.top).get(os.path.splitext(base)[0], [])
    folders = {*item.xml.split("/"), *file_name.split("/")}
    likeness = [len(folders.intersection(image.split("/"))) for image in elsewhere]
    if not elsewhere:
        return f"{item.image_folders[-1]}/{first}", False
    return elsewhere[likeness.index(max(likeness))], likeness.count(max(likeness)) > 1


def _parse(xml: str) -> _Annotation | str:
    """Return the content of an xml file, or a sentence that says why it is unusable."""
    try:
        root = layouts.xml_root(xml)
        size = (int(root.findtext("size/height", "0")), int(root.findtext("size/width", "0")))
    except OSError as error:
        return f"{xml} cannot be read ({error.strerror})"
    except DataError as error:
        return str(error)
    except ValueError as error:
        return f"{xml} is not valid XML with width and height in <size> ({error})"
    objects = [_object(element) for element in root.iter("object")]
    angles = (item.findtext("value") for item in root.iterfind(".//object/attributes/attribute[name='rotation']"))
    rotated = sum(angle not in ("0", "0.0") for angle in angles)
    folder, name = (root.findtext(tag, "").strip().replace("\\", "/") for tag in ("folder", "filename"))
    return _Annotation(f"{folder}/{name}", size, objects, rotated)


def _object(element: ElementTree.Element) -> tuple[str, BoxXywh | None]:
    name = element.findtext("name", "").strip()
    try:
        left, top, right, bottom = (float(element.findtext(f"bndbox/{corner}", "")) for corner in CORNERS)
    except ValueError:
        return name, None
    return name, (left, top, right - left, bottom - top)
