"""What ``data=<path>`` may be: a set is images and labels, found by their names."""

import json
import mmap
import os
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Tree:
    """What a folder holds: by suffix, or "image", the folders with such files and their names."""

    top: Path
    names: Mapping[str, Mapping[str, Sequence[str]]]

    def folders(self, kind: str) -> list[str]:
        """The folders with files of a kind, relative to ``top``."""
        return list(self.names.get(kind, ()))

    def files(self, kind: str) -> list[str]:
        """The files of a kind, relative to ``top``."""
        places = self.names.get(kind, {})
        return [os.path.normpath(f"{place}/{name}") for place, names in places.items() for name in names]

    def stems(self, kind: str) -> set[str]:
        """The names of the files of a kind without their suffixes."""
        return {Path(file).stem for file in self.files(kind)}


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
        tree = _tree_of(place, {".json", ".xml", ".txt", *layouts.IMAGE_SUFFIXES})
        result = _coco(tree) or _voc(tree) or _label_files(tree)
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


def _tree_of(top: Path, suffixes: Set[str]) -> Tree:
    """All files with ``suffixes`` from ``top`` down."""
    from data import io  # which imports numpy: --help needs none

    names: dict[str, dict[str, list[str]]] = {}
    for parent, name in sorted(os.path.split(os.path.relpath(path, top)) for path in io.files_below(top, suffixes)):
        suffix = os.path.splitext(name)[1].lower()
        kind = "image" if suffix in layouts.IMAGE_SUFFIXES else suffix
        names.setdefault(kind, {}).setdefault(parent or ".", []).append(name)
    return Tree(top, names)


def _coco(tree: Tree) -> dict[str, Any] | None:
    """Folders with COCO jsons; if some are called instances, those alone.

    annotations/instances_train.json, annotations/instances_val.json, train/1.jpg, val/2.jpg
    train/_annotations.coco.json, train/1.jpg, valid/_annotations.coco.json, valid/2.jpg
    """
    files = tree.files(".json")
    called = [file for file in files if "instances" in os.path.basename(file)]
    by_split: dict[str | None, list[Path]] = {}
    for file in called or [file for file in files if _is_coco(tree.top / file)]:
        by_split.setdefault(_split_in(file), []).append(tree.top / file)
    if not by_split:
        return None
    chosen = next(by_split[split] for split in ("train", None, "val", "test") if split in by_split)
    twins = by_split.get("val", chosen)
    twin = _twin_of(chosen[0])
    if twin in twins:
        twins = [twin]
    for several in (chosen, twins):
        if len(several) > 1:
            listed = ", ".join(os.path.relpath(path, tree.top) for path in several)
            raise DataError(f"{tree.top} holds several COCO jsons for one split: {listed}. fix: data=<one of them>")
    folders = {place for name in tree.folders("image") for place in (Path(name), *Path(name).parents)}
    return _of_jsons(chosen[0], twins[0], [tree.top / folder for folder in sorted(folders)])


def _voc(tree: Tree) -> dict[str, Any] | None:
    """Pascal VOC's xml files, wherever they and their images lie.

    Annotations/1.xml, JPEGImages/1.jpg, ImageSets/Main/train.txt, ImageSets/Main/val.txt
    train/1.xml, train/1.jpg, valid/2.xml, valid/2.jpg
    """
    classes = _classes_of(tree)
    if not classes:
        return None
    images, both = os.path.commonpath(tree.folders("image") or ["."]), ("train", "val")
    if roots := _lists_by_root(tree):
        splits = {
            split: _split([lists.get(split, lists["train"]) for lists in roots.values()], [*roots]) for split in both
        }
    elif of_xmls := _splits_of(tree.folders(".xml")):
        of_images = _splits_of(tree.folders("image")) or of_xmls
        splits = {
            split: _split(xmls, places if len(places) == len(xmls) else images)
            for split, xmls, places in zip(both, of_xmls, of_images, strict=True)
        }
    elif _splits_of(tree.folders("image")):
        fix = "fix: move them into such folders"
        raise DataError(f"{tree.top}: the images lie in folders of splits, and the xml files do not. {fix}")
    else:
        splits = dict.fromkeys(both, _split(os.path.commonpath(tree.folders(".xml")), images))
    return {"format": "voc", "root": str(tree.top), "names": classes, **splits}


