"""What ``data=<path>`` may be, and the files that name the images and classes of a set."""

import errno
import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

import yaml

from data.errors import DataError, shown

IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jp2 .jpe .jpeg .jpg .mpo .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()
)
SET_KINDS = (
    "a data.yaml, Darknet's obj.data, a COCO json, or a folder with data.yaml, obj.data, instances_train.json, Pascal "
    "VOC's xml files, or images and .txt files"
)
YAML_SUFFIXES = (".yaml", ".yml")
USUAL_NAMES = ("data.yaml", "data.yml", "obj.data")
# What lies beside pictures and is neither one nor its label file.
OTHER_SUFFIXES = frozenset(".cache .csv .data .html .json .md .names .npy .txt .xml .yaml .yml".split())
UNKNOWN = "files that are not images of a known type"
CLASS_FILES = ("classes.txt", "obj.names", "data.names", "names")
TWINS = (("val", "train", "val"), ("val", "train", "valid"), ("train", "valid", "train"), ("train", "val", "train"))
NAME_FILES = "a text file with one class per line, a data.yaml, Darknet's obj.data or a COCO json"
COMPARED_NAMES = 100  # of a json, to find out where its images are
LISTS = ("train", "trainval", "default", "val")  # of images in VOC's ImageSets/Main; those of tests are not read
_CLASS = re.compile(r"<object>.*?<name>(.*?)</name>", re.DOTALL)
_ENCODING = re.compile(rb"\s*<\?xml[^>]*?encoding=[\"']([\w.-]+)")


def recognise(place: Path) -> dict[str, Any]:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    Without validation images both splits are all images. Raises ``DataError`` if ``place`` is not
    one of SET_KINDS.
    """
    place = Path(os.path.abspath(place))
    if place.is_dir():
        result = _of_folder(place)
    elif place.suffix.lower() == ".json":
        result = _of_json(place)
    else:
        result = {"format": "yolo", "root": str(place)} if is_set_file(place) else None
    if result is None:
        raise DataError(f"{place} is not a data set that can be read as it is. fix: name {SET_KINDS}")
    root = Path(result["root"])
    folder = root if root.is_dir() else root.parent
    return {"name": folder.name if root.is_dir() or root.name in USUAL_NAMES else root.stem, **result}


def find_set_file(folder: Path) -> Path | None:
    """The data.yaml or obj.data of a folder, if it has one."""
    return next((folder / name for name in USUAL_NAMES if (folder / name).is_file()), None)


def is_set_file(place: Path) -> bool:
    """Whether ``place`` has the suffix of a data.yaml or an obj.data."""
    return place.suffix.lower() in (*YAML_SUFFIXES, ".data")


def _of_folder(folder: Path) -> dict[str, Any] | None:
    """The options for a folder in the layout of YOLO, COCO or VOC, or of images and label files."""
    if set_file := find_set_file(folder):
        return {"format": "yolo", "root": str(set_file)}
    for layout in ("annotations/instances_train*.json", "instances_train*.json"):
        if jsons := sorted(folder.glob(layout)):
            return _of_json(jsons[0])
    folders = _folders_with(folder, {".xml", ".txt", *IMAGE_SUFFIXES})
    return _of_xmls(folder, folders) or _of_label_files(folder, folders)


def _folders_with(top: Path, suffixes: Set[str]) -> dict[str, dict[str, list[str]]]:
    """By suffix: the folders from ``top`` down with such files, relative to it, and the names."""
    found: dict[str, dict[str, list[str]]] = {}
    for parent, below, names in os.walk(top):
        below[:] = sorted(name for name in below if name[0] != ".")
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()
            if suffix in suffixes and name[0] != ".":
                kind = "image" if suffix in IMAGE_SUFFIXES else suffix
                found.setdefault(kind, {}).setdefault(os.path.relpath(parent, top), []).append(name)
    return found


def _splits_of(folders: Iterable[str]) -> tuple[str, str] | None:
    """The folders of training and validation images, if some are called so; tests are left out."""
    tops: dict[str, str] = {}
    for folder in folders:
        parts = folder.split("/")
        for depth, part in enumerate(parts):
            if part in ("train", "val", "valid"):
                tops.setdefault(part.removesuffix("id"), "/".join(parts[: depth + 1]))
    return (tops["train"], tops["val"]) if tops.keys() == {"train", "val"} else None


def _of_xmls(folder: Path, folders: dict[str, dict[str, list[str]]]) -> dict[str, Any] | None:
    """The options for Pascal VOC's xml files, wherever they and their images lie below a folder."""
    texts = (read_file(folder / place / name) for place, names in folders.get(".xml", {}).items() for name in names)
    classes = {unescape(name) for text in texts for name in _CLASS.findall(xml_text(text))}
    if not classes:
        return None
    options = {"format": "voc", "root": str(folder), "names": sorted(map(str.strip, classes))}
    images = os.path.commonpath(folders.get("image", {"."}))
    if lists := [name for name in LISTS if (folder / "ImageSets/Main" / f"{name}.txt").is_file()]:
        # Without a list for validation both are the first: data.split takes some of these images.
        both = {split: f"ImageSets/Main/{split if split in lists else lists[0]}.txt" for split in ("train", "val")}
        return options | {split: _split(path) for split, path in both.items()}
    if splits := _splits_of(folders[".xml"]):
        in_images = _splits_of(folders.get("image", ())) or splits
        pairs = zip(splits, in_images, strict=True)
        return options | dict(zip(("train", "val"), (_split(*pair) for pair in pairs), strict=True))
    both = _split(os.path.commonpath(folders[".xml"]), images)
    return options | {"train": both, "val": both}


