"""What ``data=<path>`` may be: a set is images and labels, found by their names."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from data import layouts
from data.errors import DataError

Options = dict[str, Any]  # of data

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
RARE_WORDS = {"dev": "val", "devel": "val", "eval": "val", "holdout": "test"}  # unless another is there
TWINS = [pair for word in ("val", "valid", "validation", "dev") for pair in (("train", word), (word, "train"))]
TRAINING_LISTS = ("trainval", "default")  # the latter is CVAT's
NAMES_OF_LISTS = {*SPLIT_WORDS, *RARE_WORDS, *TRAINING_LISTS}
COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')
FILE_NAME = re.compile(rb'"(?:file_name|coco_url)"\s*:\s*("(?:[^"\\]|\\.)*")')
BY_TOOL = "export it as COCO or YOLO in the tool that wrote it"
OTHER_FORMATS = (  # by suffix and text: what it is, and the way to COCO or YOLO
    (".json", rb'"shapes"\s*:', "labelme's json", "convert it to COCO, as labelme2coco does"),
    (".json", rb'"coordinates"\s*:', "CreateML's json", BY_TOOL),
    (".xml", rb"<annotations>", "CVAT's own xml", "export the task as COCO 1.0 in CVAT"),
    (".txt", rb"(?m)^[A-Za-z]\S*( -?[\d.]+){14,15}\s*$", "KITTI's txt", "convert it to COCO, as Datumaro does"),
    (".jsonl", rb"", "Hugging Face's jsonl", "write its pictures and boxes as one COCO json"),
    (".csv", rb"", "csv", f"{BY_TOOL}, or write its rows as one COCO json"),
    (".zip", rb"", "a zip", "unzip it, and data=<its folder>"),
)
READ_SUFFIXES = {".json", ".xml", ".txt", *layouts.IMAGE_SUFFIXES}


class Tree:
    """What a folder holds: by suffix, or "image", the files relative to ``top``, by folder."""

    def __init__(self, top: Path) -> None:
        from data import io  # which imports numpy: --help needs none

        self.top = top
        self.files = defaultdict[str, list[str]](list)
        paths = [io.relative_name(path, top) for path in io.files_below(top, READ_SUFFIXES)]
        for path in sorted(paths, key=os.path.split):
            kind = "image" if layouts.is_image(path) else os.path.splitext(path)[1].lower()
            self.files[kind].append(path)

    def folders(self, kind: str) -> list[str]:
        """The folders with files of a kind, relative to ``top``."""
        return list(dict.fromkeys(os.path.dirname(file) or "." for file in self.files[kind]))

    def stems(self, kind: str) -> set[str]:
        """The names of the files of a kind without their suffixes."""
        return set(map(stem_of, self.files[kind]))


def recognise(place: Path) -> Options:
    """The name, format, root and splits of the set at ``place``, as options of ``data``.

    The first layout that fits is taken. Without validation images both splits are all images but
    those of tests. Raises ``DataError`` if none fits, or two ways are as good.
    """
    place = Path(os.path.abspath(place))
    # data.yaml, train/images/1.jpg, train/labels/1.txt, valid/images/2.jpg, valid/labels/2.txt
    # obj.data, obj.names, train.txt, obj_train_data/1.jpg, obj_train_data/1.txt
    set_file = layouts.find_set_file(place) if place.is_dir() else place
    found: Options | None = None
    if set_file is not None and layouts.is_set_file(set_file):
        found = {"format": "yolo", "root": str(set_file)}
    elif place.is_dir():
        tree = Tree(place)
        found = _coco_folder(tree) or _voc(tree) or _label_files(tree)
    elif place.suffix.lower() == ".json":
        found = _coco_file(place)
    if found is None:
        _refuse_other_format(place)
        around = place.parents[:2] if "images" in place.parts[-2:] else ()  # images/train, train/images
        above = next(filter(layouts.find_set_file, around), None)
        fix = f"data={above}" if above is not None else f"name {layouts.SET_KINDS}"
        raise DataError(f"{place} is not a data set that can be read as it is", fix)
    root = Path(found["root"])
    folder = root.parent if root.name in layouts.USUAL_NAMES else root
    return {"name": folder.name if folder.is_dir() else folder.stem, **found}


def _refuse_other_format(place: Path) -> None:
    """Raise ``DataError`` for a file of OTHER_FORMATS at ``place`` or below."""
    from data import io

    files = io.files_below(place, {row[0] for row in OTHER_FORMATS}) if place.is_dir() else [str(place)]
    for suffix, text, what, fix in OTHER_FORMATS:
        for file in [file for file in files if file.lower().endswith(suffix)][:20]:  # lists may come first
            with suppress(OSError):
                if re.search(text, layouts.read_file(file, 2**16)) and not is_coco(Path(file)):
                    raise DataError(f"{place} is not a data set that can be read: {file} is {what}", fix)


def _coco_file(place: Path) -> Options:
    # annotations/instances_train2017.json, annotations/instances_val2017.json, train2017/1.jpg
    _refuse_other_format(place)
    train, val = place, _twin_of(place)
    if split_in(f"{place.parent.name}/{place.name}") == "val":
        train, val = val, train
    return _coco(train, val, ())


def _coco_folder(tree: Tree) -> Options | None:
    # annotations/instances_train.json, annotations/instances_val.json, train/1.jpg, val/2.jpg
    # train/_annotations.coco.json, train/1.jpg, valid/_annotations.coco.json, valid/2.jpg
    jsons = [tree.top / file for file in tree.files[".json"]]
    called = [path for path in jsons if "instances" in path.name]
    by_split = defaultdict[str | None, list[Path]](list)
    for path in called or filter(is_coco, jsons):
        by_split[split_in(os.path.relpath(path, tree.top))].append(path)
    train = by_split["train"] or by_split[None] or by_split["val"] or by_split["test"]
    if not train:
        return None
    val = by_split["val"] or train
    if _twin_of(train[0]) in val:
        val = [_twin_of(train[0])]
    for several in (train, val):
        if len(several) > 1:
            listed = ", ".join(os.path.relpath(path, tree.top) for path in several)
            raise DataError(f"{tree.top} holds several COCO jsons for one split: {listed}", "data=<one of them>")
    folders = set()
    for folder in map(Path, tree.folders("image")):
        folders |= {folder, *folder.parents}
    return _coco(train[0], val[0], [tree.top / folder for folder in sorted(folders)])


def _voc(tree: Tree) -> Options | None:
    # Annotations/1.xml, JPEGImages/1.jpg, ImageSets/Main/train.txt, ImageSets/Main/val.txt
    # train/1.xml, train/1.jpg, valid/2.xml, valid/2.jpg
    classes = set()
    for file in tree.files[".xml"]:
        with suppress(OSError, DataError):  # reading that file says more
            for element in layouts.xml_root(tree.top / file).iter("object"):
                classes.add(element.findtext("name", "").strip())
    classes.discard("")
    if not classes:
        return None
    splits = {}
    lists = _lists(tree, ".xml")
    xmls, images = tree.folders(".xml"), tree.folders("image")
    if lists:
        for split in ("train", "val"):
            splits[split] = _split([of_root[split] for of_root in lists.values()], list(lists))
    else:
        of_xmls, of_images = _splits_of(xmls), _splits_of(images)
        if of_images and not of_xmls:
            what = "the images lie in folders of splits, and the xml files do not"
            raise DataError(f"{tree.top}: {what}", "move them into such folders")
        for split, folders in (of_xmls or _both(xmls)).items():
            places = (of_images or of_xmls or _both(images))[split]
            splits[split] = _split(folders, places if len(places) == len(folders) else [_common(images)])
    return {"format": "voc", "root": str(tree.top), "names": sorted(classes), **splits}


def _label_files(tree: Tree) -> Options | None:
    # images/train/1.jpg, labels/train/1.txt, images/val/2.jpg, labels/val/2.txt, classes.txt
    # obj_train_data/1.jpg, obj_train_data/1.txt, obj.names, train.txt
    images = tree.stems("image")
    labels = [tree.top / file for file in tree.files[".txt"] if stem_of(file) in images]
    if not labels:
        return None
    _refuse_other_format(labels[0])
    names, folders = _class_file(tree), tree.folders("image")
    splits = _splits_of(folders) or _both(folders)
    for lists in list(_lists(tree, "image").values())[:1]:
        splits = {"train": [lists["train"]], "val": [lists["val"]]}
    train, val = map(_split, splits.values())
    return {"format": "yolo", "root": str(tree.top), "names": names, "train": train, "val": val}


def split_in(path: str, words_of: Sequence[Mapping[str, str]] = (SPLIT_WORDS, RARE_WORDS)) -> str | None:
    """Which split a file or folder is for by the last such word in its path: train, val or test."""
    found = re.findall("[A-Z]*[a-z]*", path)
    words = [word.lower().removesuffix("set") for word in reversed(found)]  # "TestImages", "testset"
    for known in words_of:
        for word in words:
            if word in known:
                return known[word]
    return None


def _split(annotations: list[str], images: Sequence[str] = (".",)) -> Options:
    """A split of ``data``; a list of one place is that place."""
    places = {"annotations": annotations, "images": images}
    return {key: place[0] if len(place) == 1 else place for key, place in places.items()}


def _both(folders: Sequence[str]) -> dict[str, list[str]]:
    return {"train": [_common(folders)], "val": [_common(folders)]}


def _splits_of(folders: Sequence[str]) -> dict[str, list[str]] | None:
    """The folders of training and validation images, if some are called so; tests are left out.

    Those of no name are for training if none is called so. DataError for others below it.
    """
    common = Path(_common(folders))  # training_data of training_data/train, training_data/test
    below = {split_in(os.path.relpath(folder, common)) for folder in folders}
    tops = _tops(folders, len(common.parts) if below & {"train", "val"} else 0)
    if tops.keys() in (set(), {None}, {"train", None}, {"val"}, {"test"}):
        return None
    train = tops["train"] or tops[None] or tops["val"]
    for other in tops["val"] + tops["test"]:
        above = [top for top in train if _is_below(other, top)]
        if above and other not in train:
            raise DataError(f"the images in {above[0]} lie above those in {other}", "move them to a folder train")
    return {"train": train, "val": tops["val"] or train}


def _tops(folders: Sequence[str], shared: int) -> dict[str | None, list[str]]:
    """By split: the topmost folders called so below ``shared`` others, as train of train/cats."""
    tops = defaultdict[str | None, list[str]](list)
    for folder in folders:
        top, split = folder, None
        parts = folder.split("/")
        for depth in range(len(parts), shared, -1):
            if called := split_in(parts[depth - 1]):
                top, split = "/".join(parts[:depth]), called
        if not any(_is_below(top, other) for other in tops[split]):
            tops[split].append(top)
    return tops


def _common(folders: Sequence[str]) -> str:
    return os.path.commonpath(folders or ["."]) or "."


def _is_below(path: str, folder: str) -> bool:
    return folder == "." or f"{path}/".startswith(f"{folder}/")


def _twin_of(path: Path) -> Path:
    """The json of the other split, with val in place of train in its path, say; else the same."""
    for word, other in TWINS:
        for depth in (1, 2):
            names = [name.replace(word, other) for name in path.parts[-depth:]]
            twin = Path(*path.parts[:-depth], *names)
            if twin != path and twin.is_file():
                return twin
    return path


def _coco(train: Path, val: Path, folders: Sequence[Path]) -> Options:
    places = [train, val, _images_of(train, folders), _images_of(val, folders)]
    root = os.path.commonpath(places)
    names = [[os.path.relpath(place, root)] for place in places]
    train_split, val_split = map(_split, names[:2], names[2:])
    return {"format": "coco", "root": root, "on_error": "clip", "train": train_split, "val": val_split}


def _images_of(path: Path, others: Sequence[Path]) -> Path:
    """The folder that has most of the first images of a json, a usual one or one of ``others``.

    Of several that have half as many, that of the json's split. If none has any, that of the json.
    """
    above = path.parent.parent
    word = path.stem.rpartition("_")[2]  # instances_train2017: train2017
    split = word.rstrip("0123456789")
    places = []
    for top in (path.parent, path.parent / "images", above, above / "images"):
        places += [top, top / word, top / split, top / f"{split}2017"]
    places += others
    names = list(islice(file_names_in(path), layouts.COMPARED_NAMES))
    numbers = dict(zip(places, layouts.count_files(names, places)[1], strict=True))
    ranks = {"train": 2, None: 1, split_in(os.path.relpath(path, above)): 0}

    def rank(place: Path) -> tuple[int, int]:
        return ranks.get(split_in(os.path.relpath(place, above)), 3), -numbers[place]

    most = max(numbers.values())
    full = [place for place in numbers if 2 * numbers[place] > most]
    return min(full, key=rank, default=path.parent)


def _class_file(tree: Tree) -> str | None:
    """The file of class names at the top or beside images or labels. Raises ``DataError``."""
    found = []
    for folder in dict.fromkeys([".", *tree.folders("image"), *tree.folders(".txt")]):
        for name in layouts.CLASS_FILES:
            if (tree.top / folder / name).is_file():
                found.append(os.path.normpath(f"{folder}/{name}"))
    for file in found[1:]:  # labelImg writes one into each folder of labels
        if layouts.read_names(tree.top / file) != layouts.read_names(tree.top / found[0]):
            raise DataError(f"{tree.top}: {found[0]} and {file} differ", "make them agree, or delete one")
    return found[0] if found else None


def _lists(tree: Tree, kind: str) -> dict[str, dict[str, str]]:
    """By folder of images: its lists of files of a kind for training and validation.

    Raises ``DataError`` if one list is as good as another, or none is for training, nor a folder.
    """
    folders, stems = tree.folders(kind), tree.stems(kind)
    found = defaultdict[str, dict[str, str]](dict)
    listed = []
    # VOC's lists in Main are for detection, others are not; train.txt comes before cat_train.txt.
    texts = tree.files[".txt"]
    for file in sorted(texts, key=lambda file: (not re.search("Main/[^/]*$", file), os.path.dirname(file), len(file))):
        stem = stem_of(file)
        split = "train" if stem.lower() in TRAINING_LISTS else split_in(stem)
        if split is None or stem in stems or stems.isdisjoint(stems_in(tree.top / file)):
            continue
        listed.append(file)
        first = found[os.path.dirname(file)].setdefault(split, file)
        if first != file and stem_of(first).lower() not in NAMES_OF_LISTS:
            raise DataError(f"{tree.top}: {first} and {file} are for one split", f"a list {split}.txt")
    chosen: dict[str, dict[str, str]] = {}
    for folder, lists in found.items():
        root = folder.partition("ImageSets")[0].rstrip("/") or "."
        if not any(_is_below(place, root) for place in folders):
            root = "."
        if "train" in lists:
            chosen.setdefault(root, {"val": lists["train"], **lists})
    if found and not chosen and _splits_of(folders) is None:
        raise DataError(f"{tree.top}: {listed[0]} names images, and there is no list for training", "a list train.txt")
    return chosen


def is_coco(path: Path) -> bool:
    """Whether a json has the keys of COCO."""
    with suppress(OSError):
        text = layouts.mapped(path)
        return all(text.find(key) >= 0 for key in COCO_KEYS)
    return False


def file_names_in(path: Path) -> Iterator[str]:
    """The file names of a json but for broken ones, on which reading it says more."""
    for match in FILE_NAME.finditer(layouts.mapped(path)):
        with suppress(ValueError):
            yield json.loads(match[1]).replace("\\", "/")


def stems_in(place: Path) -> set[str]:
    """The stems of the images that a json, list or folder of xml files names."""
    with suppress(OSError, DataError):  # reading that split says more
        if place.is_dir():
            return Tree(place).stems(".xml")
        if place.suffix.lower() == ".json":
            return set(map(stem_of, file_names_in(place)))
        lines = layouts.read_lines(place)
        return set(map(stem_of, [*map(str.strip, lines), *map(layouts.first_column, lines)]))
    return set()


def stem_of(path: str) -> str:
    """The name of a file without folder and suffix, which a list may leave out."""
    name = os.path.basename(path.replace("\\", "/"))
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in READ_SUFFIXES else name


def folders_beside(root: Path, places: Sequence[Path]) -> list[str]:
    """Folders of images below ``root`` that lie in none of ``places`` and are not for tests."""
    if not all(place.is_dir() for place in (root, *places)):  # a list says what is left out
        return []
    found = [root / folder for folder in Tree(root).folders("image") if split_in(folder) != "test"]
    return [str(folder) for folder in found if not any(map(folder.is_relative_to, places))]


def jsons_beside(places: Sequence[Path]) -> list[str]:
    """COCO jsons of no usual split beside ``places``; if in folders of splits, in those beside."""
    found = set[Path]()
    for place in places:
        found.update(place.parent.glob("*.json"))
        if split_in(place.parent.name):
            found.update(place.parents[1].glob(f"*/{place.name}"))
    others = found.difference(places)
    unusual = [path for path in others if split_in("/".join(path.parts[-2:]), [SPLIT_WORDS]) is None]
    return sorted(map(str, filter(is_coco, unusual)))


def files_beside(root: Path, images: Sequence[str], places: Sequence[Path]) -> dict[str, list[str]]:
    """By kind: files beside ``images`` below ``root`` that these and ``places`` do not name."""
    named = set(map(stem_of, images)).union(*map(stems_in, set(places)))
    folders = sorted({os.path.dirname(os.path.join(root, image)) for image in images})
    unnamed = []
    for folder in folders:
        names = sorted(filter(layouts.is_image, layouts.names_in(folder)))
        unnamed += [f"{folder}/{name}" for name in names if stem_of(name) not in named]
    unknown = layouts.unknown_files(folders)
    return {"images that the annotations do not name": unnamed, layouts.UNKNOWN: unknown}