def _label_files(tree: Tree) -> dict[str, Any] | None:
    """Images and label files without a data.yaml, wherever they are.

    images/train/1.jpg, labels/train/1.txt, images/val/2.jpg, labels/val/2.txt, classes.txt
    obj_train_data/1.jpg, obj_train_data/1.txt, obj.names, train.txt
    """
    folders = tree.folders("image")
    if tree.stems("image").isdisjoint(tree.stems(".txt")):
        return None
    around = dict.fromkeys([".", *folders, *tree.folders(".txt")])
    places = [os.path.normpath(f"{place}/{name}") for place in around for name in layouts.CLASS_FILES]
    files = [place for place in places if (tree.top / place).is_file()]
    for file in files[1:]:  # labelImg writes one into each folder of labels
        if layouts.read_names(tree.top / file) != layouts.read_names(tree.top / files[0]):
            raise DataError(f"{tree.top}: {files[0]} and {file} differ. fix: make them agree, or delete one")
    train, val = _splits_of(folders) or [[os.path.commonpath(folders)]] * 2
    for lists in list(_lists(tree, "image").values())[:1]:
        train, val = [lists["train"]], [lists.get("val", lists["train"])]
    names = files[0] if files else None
    return {"format": "yolo", "root": str(tree.top), "names": names, "train": _split(train), "val": _split(val)}


def _split_in(path: str, words_of: Sequence[Mapping[str, str]] = (SPLIT_WORDS, RARE_WORDS)) -> str | None:
    """Which split a file or folder is for by the last such word in its path: train, val or test."""
    found = re.findall("[A-Z]*[a-z]*", path)
    words = [word.lower().removesuffix("set") for word in reversed(found)]  # "TestImages", "testset"
    return next((known[word] for known in words_of for word in words if word in known), None)