def _of_label_files(folder: Path, folders: dict[str, dict[str, list[str]]]) -> dict[str, Any] | None:
    """The options for images and label files without a data.yaml, wherever they are in a folder."""
    stems = {os.path.splitext(name)[0] for names in folders.get("image", {}).values() for name in names}
    labels = (name for names in folders.get(".txt", {}).values() for name in names)
    if not any(os.path.splitext(name)[0] in stems for name in labels):
        return None
    names_file = next((name for name in CLASS_FILES if (folder / name).is_file()), None)
    train, val = _splits_of(folders["image"]) or [os.path.commonpath(folders["image"])] * 2
    return {"format": "yolo", "root": str(folder), "names": names_file, "train": _split(train), "val": _split(val)}


def xml_text(content: bytes) -> str:
    """The text of an XML file by the encoding that it declares. Raises ValueError, LookupError."""
    declared = _ENCODING.match(content)  # not of UTF-16, which has a mark at its start
    usual = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return content.decode(declared[1].decode("ascii") if declared else usual)


def _of_json(path: Path) -> dict[str, Any]:
    """The options for a COCO json and its twin, with val in place of train in its path, say."""
    twins = (
        (split, Path(*path.parts[:-depth], *(name.replace(word, other) for name in path.parts[-depth:])))
        for split, word, other in TWINS
        for depth in (1, 2)
    )
    existing = ((split, twin) for split, twin in twins if twin != path and twin.is_file())
    split, twin = next(existing, ("train", path))
    jsons = {"train": path, "val": path, split: twin}
    images = {split: _images_of(json_path) for split, json_path in jsons.items()}
    root = os.path.commonpath([*(json_path.parent for json_path in jsons.values()), *images.values()])
    paths = {split: [os.path.relpath(place[split], root) for place in (jsons, images)] for split in jsons}
    return {"format": "coco", "root": root, "on_error": "clip", **{split: _split(*paths[split]) for split in jsons}}


def _split(annotations: str, images: str = ".") -> dict[str, str]:
    return {"annotations": annotations, "images": images}


def _images_of(path: Path) -> Path:
    """The folder that has most of the first images of a json; if none has any, that of the json."""
    try:
        names = _file_names_in(path, COMPARED_NAMES)
    except ValueError:  # a broken name: reading the whole file says more
        return path.parent
    word = path.stem.rpartition("_")[2]  # instances_train2017: train2017
    split = word.rstrip("0123456789")
    words = ("", word, split, f"{split}2017")
    below = (*words, *(f"images/{word}" for word in words))
    places = [folder / place for folder in (path.parent, path.parent.parent) for place in below]
    counts = [sum(os.path.isfile(place / name) for name in names) for place in places]  # False if impossible
    return places[counts.index(max(counts))] if any(counts) else path.parent


def _file_names_in(path: Path, count: int | None) -> list[str]:
    """The first ``count`` file names of a json, or all. Raises ValueError."""
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        found = islice(re.finditer(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text), count)
        return [json.loads(match[1]).replace("\\", "/") for match in found]


