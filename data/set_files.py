"""What ``data=<path>`` may be, and the files that name the images and classes of a set."""

from __future__ import annotations

import difflib
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

import yaml

from data.errors import DataError, shown

IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()
)  # in lower case; files with other suffixes are not images
TRAIN, VAL = ("train",), ("valid", "val")
# Names that say what a file or folder is for, not which set it belongs to.
USUAL = re.compile(r"(_?annotations?|labels|data|dataset|obj|images|train|valid|val|test)(\.coco)?")
KINDS = (
    "a data.yaml, Darknet's obj.data, a COCO json, or a folder with one of these, with Pascal VOC's xml files or with "
    "images and .txt files"
)
_CLASS = re.compile(rb"<object>.*?<name>\s*(.*?)\s*</name>", re.DOTALL)
YAML_SUFFIXES = (".yaml", ".yml")
SET_SUFFIXES = (*YAML_SUFFIXES, ".data")
USUAL_NAMES = ("data.yaml", "data.yml", "obj.data")
NAME_FILES = "a text file with one class per line, a data.yaml, Darknet's obj.data or a COCO json"


def recognise(place: Path) -> dict[str, Any]:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    ``place`` is any of KINDS. Where a set has no validation images, both splits are all images.
    Raises ``DataError`` for anything else.
    """
    place = Path(os.path.abspath(place))
    if place.suffix.lower() in SET_SUFFIXES and place.is_file():
        result: dict[str, Any] | None = {"format": "yolo", "root": str(place)}
    elif place.is_dir():
        named = next((place / name for name in USUAL_NAMES if (place / name).is_file()), None)
        result = {"format": "yolo", "root": str(named)} if named else _of_folder(place)
    else:
        result = _of_json(place) if place.suffix.lower() == ".json" else None
    if not result:
        raise DataError(f"{place} is no data set that can be read as it is. fix: name {KINDS}")
    return {"name": _name(place), **result}


def _name(place: Path) -> str:
    """The stem of the file or folder; of ``cats/train/data.yaml`` that is cats."""
    stems = [place.stem if place.is_file() else place.name, *(part.name for part in place.parents)]
    specific = [stem for stem in stems if stem and not USUAL.fullmatch(stem.lower()) and "instances_" not in stem]
    return specific[0] if specific else stems[0]


def _of_folder(folder: Path) -> dict[str, Any] | None:
    """The options for a folder of COCO's, of Pascal VOC's, or of images and label files."""
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
    jsons = _json_of_each_split(path)
    images = {split: _images_of(path) for split, path in jsons.items()}
    root = os.path.commonpath([*(path.parent for path in jsons.values()), *images.values()])
    parts = {
        split: {"annotations": os.path.relpath(path, root), "images": os.path.relpath(images[split], root)}
        for split, path in jsons.items()
    }
    return {"format": "coco", "root": root, "on_error": "clip", "val": parts["train"], **parts}


def _json_of_each_split(path: Path) -> dict[str, Path]:
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
        match = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
    if match is None:
        return path.parent
    name, word = json.loads(match[1]), path.stem.rpartition("_")[2]  # instances_train2017: train2017
    for folder in (path.parent, path.parent.parent):
        for below in ("", word, "images", f"images/{word}"):
            if (folder / below / name).is_file():
                return folder / below
    return path.parent


def _classes(folder: Path) -> list[str]:
    """The class names in the xml files of a folder, sorted."""
    names = {name for path in folder.glob("*.xml") for name in _CLASS.findall(path.read_bytes())}
    return sorted(unescape(name.decode("utf-8", "replace")) for name in names)


def find_set_file(root: Path) -> Path:
    """Find the data.yaml or obj.data of a folder. Raises ``DataError`` where there is none."""
    for name in USUAL_NAMES:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"data.root: {root} holds no {' or '.join(USUAL_NAMES)}. fix: data.root=<such a file>, or "
        "data.train.annotations=<a folder of images, or a list of them>"
    )


class _WithoutAliases(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses aliases: a few lines of them are billions of values."""

    def compose_node(self, *arguments: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} holds an alias")
        return super().compose_node(*arguments)