def _splits_of(folders: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The folders of training and validation images, if some are called so; tests are left out.

    Without any for training, those that are called nothing are, or those for validation; without
    any for validation, both are those of training. Raises ``DataError`` if others lie below these.
    """
    shared = len(Path(os.path.commonpath(folders or ["."])).parts)  # of all: training_data/train, training_data/test
    if not {_split_below(folder, shared) for folder in folders} & {"train", "val"}:
        shared = 0
    tops: dict[str | None, list[str]] = {}
    for folder in folders:
        top = _folder_of_split(folder, shared)
        of_split = tops.setdefault(_split_below(top, shared), [])
        if not any(_is_below(top, other) for other in of_split):
            of_split.append(top)
    if tops.keys() in (set(), {None}, {"train", None}, {"val"}, {"test"}):
        return None
    train = next((tops[split] for split in ("train", None, "val") if split in tops), [])
    for other in [*tops.get("val", ()), *tops.get("test", ())]:
        for top in train:
            if other not in train and _is_below(other, top):
                raise DataError(f"the images in {top} lie above those in {other}. fix: move them to a folder train")
    return train, tops.get("val", train)


def _split_below(folder: str, shared: int) -> str | None:
    return _split_in("/".join(folder.split("/")[shared:]))


def _folder_of_split(folder: str, shared: int) -> str:
    """The folder of a whole split around a folder, as train of train/images/cats, else itself."""
    parts = folder.split("/")
    for depth in range(shared + 1, len(parts)):
        if _split_in(parts[depth - 1]):
            return "/".join(parts[:depth])
    return folder


def _is_below(path: str, folder: str) -> bool:
    return folder == "." or f"{path}/".startswith(f"{folder}/")


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


def _of_jsons(path: Path, twin: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """The options for one or two COCO jsons with images at a usual place or in ``folders``."""
    jsons = {"train": path, "val": twin}
    if _split_in(f"{path.parent.name}/{path.name}") == "val" and path != twin:
        jsons = {"train": twin, "val": path}
    images = {split: _images_of(jsons[split], folders) for split in jsons}
    root = os.path.commonpath([path.parent, twin.parent, *images.values()])
    splits = {
        split: _split(os.path.relpath(jsons[split], root), os.path.relpath(images[split], root)) for split in jsons
    }
    return {"format": "coco", "root": root, "on_error": "clip", **splits}


def _images_of(path: Path, others: Sequence[Path]) -> Path:
    """The folder that has most of the first images of a json, a usual one or one of ``others``.

    Of several that have half as many, that of the json's split. If none has any, that of the json.
    """
    try:
        names = _file_names_in(path, layouts.COMPARED_NAMES)
    except ValueError:  # a broken name: reading the whole file says more
        return path.parent
    places = [*_usual_places(path), *others]
    deepest = max((name.count("/") for name in names), default=0)
    for dropped in range(deepest + 1):  # folders that are not here
        called = [layouts.tail(name, dropped) for name in names]
        counts = {place: sum(os.path.isfile(place / name) for name in called) for place in places}
        most = max(counts.values())
        if most:
            full = [place for place in counts if 2 * counts[place] > most]
            return max(full, key=lambda place: (_likelihood(place, path), counts[place]))
    return path.parent


def _usual_places(path: Path) -> list[Path]:
    """The folders in which the images of a json often are."""
    word = path.stem.rpartition("_")[2]  # instances_train2017: train2017
    split = word.rstrip("0123456789")
    words = ("", word, split, f"{split}2017")
    folders = [top / below for top in (path.parent, path.parent.parent) for below in ("", "images")]
    return [folder / word for folder in folders for word in words]


def _likelihood(place: Path, path: Path) -> int:
    """How well the name of a folder of images fits the split of the json at ``path``."""
    split, own = (_split_in(os.path.relpath(one, path.parent.parent)) for one in (place, path))
    return 3 if split == own else {None: 2, "train": 1}.get(split, 0)


def _classes_of(tree: Tree) -> list[str]:
    """The sorted names of the classes in all xml files."""
    classes = set[str]()
    for file in tree.files(".xml"):
        with suppress(OSError, DataError):  # reading that file says more
            objects = layouts.xml_root(tree.top / file).iter("object")
            classes.update(element.findtext("name", "").strip() for element in objects)
    return sorted(classes - {""})


def _lists_by_root(tree: Tree) -> dict[str, dict[str, str]]:
    """For each folder of images and xml files, the lists of its splits but that of tests."""
    found: dict[str, dict[str, str]] = {}
    for place, lists in _lists(tree, ".xml").items():
        root = place.partition("ImageSets")[0].rstrip("/") or "."
        if not any(_is_below(xmls, root) for xmls in tree.folders(".xml")):
            root = "."
        found.setdefault(root, lists)
    return found


def _lists(tree: Tree, kind: str) -> dict[str, dict[str, str]]:
    """By folder: its lists of some of the files of a kind, by split.

    Raises ``DataError`` if one list is as good as another, or none is for training, nor a folder.
    """
    texts = tree.names.get(".txt", {})
    found: dict[str, dict[str, str]] = {}
    # VOC's lists in ImageSets/Main are for detection, those in Layout and Segmentation are not.
    for place in sorted(texts, key=lambda place: not place.endswith("Main")):
        if lists := _lists_in(tree, place, tree.stems(kind)):
            found[place] = lists
    chosen = {place: lists for place, lists in found.items() if "train" in lists}
    if found and not chosen and _splits_of(tree.folders(kind)) is None:
        other = next(path for lists in found.values() for path in lists.values())
        raise DataError(f"{tree.top}: {other} names images, and there is no list for training. fix: a list train.txt")
    return chosen


def _lists_in(tree: Tree, place: str, stems: Set[str]) -> dict[str, str]:
    """The lists in one folder that name some of ``stems``, by split."""
    lists: dict[str, str] = {}
    names = sorted(tree.names[".txt"][place], key=lambda name: (len(name), name))  # train.txt before cat_train.txt
    for name in names:
        stem, path = os.path.splitext(name)[0], os.path.normpath(f"{place}/{name}")
        split = "train" if stem.lower() in TRAINING_LISTS else _split_in(stem)
        if split is None or stem in stems or stems.isdisjoint(_stems_of(tree.top / path)):
            continue
        first = Path(lists.setdefault(split, path)).stem.lower()
        if first != stem.lower() and first not in (*SPLIT_WORDS, *RARE_WORDS, *TRAINING_LISTS):
            raise DataError(f"{tree.top}: {lists[split]} and {path} are for one split. fix: a list {split}.txt")
    return lists


def _split(annotations: str | list[str], images: str | list[str] = ".") -> dict[str, str | list[str]]:
    """A split of ``data``; a list of one place is that place."""
    places = {"annotations": annotations, "images": images}
    return {key: place[0] if len(place) == 1 else place for key, place in places.items()}


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
    found = [root / folder for folder in _tree_of(root, layouts.IMAGE_SUFFIXES).folders("image")]
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
            return {_stem(file) for file in _tree_of(place, {".xml"}).files(".xml")}
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
