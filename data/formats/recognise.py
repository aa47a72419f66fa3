"""Which options ``data.*`` read the data set at a path. Nothing is written."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

from data.errors import DataError
from data.formats.set_files import SET_SUFFIXES, USUAL_NAMES, set_files

TRAIN, VAL = ("train",), ("valid", "val", "validation")
# Names that say what a file or folder is for, not which set it belongs to.
USUAL = re.compile(r"(_?annotations?|labels|data|dataset|obj|config|result|images|train|valid|val|test)(\.coco)?")
KINDS = "a data.yaml, Darknet's obj.data, a COCO json, or a folder with one of these or with Pascal VOC's xml files"
_CLASS = re.compile(rb"<object>.*?<name>\s*(.*?)\s*</name>", re.DOTALL)


def recognise(place: Path) -> dict[str, Any]:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    ``place`` is any of KINDS. Where a set has no validation images, both splits are all images.
    Raises ``DataError`` for anything else, or where several files of a folder may be meant.
    """
    place = Path(os.path.abspath(place))
    described = [place] if place.suffix.lower() in SET_SUFFIXES and place.is_file() else set_files(place)
    usual = [path for path in described if path.name in USUAL_NAMES] or described
    if len(usual) > 1:
        raise DataError(f"{place} holds {' and '.join(path.name for path in usual)}. fix: data=<one of them>")
    found = {"format": "yolo", "root": str(usual[0])} if usual else _of_coco(place) or _of_voc(place)
    if not found:
        raise DataError(f"{place} is no data set that can be read as it is. fix: name {KINDS}")
    return {"name": _name(place), **found}


def _name(place: Path) -> str:
    """The stem of the file or folder; of ``cats/train/data.yaml`` that is cats."""
    stems = [place.stem if place.is_file() else place.name, *(part.name for part in place.parents)]
    telling = [stem for stem in stems if stem and not USUAL.fullmatch(stem.lower()) and "instances_" not in stem]
    return telling[0] if telling else stems[0]


def _splits(folder: Path, pattern: str = "{}") -> dict[str, Path]:
    """What exists of ``pattern`` with the names of the splits, by ``train`` and ``val``."""
    there = {
        split: [path for word in words if (path := folder / pattern.format(word)).exists()]
        for split, words in (("train", TRAIN), ("val", VAL))
    }
    return {split: paths[0] for split, paths in there.items() if paths}


# COCO


def _given_and_other(path: Path) -> dict[str, Path]:
    """The json of each split where one is given: the other has the other word in its path."""
    for split, other, words, others in (("train", "val", TRAIN, VAL), ("val", "train", VAL, TRAIN)):
        for here, there in ((word, another) for word in words for another in others):
            folder, name = path.parent.name, path.name
            folders, names = (folder, folder.replace(here, there)), (name, name.replace(here, there))
            for partner in (path.parent.parent / above / below for above in folders for below in names):
                if partner != path and partner.is_file():
                    return {split: path, other: partner}
    return {"train": path}


def _of_coco(place: Path) -> dict[str, Any]:
    """The options for a json, or a folder of Roboflow or COCO; {} without one json."""
    layouts = ("train/_annotations.coco.json", "annotations/instances_train*.json", "annotations/*.json", "*.json")
    found = next(filter(None, (sorted(place.glob(layout)) for layout in layouts)), [])
    if place.is_file() and place.suffix.lower() == ".json":
        found = [place]
    if len(found) != 1:
        return {}
    jsons = _given_and_other(found[0])
    images = {split: _images_of(path) for split, path in jsons.items()}
    root = os.path.commonpath([*(path.parent for path in jsons.values()), *images.values()])
    parts = {
        split: {"annotations": os.path.relpath(path, root), "images": os.path.relpath(images[split], root)}
        for split, path in jsons.items()
    }
    return {"format": "coco", "root": root, "on_error": "clip", "val": parts["train"], **parts}


def _images_of(path: Path) -> Path:
    """The folder that has the first ``file_name`` of a json; that of the json if none has it."""
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        found = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
    if found is None:
        return path.parent
    name, word = json.loads(found[1]), path.stem.rpartition("_")[2]  # instances_train2017: train2017
    for folder in (path.parent, path.parent.parent):
        for below in ("", word, "images", f"images/{word}", path.parent.name, f"images/{path.parent.name}", "data"):
            if (folder / below / name).is_file():
                return folder / below
    return path.parent


# Pascal VOC


def _of_voc(folder: Path) -> dict[str, Any]:
    """The options for a folder of xml files, with their classes in order; {} without any."""
    if (folder / "VOC2007").is_dir() and (folder / "VOC2012").is_dir():
        return {"format": "voc", "root": str(folder)}
    below = "Annotations" if (folder / "Annotations").is_dir() else "."
    lists = _splits(folder, "ImageSets/Main/{}.txt")
    folders = {split: path.name for split, path in _splits(folder).items() if any(path.glob("*.xml"))}
    places = (  # annotations, images and xml files of each split
        {split: (f"ImageSets/Main/{path.name}", ".", "Annotations") for split, path in lists.items()}
        or {split: (name, name, name) for split, name in folders.items()}
        or {"train": (below, ".", below)}
    )
    names = sorted({name for *_, xmls in places.values() for name in _classes(folder / xmls)})
    if not names or "train" not in places:
        return {}
    parts = {split: {"annotations": place, "images": images} for split, (place, images, _) in places.items()}
    return {"format": "voc", "root": str(folder), "names": names, "val": parts["train"], **parts}


def _classes(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.xml"):
        for name in _CLASS.findall(path.read_bytes()):
            yield unescape(name.decode("utf-8", "replace"))