def load_yaml(path: Path, aliases: bool = False) -> dict[str, Any]:
    """Read the keys of a data.yaml, or another YAML file. Raises ``DataError`` where it is none."""
    try:
        content = yaml.load(path.read_bytes(), yaml.SafeLoader if aliases else _WithoutAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: e.g. a date with a 13th month
        raise DataError(f"{path} is not valid YAML ({' '.join(str(error).split())}). fix: correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys. fix: name a data.yaml with train, val and names")
    return content


def names_of_yaml(content: dict[str, Any], path: Path) -> list[str] | None:
    """The class names of a data.yaml: a list, or a dictionary with keys 0, 1, ... or "0", "1", ...

    ``None`` where it has none. Raises ``DataError`` for unusable ones.
    """
    names = content.get("names")
    if names is None:
        return None
    if isinstance(names, dict):
        names = {int(key) if isinstance(key, str) and key.isdecimal() else key: name for key, name in names.items()}
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(
                f"{path}: the keys of names are {shown(list(names))}. fix: number them from 0 on, none left out"
            )
        names = [names[number] for number in range(len(names))]
    texts = class_names(names, f"{path}: names")
    count = content.get("nc", len(texts))
    if count != len(texts):
        raise DataError(f"{path} has nc={shown(count)}, but {len(texts)} names. fix: correct one of them")
    return texts


def class_names(names: Any, where: str) -> list[str]:
    """A list of class names as texts. Raises ``DataError``, naming ``where``, if it is none."""
    if not isinstance(names, list) or not names:
        raise DataError(f"{where} must be a list with at least one class, got {shown(names)}. fix: write one")
    for name in names:
        # YAML reads yes, no, on and off as booleans.
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise DataError(f"{where} holds {shown(name)}, which is not text. fix: put it in quotes")
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise DataError(f"{where} lists {twice!r} twice. fix: give each class its own name")
    return texts


def darknet_options(path: Path) -> dict[str, str]:
    """Read the ``key = value`` lines of Darknet's obj.data. Raises ``DataError`` for others."""
    options = {}
    for number, line in enumerate(read_lines(path, "Darknet's obj.data, with train=, valid= and names="), start=1):
        text = line.strip()
        if text and text[0] not in "#;":
            key, separator, value = (part.strip() for part in text.partition("="))
            if not separator:
                raise DataError(f"{path}:{number} is {shown(text)} instead of key = value. fix: correct the line")
            options[key] = value
    return options


def darknet_path(name: str, path: Path, base: Path) -> Path:
    """Find a file that the obj.data at ``path`` names, in the first of ``darknet_folders``.

    Darknet itself starts at the current folder, which usually holds ``data/obj.data``. Raises
    ``DataError`` where there is none.
    """
    name = name.replace("\\", "/")
    candidates = list(dict.fromkeys(folder / name for folder in darknet_folders(path, base)))
    place = next((candidate for candidate in candidates if candidate.exists()), None)
    if place is None:
        places = ", ".join(map(str, candidates))
        raise DataError(f"{path} names {name}, but there is no such file (looked for {places}). fix: correct its path")
    return place


def darknet_folders(path: Path, base: Path) -> list[Path]:
    """The folders that paths in obj.data, and in the lists it names, may be relative to."""
    return [path.parent, path.parent.parent, base, Path.cwd()]


def choose_classes(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """Select the classes (id to name) in ``names``, in its order; ``None`` takes all.

    Raises ``DataError`` where a name is not among those of ``path``.
    """
    if names is None:
        return by_id
    id_of = {name: number for number, name in by_id.items()}
    for name in names:
        if name not in id_of:
            near = difflib.get_close_matches(name, id_of, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its categories are {', '.join(id_of)}."
            raise DataError(
                f"data.names holds {name!r}, which is not a category of {path}: {hint} fix: correct data.names"
            )
    return {id_of[name]: name for name in names}


def read_names(path: Path) -> tuple[list[str], list[int] | None]:
    """Class names of a file; for a COCO json, sorted by category id, the ids as well.

    The suffix tells which of ``NAME_FILES`` it is. Raises ``DataError`` where it is none.
    """
    suffix = path.suffix.lower()
    ids = None
    try:
        if suffix == ".json":
            categories = json.loads(path.read_bytes())["categories"]
            by_id = {int(category["id"]): str(category["name"]) for category in categories}
            ids = sorted(by_id)
            names = [by_id[number] for number in ids]
        elif suffix in YAML_SUFFIXES:
            names = names_of_yaml(load_yaml(path), path) or []
        elif suffix == ".data":
            options = darknet_options(path)
            if "names" not in options:
                raise DataError(f"{path} has no names=. fix: add the line, or name {NAME_FILES}")
            return _lines_of(darknet_path(options["names"], path, path.parent)), None
        else:
            names = _lines_of(path)
    except OSError as error:
        raise DataError(f"the class names {path} cannot be read ({error.strerror}). fix: name {NAME_FILES}") from error
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a list of class names. fix: name {NAME_FILES}") from error
    if not names:
        raise DataError(f"{path} holds no class names. fix: name {NAME_FILES}")
    return names, ids


def _lines_of(path: Path) -> list[str]:
    """The lines of a text file, a class each. Empty ones are allowed at the end only."""
    lines = [line.strip() for line in read_lines(path, "obj.names, with one class per line")]
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines:
        raise DataError(
            f"{path}:{lines.index('') + 1} is empty, but each line counts as a class. fix: write a name, or remove it"
        )
    return lines


def read_lines(path: Path, example: str) -> list[str]:
    """The lines of a UTF-8 text file; invalid bytes become surrogates, as in file names.

    Raises ``DataError``, proposing ``example``, where the file is not text.
    """
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:  # binary, or UTF-16
        raise DataError(f"{path} is not a text file in UTF-8. fix: name a list such as {example}")
    return content.decode("utf-8", "surrogateescape").splitlines()
