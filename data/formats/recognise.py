"""Which options ``data.*`` read the data set at a path. Nothing is written."""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

from data.errors import DataError
from data.formats.set_files import SET_SUFFIXES, USUAL_NAMES

TRAIN, VAL = ("train",), ("valid", "val")
# Names that say what a file or folder is for, not which set it belongs to.
USUAL = re.compile(r"(_?annotations?|labels|data|dataset|obj|images|train|valid|val|test)(\.coco)?")
KINDS = (
    "a data.yaml, Darknet's obj.data, a COCO json, or a folder with one of these, with Pascal VOC's xml files or with "
    "images and .txt files"
)
_CLASS = re.compile(rb"<object>.*?<name>\s*(.*?)\s*</name>", re.DOTALL)


def recognise(place: Path) -> dict[str, Any]:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    ``place`` is any of KINDS. Where a set has no validation images, both splits are all images.
    Raises ``DataError`` for anything else.
    """
    place = Path(os.path.abspath(place))
    if place.suffix.lower() in SET_SUFFIXES and place.is_file():
        found: dict[str, Any] | None = {"format": "yolo", "root": str(place)}
    elif place.is_dir():
        named = next((place / name for name in USUAL_NAMES if (place / name).is_file()), None)
        found = {"format": "yolo", "root": str(named)} if named else _of_folder(place)
    else:
        found = _of_json(place) if place.suffix.lower() == ".json" else None
    if not found:
        raise DataError(f"{place} is no data set that can be read as it is. fix: name {KINDS}")
    return {"name": _name(place), **found}


def _name(place: Path) -> str:
    """The stem of the file or folder; of ``cats/train/data.yaml`` that is cats."""
    stems = [place.stem if place.is_file() else place.name, *(part.name for part in place.parents)]
    telling = [stem for stem in stems if stem and not USUAL.fullmatch(stem.lower()) and "instances_" not in stem]
    return telling[0] if telling else stems[0]


def _of_folder(folder: Path) -> dict[str, Any] | None:
    """The options for a folder of COCO's, of Pascal VOC's, or of images and label files."""
    from data.files.headers import IMAGE_SUFFIXES  # imports NumPy, which refused options do without

    for layout in ("annotations/instances_train*.json", "instances_train*.json", "*.json"):
        if len(jsons := sorted(folder.glob(layout))) == 1:
            return _of_json(jsons[0])
    xmls = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    if names := _classes(xmls):
        lists = folder / "ImageSets" / "Main"
        train = "ImageSets/Main/train.txt" if (lists / "train.txt").is_file() else os.path.relpath(xmls, folder)
        val = "ImageSets/Main/val.txt" if (lists / "val.txt").is_file() else train
        parts = {split: {"annotations": place, "images": "."} for split, place in (("train", train), ("val", val))}
        return {"format": "voc", "root": str(folder), "names": names, **parts}
    suffixes = {path.suffix.lower() for path in folder.iterdir()}
    if ".txt" in suffixes and suffixes & IMAGE_SUFFIXES:
        names_file = {"names": "classes.txt"} if (folder / "classes.txt").is_file() else {}
        part = {"annotations": ".", "images": "."}
        return {"format": "yolo", "root": str(folder), "train": part, "val": part, **names_file}
    return None


def _of_json(path: Path) -> dict[str, Any]:
    """The options for a COCO json and its twin."""
    jsons = _given_and_other(path)
    images = {split: _images_of(path) for split, path in jsons.items()}
    root = os.path.commonpath([*(path.parent for path in jsons.values()), *images.values()])
    parts = {
        split: {"annotations": os.path.relpath(path, root), "images": os.path.relpath(images[split], root)}
        for split, path in jsons.items()
    }
    return {"format": "coco", "root": root, "on_error": "clip", "val": parts["train"], **parts}


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


def _images_of(path: Path) -> Path:
    """The folder that has the first ``file_name`` of a json; that of the json if none has it."""
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        found = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
    if found is None:
        return path.parent
    name, word = json.loads(found[1]), path.stem.rpartition("_")[2]  # instances_train2017: train2017
    for folder in (path.parent, path.parent.parent):
        for below in ("", word, "images", f"images/{word}"):
            if (folder / below / name).is_file():
                return folder / below
    return path.parent


def _classes(folder: Path) -> list[str]:
    """The class names in the xml files of a folder, sorted."""
    found = {name for path in folder.glob("*.xml") for name in _CLASS.findall(path.read_bytes())}
    return sorted(unescape(name.decode("utf-8", "replace")) for name in found)
