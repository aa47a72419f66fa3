"""What ``data=<path>`` may be: a set is images and labels, found by their names."""

import json
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from data import layouts
from data.errors import DataError

SPLIT_WORDS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
RARE_WORDS = {"dev": "val", "devel": "val", "eval": "val", "holdout": "test"}  # unless another is there: "test-dev"
TWINS = [pair for word in ("val", "valid", "validation", "dev") for pair in (("train", word), (word, "train"))]
TRAINING_LISTS = ("trainval", "default")  # the latter is CVAT's
COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')
Folders = Mapping[str, Mapping[str, Sequence[str]]]  # by suffix, the folders with such files and the names


def recognise(place: Path) -> dict[str, Any]:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    Without validation images both splits are all images but those of tests. Raises ``DataError``
    if ``place`` is not one of layouts.SET_KINDS.
    """
    place = Path(os.path.abspath(place))
    result, set_file = None, layouts.find_set_file(place) if place.is_dir() else place
    if set_file is not None and layouts.is_set_file(set_file):
        result = {"format": "yolo", "root": str(set_file)}
    elif place.is_dir():
        folders = _folders_with(place, {".json", ".xml", ".txt", *layouts.IMAGE_SUFFIXES})
        result = _of_folder_of_jsons(place, folders) or _of_xmls(place, folders) or _of_label_files(place, folders)
    elif place.suffix.lower() == ".json":
        result = _of_jsons(place, _twin_of(place), ())
    if result is None:
        around = place.parents[:2] if "images" in place.parts[-2:] else ()  # images/train, train/images
        above = next((folder for folder in around if layouts.find_set_file(folder)), None)
        fix = f"data={above}" if above is not None else f"name {layouts.SET_KINDS}"
        raise DataError(f"{place} is not a data set that can be read as it is. fix: {fix}")
    root = Path(result["root"])
    folder = root if root.is_dir() else root.parent
    return {"name": folder.name if root.is_dir() or root.name in layouts.USUAL_NAMES else root.stem, **result}


def _folders_with(top: Path, suffixes: Set[str]) -> Folders:
    """By suffix: the folders from ``top`` down with such files, relative to it, and the names."""
    from data import io  # which imports numpy: --help needs none

    found: dict[str, dict[str, list[str]]] = {}
    paths = (os.path.split(os.path.relpath(path, top)) for path in io.files_below(top, suffixes))
    for parent, name in sorted(paths):
        suffix = os.path.splitext(name)[1].lower()
        kind = "image" if suffix in layouts.IMAGE_SUFFIXES else suffix
        found.setdefault(kind, {}).setdefault(parent or ".", []).append(name)
    return found


def _split_in(path: str, words_of: Sequence[Mapping[str, str]] = (SPLIT_WORDS, RARE_WORDS)) -> str | None:
    """Which split a file or folder is for by the last such word in its path: train, val or test."""
    found = re.findall("[A-Z]*[a-z]*", path)
    words = [word.lower().removesuffix("set") for word in reversed(found)]  # "TestImages", "testset"
    return next((known[word] for known in words_of for word in words if word in known), None)


def _splits_of(folders: Iterable[str]) -> tuple[list[str], list[str]] | None:
    """The folders of training and validation images, if some are called so; tests are left out.

    Without any for training, those that are called nothing are, or those for validation; without
    any for validation, both are those of training. Raises ``DataError`` if others lie below these.
    """
    tops: dict[str | None, dict[str, None]] = {}
    folders = list(folders)
    shared = len(Path(os.path.commonpath(folders or ["."])).parts)  # of all: training_data/train, training_data/test
    if not {_split_in("/".join(folder.split("/")[shared:])) for folder in folders} & {"train", "val"}:
        shared = 0
    for folder in folders:
        parts = folder.split("/")
        depths = range(shared + 1, len(parts))
        depth = next((depth for depth in depths if _split_in(parts[depth - 1])), len(parts))
        top = "/".join(parts[:depth])
        of_split = tops.setdefault(_split_in("/".join(parts[shared:depth])), {})
        if of_split.keys().isdisjoint([".", *("/".join(parts[:length]) for length in range(depth))]):
            of_split[top] = None
    if tops.keys() in (set(), {None}, {"train", None}, {"val"}, {"test"}):
        return None
    train = next((tops[split] for split in ("train", None, "val") if split in tops), {})
    others = (other for split in ("val", "test") for other in tops.get(split, ()) if other not in train)
    if below := next(((other, top) for other in others for top in train if _is_below(other, top)), None):
        raise DataError(f"the images in {below[1]} lie above those in {below[0]}. fix: move them to a folder train")
    return list(train), list(tops.get("val", train))


def _is_below(path: str, folder: str) -> bool:
    return folder == "." or f"{path}/".startswith(f"{folder}/")


def _of_folder_of_jsons(folder: Path, folders: Folders) -> dict[str, Any] | None:
    """The options for a folder with COCO jsons; if some are called instances, with those alone."""
    paths = [folder / place / name for place, names in folders.get(".json", {}).items() for name in names]
    by_split: dict[str | None, list[Path]] = {}
    called = [path for path in paths if "instances" in path.name]
    for path in called or filter(_is_coco, paths):
        by_split.setdefault(_split_in(str(path.relative_to(folder))), []).append(path)
    if not by_split:
        return None
    chosen = next(by_split[split] for split in ("train", None, "val", "test") if split in by_split)
    twins = by_split.get("val", chosen)
    twins = [twin] if (twin := _twin_of(chosen[0])) in twins else twins
    for several in (paths for paths in (chosen, twins) if len(paths) > 1):
        listed = ", ".join(str(path.relative_to(folder)) for path in several)
        raise DataError(f"{folder} holds several COCO jsons for one split: {listed}. fix: data=<one of them>")
    return _of_jsons(chosen[0], twins[0], _with_parents(folder, folders.get("image", ())))


def _is_coco(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        return all(text.find(key) >= 0 for key in COCO_KEYS)
    return False


def _twin_of(path: Path) -> Path:
    """The json of the other split, with val in place of train in its path, say; else the same."""
    for word, other in TWINS:
        for depth in (1, 2):
            twin = Path(*path.parts[:-depth], *(name.replace(word, other) for name in path.parts[-depth:]))
            if twin != path and twin.is_file():
                return twin
    return path


def _with_parents(top: Path, folders: Iterable[str]) -> list[Path]:
    """Folders relative to ``top`` and all between, as absolute paths."""
    places = {place for name in folders for place in (Path(name), *Path(name).parents)}
    return [top / place for place in sorted(places)]


def _of_jsons(path: Path, twin: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """The options for one or two COCO jsons with images at a usual place or in ``folders``."""
    jsons = {"train": path, "val": twin}
    if _split_in(f"{path.parent.name}/{path.name}") == "val" and path != twin:
        jsons = {"train": twin, "val": path}
    images = {split: _images_of(json_path, folders) for split, json_path in jsons.items()}
    root = os.path.commonpath([*(json_path.parent for json_path in jsons.values()), *images.values()])
    paths = {split: [os.path.relpath(place[split], root) for place in (jsons, images)] for split in jsons}
    return {"format": "coco", "root": root, "on_error": "clip", **{split: _split(*paths[split]) for split in jsons}}


def _images_of(path: Path, others: Sequence[Path]) -> Path:
    """The folder that has most of the first images of a json, a usual one or one of ``others``.

    Of several that have half as many, that of the json's split. If none has any, that of the json.
    """
    try:
        names = _file_names_in(path, layouts.COMPARED_NAMES)
    except ValueError:  # a broken name: reading the whole file says more
        return path.parent
    word = path.stem.rpartition("_")[2]  # instances_train2017: train2017
    split = word.rstrip("0123456789")
    words = ("", word, split, f"{split}2017")
    below = (*words, *(f"images/{word}" for word in words))
    places = [folder / place for folder in (path.parent, path.parent.parent) for place in below]
    places += others
    own = _split_in(f"{path.parent.name}/{path.name}")
    of_split = [_split_in(os.path.relpath(place, path.parent.parent)) for place in places]
    likely = [3 if split == own else {None: 2, "train": 1}.get(split, 0) for split in of_split]
    for dropped in range(max((name.count("/") for name in names), default=0) + 1):  # folders that are not here
        called = [layouts.tail(name, dropped) for name in names]
        counts = [sum(os.path.isfile(place / name) for name in called) for place in places]
        if most := max(counts):
            return max(zip(places, counts, likely, strict=True), key=lambda of: (2 * of[1] > most, of[2], of[1]))[0]
    return path.parent


def _of_xmls(folder: Path, folders: Folders) -> dict[str, Any] | None:
    """The options for Pascal VOC's xml files, wherever they and their images lie below a folder."""
    xmls = folders.get(".xml", {})
    classes = set[str]()
    for path in (folder / place / name for place, names in xmls.items() for name in names):
        with suppress(OSError, DataError):  # reading that file says more
            classes.update(element.findtext("name", "").strip() for element in layouts.xml_root(path).iter("object"))
    classes.discard("")
    if not classes:
        return None
    options = {"format": "voc", "root": str(folder), "names": sorted(classes)}
    images = os.path.commonpath(folders.get("image", {"."}))
    if lists := _lists_of(folder, folders):
        splits = [[names.get(split, names["train"]) for _, names in lists] for split in ("train", "val")]
        found = [[root for root, _ in lists]] * 2
    elif named := _splits_of(xmls):
        splits, found = [*named], [*(_splits_of(folders.get("image", ())) or named)]
    elif _splits_of(folders.get("image", ())):
        raise DataError(
            f"{folder}: the images lie in folders of splits, and the xml files do not. fix: move them into such folders"
        )
    else:
        splits, found = [[os.path.commonpath(xmls)]] * 2, [[images]] * 2
    train, val = (
        _split(places, where if len(where) == len(places) else images)
        for places, where in zip(splits, found, strict=True)
    )
    return options | {"train": train, "val": val}


