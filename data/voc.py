"""Read Pascal VOC annotations (one xml file per image, in a list or folder) into flat columns.

As in COCO versions of VOC, left = xmin, width = xmax - xmin. Difficult and truncated objects count.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import io, layouts
from data.config import Pair
from data.errors import DataError, shown
from data.io import ROTATED, Findings, LocatedSplit, Source, relative_name

Lookup = Callable[[str], Any]  # what is in a folder, which is read once
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Listed(NamedTuple):
    stem: str
    xml: str
    image_folders: tuple[str, ...]  # where the image usually is; messages name the last one
    top: str  # else it is below this folder


class _Annotation(NamedTuple):
    file_name: str  # of the image, below <folder>; may be empty
    size: tuple[np.int64, np.int64]  # height, width
    objects: Sequence[tuple[str, Sequence[float] | None]]  # class; left, top, width, height, None: one is missing
    rotated: int  # number of objects that CVAT says are rotated
    difficult: int  # number of objects marked so


def locate_voc(split: str, pairs: Sequence[Pair], image_root: Path, names: Sequence[str]) -> LocatedSplit:
    """Find the files of image lists or folders of xml files, each with its folder of images.

    A list names files in ``Annotations`` and ``JPEGImages``, or anywhere else below that folder.
    """
    listed, digests = [], []
    left_out = list[str]()
    for place, voc_root in pairs:
        if isinstance(voc_root, str):
            raise DataError(f"data.{split}.images: format=voc reads folders on a disk", "make a COCO json of the set")
        items = _items_below(place, voc_root, left_out) if place.is_dir() else _items_of_list(place, voc_root)
        stamps = io.stamp_files([item.xml for item in items])
        if not stamps.is_file.any():
            where = f"names no image that has an xml file in {os.path.dirname(items[0].xml)}" if items else "holds none"
            fix = f"set data.{split}.images to the folder that holds Annotations and JPEGImages"
            raise DataError(f"{place} {where}", fix)
        listed += items
        digests.append(stamps.digest)
    folders = {folder for item in listed for folder in item.image_folders}
    lists = [str(place) for place, _ in pairs if place.is_file()]
    path = pairs[0][0] if len(pairs) == 1 else image_root
    all_digests = [*digests, io.stamp_files(sorted(folders)).digest, io.stamp_files(lists).digest]
    return LocatedSplit(all_digests, image_root, lambda: read_voc(listed, path, image_root, names, left_out))


def _items_of_list(image_list: Path, voc_root: Path) -> list[_Listed]:
    xml_folder, image_folder = _folder_or(voc_root, "Annotations"), str(_folder_or(voc_root, "JPEGImages"))
    items = []
    for line in layouts.read_lines(image_list):
        name = line.strip().replace("\\", "/")
        if len(name.split()) > 1 and not os.path.isfile(f"{xml_folder}/{name}.xml"):
            name = layouts.first_column(name)
        stem = os.path.splitext(name)[0] if layouts.is_image(name) else name
        if stem:
            items.append(_Listed(stem, f"{xml_folder}/{stem}.xml", (image_folder,), str(voc_root)))
    if any(os.path.isfile(item.xml) for item in items):
        return items
    by_stem = _by_stem(voc_root, {".xml"})
    return [item._replace(xml=_likely(item, by_stem, image_list)) for item in items]


def _likely(item: _Listed, by_stem: dict[str, list[str]], image_list: Path) -> str:
    """The xml file of an image, which is anywhere. Raises ``DataError`` if there are several."""
    xmls = by_stem.get(os.path.basename(item.stem), [item.xml])
    likely = [xml for xml in xmls if image_list.stem in xml.split("/")] or xmls
    if len(likely) > 1:
        fix = f"data.<split>.annotations={os.path.dirname(likely[0])}"
        raise DataError(f"{image_list} names {item.stem}, which may be {likely[0]} or {likely[1]}", fix)
    return likely[0]


def _items_below(folder: Path, images: Path, left_out: list[str]) -> list[_Listed]:
    """The xml files below a folder. Their images are beside them or below ``images``."""
    usual = _folder_or(images, "JPEGImages")
    items = []
    for xml in map(Path, io.files_below(folder, {".xml"}, left_out)):
        below = xml.parent.relative_to(folder)
        places = (str(xml.parent), str(usual / below), str(images / below))
        items.append(_Listed(xml.stem, str(xml), places, str(images)))
    return items


def _folder_or(parent: Path, name: str) -> Path:
    return parent / name if (parent / name).is_dir() else parent


def _by_stem(folder: Path, suffixes: Collection[str]) -> dict[str, list[str]]:
    files = defaultdict[str, list[str]](list)
    for file in io.files_below(folder, suffixes):
        files[Path(file).stem].append(file)
    return files


def read_voc(
    listed: list[_Listed], path: Path, image_root: Path, names: Sequence[str], left_out: Sequence[str]
) -> Source:
    """Read the listed images; ``names`` are the classes in order, ``path`` is for messages.

    Image ids count from 1 in the order of the lists, category ids from 1 in that of ``names``.
    """
    category_ids = {name: number for number, name in enumerate(names, start=1)}
    findings, notes = Findings(), Findings()
    notes.add(io.OF_SYSTEM, left_out)
    names_in = cache(lambda folder: frozenset(layouts.names_in(folder)))
    images_below = cache(lambda folder: _by_stem(Path(folder), layouts.IMAGE_SUFFIXES))
    file_names = []
    images = []  # id, height, width
    boxes = []  # image id, category id, number in its file, left, top, width, height
    chunks = io.in_chunks(lambda items: [_parse(item.xml) for item in items], listed, "reading labels")
    pairs = zip(listed, chain.from_iterable(chunks), strict=True)
    for image_id, (item, annotation) in enumerate(pairs, start=1):
        if isinstance(annotation, str):
            findings.add("unusable annotation files", [annotation])
            continue
        image, is_guess = _image_of(item, annotation.file_name, names_in, images_below)
        notes.add("images chosen among several of one name", [image] * is_guess)
        notes.add(ROTATED, [item.xml] * annotation.rotated)
        notes.add("objects marked difficult, which count as others do", [item.xml] * annotation.difficult)
        file_names.append(relative_name(image, image_root))
        images.append((image_id, *annotation.size))
        for number, (name, box) in enumerate(annotation.objects, start=1):
            where = f"{item.xml}: object {number} of {item.stem}.xml"
            if name not in category_ids:
                problem = f"{where} is of class {shown(name)}, which data.names does not list"
                findings.add("objects of a class not in use", [problem])
            elif box is None:
                findings.add("incomplete objects", [f"{where} has no bndbox with all of {CORNERS}"])
            else:
                boxes.append((image_id, category_ids[name], number, *box))
    of_images = np.array(images, np.int64).reshape(-1, 3)
    of_boxes = np.array(boxes, np.float64).reshape(-1, 7)
    box_image_ids, box_category_ids, numbers = of_boxes[:, :3].T.astype(np.int64)
    boxes_xywh = of_boxes[:, 3:]
    return Source(
        path=path,
        image_root=image_root,
        file_names=file_names,
        image_ids=of_images[:, 0],
        sizes=of_images[:, 1:],
        box_image_ids=box_image_ids,
        boxes_xywh=boxes_xywh,
        box_category_ids=box_category_ids,
        areas=boxes_xywh[:, 2] * boxes_xywh[:, 3],
        crowd=np.zeros(len(boxes), bool),
        categories=dict(enumerate(names, start=1)),
        box_name=lambda row: f"object {numbers[row]} of {listed[box_image_ids[row] - 1].stem}.xml",
        findings=findings,
        notes=notes,
    )


def _image_of(item: _Listed, file_name: str, names_in: Lookup, images_below: Lookup) -> tuple[str, bool]:
    """The image of an xml file: named like it, as in ``<filename>``, or with another suffix.

    Else one below the set's folder, in folders most like the xml file's; and if others are as like.
    """
    base = os.path.basename(file_name)
    first = item.stem + (os.path.splitext(base)[1] or ".jpg")
    names = dict.fromkeys([first, base, *(item.stem + suffix for suffix in sorted(layouts.IMAGE_SUFFIXES))])
    for folder in item.image_folders:
        present = [name for name in names if name in names_in(folder)]
        if present:
            return f"{folder}/{present[0]}", present[0] != base and len({*present} - {base}) > 1
    below = images_below(item.top)
    elsewhere = below.get(Path(item.stem).name) or below.get(Path(base).stem)
    if not elsewhere:
        return f"{item.image_folders[-1]}/{first}", False
    folders = {*item.xml.split("/"), *file_name.split("/")}
    likeness = [len(folders.intersection(image.split("/"))) for image in elsewhere]
    most = max(likeness)
    return elsewhere[likeness.index(most)], likeness.count(most) > 1


def _parse(xml: str) -> _Annotation | str:
    """Return the content of an xml file, or a sentence that says why it is unusable."""
    try:
        root = layouts.xml_root(xml)
        size = (np.int64(root.findtext("size/height", "0")), np.int64(root.findtext("size/width", "0")))
    except OSError as error:
        return f"{xml} cannot be read ({error.strerror})"
    except DataError as error:
        return str(error)
    except (ValueError, OverflowError) as error:
        return f"{xml} is not valid XML with width and height in <size> ({error})"
    objects = []
    for element in root.iter("object"):
        box = None
        with suppress(ValueError):
            left, top, right, bottom = (float(element.findtext(f"bndbox/{corner}", "")) for corner in CORNERS)
            box = left, top, right - left, bottom - top
        objects.append((element.findtext("name", "").strip(), box))
    rotations = root.iterfind(".//object/attributes/attribute[name='rotation']")
    angles = [item.findtext("value") for item in rotations]
    rotated = len(angles) - angles.count("0") - angles.count("0.0")
    file_name = f"{root.findtext('folder', '').strip()}/{root.findtext('filename', '').strip()}"
    difficult = len(root.findall("object[difficult='1']"))
    return _Annotation(file_name.replace("\\", "/"), size, objects, rotated, difficult)