def files_beside(root: Path, images: Sequence[str], places: Sequence[Path]) -> dict[str, list[str]]:
    """Files in the folders of ``images``, relative to ``root``, that go with none of them, by kind.

    ``places`` are the jsons, lists and folders of xml files of all splits, which name images.
    """
    named = {Path(image).stem for image in images} | {stem for place in places for stem in _stems_of(place)}
    unnamed, unknown = [], []
    for folder in sorted({os.path.dirname(os.path.join(root, image)) for image in images}):
        for name in sorted(names_in(folder)):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() not in IMAGE_SUFFIXES | OTHER_SUFFIXES and suffix:
                unknown.append(f"{folder}/{name}")
            elif suffix.lower() in IMAGE_SUFFIXES and stem not in named:
                unnamed.append(f"{folder}/{name}")
    kinds = {"images that the annotations do not name": unnamed, UNKNOWN: unknown}
    return {kind: files for kind, files in kinds.items() if files}


def _stems_of(place: Path) -> set[str]:
    """The stems of the images that a json, list or folder of xml files names."""
    with suppress(OSError, ValueError, DataError):  # reading that split says more
        if place.is_dir():
            return {
                Path(name).stem for names in _folders_with(place, {".xml"}).get(".xml", {}).values() for name in names
            }
        if place.suffix.lower() == ".json":
            return {Path(name).stem for name in _file_names_in(place, None)}
        return {Path(line.strip()).stem for line in read_lines(place)}
    return set()