def _lists_of(folder: Path, folders: Folders) -> list[tuple[str, dict[str, str]]]:
    """For each folder of images and xml files, the lists of its splits but that of tests."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for place, lists in _all_lists(folder, folders, folders[".xml"]):
        root = place.partition("ImageSets")[0].rstrip("/") or "."
        if not any(f"{xmls}/".startswith(f"{root}/") for xmls in folders[".xml"]):
            root = "."
        found.setdefault(root, (root, lists))
    return list(found.values())


def _all_lists(folder: Path, folders: Folders, named: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, str]]]:
    """The folders with lists of some of the ``named`` images or xml files; the lists by split.

    Raises ``DataError`` if one list is as good as another, or none is for training, nor a folder.
    """
    stems = {os.path.splitext(name)[0] for names in named.values() for name in names}
    result = []
    # VOC's lists in ImageSets/Main are for detection, those in Layout and Segmentation are not.
    for place, texts in sorted(folders.get(".txt", {}).items(), key=lambda item: not item[0].endswith("Main")):
        lists: dict[str, str] = {}
        for name in sorted(texts, key=lambda name: (len(name), name)):  # train.txt before cat_train.txt
            stem, path = os.path.splitext(name)[0], os.path.normpath(f"{place}/{name}")
            split = "train" if stem.lower() in TRAINING_LISTS else _split_in(stem)
            if split is None or stem in stems or stems.isdisjoint(_stems_of(folder / path)):
                continue
            first = Path(lists.setdefault(split, path)).stem.lower()
            if first != stem.lower() and first not in (*SPLIT_WORDS, *RARE_WORDS, *TRAINING_LISTS):
                raise DataError(f"{folder}: {lists[split]} and {path} are for one split. fix: a list {split}.txt")
        result += [(place, lists)] if lists else []
    chosen = [(place, lists) for place, lists in result if "train" in lists]
    if result and not chosen and _splits_of(named) is None:
        other = next(iter(result[0][1].values()))
        raise DataError(f"{folder}: {other} names images, and there is no list for training. fix: a list train.txt")
    return chosen


def _of_label_files(folder: Path, folders: Folders) -> dict[str, Any] | None:
    """The options for images and label files without a data.yaml, wherever they are in a folder."""
    images = folders.get("image", {})
    stems = {os.path.splitext(name)[0] for names in images.values() for name in names}
    labels = (name for names in folders.get(".txt", {}).values() for name in names)
    if not any(os.path.splitext(name)[0] in stems for name in labels):
        return None
    around = dict.fromkeys((".", *images, *folders[".txt"]))
    places = (os.path.normpath(f"{place}/{name}") for place in around for name in layouts.CLASS_FILES)
    files = [place for place in places if (folder / place).is_file()]
    for file in files[1:]:  # labelImg writes one into each folder of labels
        if layouts.read_names(folder / file) != layouts.read_names(folder / files[0]):
            raise DataError(f"{folder}: {files[0]} and {file} differ. fix: make them agree, or delete one")
    train, val = _splits_of(images) or [[os.path.commonpath(images)]] * 2
    for _, lists in _all_lists(folder, folders, images)[:1]:
        train, val = [lists["train"]], [lists.get("val", lists["train"])]
    names = files[0] if files else None
    return {"format": "yolo", "root": str(folder), "names": names, "train": _split(train), "val": _split(val)}


def _split(annotations: str | list[str], images: str | list[str] = ".") -> dict[str, str | list[str]]:
    """A split of ``data``; a list of one place is that place."""
    places = {"annotations": annotations, "images": images}
    return {key: place[0] if isinstance(place, list) and len(place) == 1 else place for key, place in places.items()}


def _file_names_in(path: Path, count: int | None) -> list[str]:
    """The first ``count`` file names of a json, or all. Raises ValueError."""
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        found = islice(re.finditer(rb'"(?:file_name|coco_url)"\s*:\s*("(?:[^"\\]|\\.)*")', text), count)
        return [json.loads(match[1]).replace("\\", "/") for match in found]


def folders_beside(root: Path, places: Sequence[Path]) -> list[str]:
    """Folders of images below ``root`` that lie in none of ``places`` and are not for tests."""
    if not all(place.is_dir() for place in (root, *places)):  # a list says what is left out
        return []
    found = [root / folder for folder in _folders_with(root, layouts.IMAGE_SUFFIXES).get("image", ())]
    unread = [folder for folder in found if not any(folder.is_relative_to(place) for place in places)]
    return [str(folder) for folder in unread if _split_in(str(folder.relative_to(root))) != "test"]


def jsons_beside(places: Sequence[Path]) -> list[str]:
    """COCO jsons of no usual split beside ``places``; if in folders of splits, in those beside."""
    found = {path for place in places for path in place.parent.glob("*.json")}
    of_splits = [place for place in places if _split_in(place.parent.name)]
    found |= {path for place in of_splits for path in place.parents[1].glob(f"*/{place.name}")}
    unusual = (path for path in found.difference(places) if _split_in("/".join(path.parts[-2:]), [SPLIT_WORDS]) is None)
    return sorted(str(path) for path in unusual if path.is_file() and _is_coco(path))


def files_beside(root: Path, images: Sequence[str], places: Sequence[Path]) -> dict[str, list[str]]:
    """Files in the folders of ``images``, relative to ``root``, that go with none of them, by kind.

    ``places`` are the jsons, lists and folders of xml files of all splits, which name images.
    """
    named = {stem for place in {*places} for stem in _stems_of(place)} | {*map(_stem, images)}
    unnamed, folders = [], {os.path.dirname(os.path.join(root, image)) for image in images}
    for folder in sorted(folders):
        for name in sorted(layouts.names_in(folder)):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in layouts.IMAGE_SUFFIXES and stem not in named:
                unnamed.append(f"{folder}/{name}")
    kinds = {"images that the annotations do not name": unnamed, layouts.UNKNOWN: layouts.unknown_files(folders)}
    return {kind: files for kind, files in kinds.items() if files}


def _stems_of(place: Path) -> set[str]:
    """The stems of the images that a json, list or folder of xml files names."""
    with suppress(OSError, ValueError, DataError):  # reading that split says more
        if place.is_dir():
            xmls = _folders_with(place, {".xml"}).get(".xml", {})
            return {_stem(name) for names in xmls.values() for name in names}
        if place.suffix.lower() == ".json":
            return {*map(_stem, _file_names_in(place, None))}
        lines = layouts.read_lines(place)
        return {_stem(part) for line in lines for part in (line.strip(), layouts.first_column(line))}
    return set()


def _stem(path: str) -> str:
    """The name of an image or xml file without folder and suffix, which a list may leave out."""
    name = os.path.basename(path.replace("\\", "/"))
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in layouts.IMAGE_SUFFIXES or suffix.lower() == ".xml" else name