def names_in(folder: str) -> list[str]:
    """The names in a folder, none of hidden files; none at all if it cannot be read."""
    with suppress(OSError):
        return [name for name in os.listdir(folder) if name[0] != "."]
    return []


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a data.yaml or another YAML file. Raises ``DataError`` if it does not hold keys."""
    try:
        text = read_file(path)
        depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > 100:  # reading takes the square of the depth
                raise yaml.YAMLError("it has an alias or is nested deep: a few lines can be billions of values")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: e.g. a date with a 13th month
        raise DataError(f"{path} is not valid YAML ({' '.join(str(error).split())}). fix: correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys. fix: name a data.yaml with train, val and names")
    return content


def read_set_file(path: Path) -> dict[str, Any]:
    """Read a data.yaml or obj.data: keys such as train, val and path, and names as a list, if any.

    A data.yaml may have names as a dictionary with keys 0, 1, ... Raises ``DataError``.
    """
    if path.suffix.lower() in YAML_SUFFIXES:
        content = load_yaml(path)
        if "kpt_shape" in content:
            raise DataError(f"{path} is for key points (kpt_shape), not for boxes. fix: name a set for detection")
        if isinstance(names := content.get("names"), dict):
            by_number = {int(key) if str(key).isdecimal() else key: name for key, name in names.items()}
            if by_number.keys() != set(range(len(names))):
                raise DataError(f"{path}: the keys of names are {shown(list(names))}. fix: number them from 0 on")
            content["names"] = [by_number[number] for number in range(len(names))]
    else:
        pairs = (line.partition("=") for line in read_lines(path) if not line.lstrip().startswith(("#", ";")))
        content = {key.strip(): value.strip() for key, separator, value in pairs if separator}
        if names_file := content.get("names"):
            content["names"] = _names_in(find_place(names_file, path, starts_of(path)))
    if content.get("names") is not None:
        content["names"] = class_names(content["names"], f"{path}: names")
        count = content.get("nc" if path.suffix.lower() in YAML_SUFFIXES else "classes", len(content["names"]))
        if str(count) != str(len(content["names"])):  # a missing name would shift the others
            raise DataError(f"{path} holds {len(content['names'])} names for {shown(count)} classes. fix: correct one")
    return content


def starts_of(path: Path, start: str = "") -> list[Path]:
    """Where relative paths in a data.yaml or obj.data may start; ``start`` is its ``path``.

    Darknet starts at the current folder, which usually has ``data/obj.data``. Ultralytics' programs
    look for ``path`` in a folder ``datasets`` in it or beside it.
    """
    here = Path.cwd()
    folders = [path.parent, path.parent.parent, here, *([here / "datasets", here / "../datasets"] if start else [])]
    return list(dict.fromkeys([*(folder / start for folder in folders), path.parent]))


def find_place(name: str, path: Path, starts: list[Path]) -> Path:
    """The file or folder ``name`` that ``path`` mentions. Raises ``DataError`` if it is missing.

    Roboflow writes "../train/images" for a folder beside the file: that comes before one outside.
    CVAT writes "data/train.txt" for a file beside it, whatever the folder is called.
    """
    name = name.replace("\\", "/")  # it may be written on Windows
    inside = re.sub(r"^(\.\./)+", "", name)
    tries = [(path.parent, inside), *((start, tried) for tried in (name, inside) for start in starts)]
    tries += [(path.parent, inside.partition("/")[2] or inside)]
    candidates = dict.fromkeys(Path(os.path.normpath(start / tried)) for start, tried in tries)
    place = next((candidate for candidate in candidates if candidate.exists()), None)
    if place is None:
        places = ", ".join(map(str, candidates))
        raise DataError(f"{path} names {name}, but there is no such place (looked for {places}). fix: correct it")
    return place


def class_names(names: Any, where: str) -> list[str]:
    """Class names as texts. Raises ``DataError``, which names ``where``, if they are not a list."""
    # YAML reads yes, no, on and off as booleans.
    if not isinstance(names, list) or not names or not all(type(name) in (str, int, float) for name in names):
        raise DataError(
            f"{where} must be a list of texts, got {shown(names)}. fix: write one, with yes and no in quotes"
        )
    texts = list(map(str, names))
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise DataError(f"{where} lists {twice!r} twice. fix: give each class its own name")
    return texts


def choose_classes(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """Select the classes (id to name) in ``names``, in its order; ``None`` takes all.

    Raises ``DataError`` for a name that ``path`` lacks.
    """
    if names is None:
        return by_id
    id_of = {name: number for number, name in by_id.items()}
    if missing := [name for name in names if name not in id_of]:
        listed = ", ".join(id_of)
        raise DataError(f"data.names holds {missing[0]!r}, and the classes of {path} are {listed}. fix: correct it")
    return {id_of[name]: name for name in names}


def class_numbers(chosen: Any, names: Sequence[str], key: str) -> list[int]:
    """The numbers of the ``chosen`` classes among ``names``, ascending.

    ``chosen`` is a name, a number from 0, or several of these; ``key`` is its option. Raises
    ``DataError``, which lists the classes, for any other.
    """
    entries = [chosen] if isinstance(chosen, str) or not isinstance(chosen, Iterable) else list(chosen)
    valid = [*names, *range(len(names))]
    wrong = [entry for entry in entries if isinstance(entry, bool) or entry not in valid]  # True == 1
    if wrong or not entries:
        problem = f"{key} holds {shown(wrong[0])}" if wrong else f"{key} is empty"
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        raise DataError(f"{problem}, and the classes are {listed}. fix: some of these, by name or number")
    return sorted({valid.index(entry) % len(names) for entry in entries})


def read_names(path: Path) -> tuple[list[str], list[int] | None]:
    """Class names of a file; for a COCO json, in the order of category ids, the ids as well.

    The suffix tells which of ``NAME_FILES`` it is. Raises ``DataError`` for any other file.
    """
    names, ids, why = None, None, ""
    try:
        if path.suffix.lower() == ".json":
            categories = json.loads(read_file(path))["categories"]
            by_id = {int(category["id"]): str(category["name"]) for category in categories}
            ids = sorted(by_id)
            names = [by_id[number] for number in ids]
        else:
            names = read_set_file(path).get("names") if is_set_file(path) else _names_in(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). fix: name {NAME_FILES}") from error
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f" ({error!r})"
    if not names:
        raise DataError(f"{path} holds no class names{why}. fix: name {NAME_FILES}")
    return names, ids


def _names_in(path: Path) -> list[str]:
    """The lines of a text file, one class each. Only the last ones may be empty."""
    lines = "\n".join(map(str.strip, read_lines(path))).rstrip().splitlines()
    if "" in lines:
        number = lines.index("") + 1
        raise DataError(f"{path}:{number} is empty, but each line counts as a class. fix: write a name, or remove it")
    return lines


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, other bytes as surrogates. Raises ``DataError`` if binary."""
    content = read_file(path).removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:  # binary, or UTF-16
        raise DataError(f"{path} is not a text file in UTF-8. fix: name one with an entry per line")
    return content.decode("utf-8", "surrogateescape").splitlines()


def read_file(path: str | os.PathLike[str], limit: int = sys.maxsize) -> bytes:
    """Read at most ``limit`` bytes of a regular file; for any other, raise ``OSError``.

    Python's file objects make twice as many system calls, which takes as long as parsing a header.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe
    try:
        if not stat.S_ISREG((status := os.fstat(descriptor)).st_mode):  # a device may never end
            raise OSError(errno.EISDIR, "not a regular file", os.fspath(path))
        size = min(status.st_size, limit)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
    finally:
        os.close(descriptor)
    return data
