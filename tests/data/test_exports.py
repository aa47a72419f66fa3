"""Data sets as other programs export them, opened by their path alone."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf import compose
from conf.cli.command_line import override
from conf.schema import AnchorsConfig
from data import Annotations, DataConfig, open_annotations
from data.index import warn_of_shared_images
from tests.data.sets import a_few_of

HEIGHT, WIDTH, ROW, BOX = 32, 64, "0 .5 .5 .25 .5\n", [24.0, 8.0, 16.0, 16.0]
Write = Callable[[Path], None]


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(zlib.crc32(str(path).encode())).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
    path.write_bytes(cv2.imencode(".png", noise)[1].tobytes())


def text(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def xml(path: Path, size: tuple[int, int] = (HEIGHT, WIDTH), name: str = "cat", encoding: str = "UTF-8") -> None:
    left, top, width, height = BOX
    corners = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{left + width}</xmax><ymax>{top + height}</ymax>"
    text(
        path,
        f'<?xml version="1.0" encoding="{encoding}"?><annotation><filename>{path.stem}.png</filename><size><width>'
        f"{size[1]}</width><height>{size[0]}</height></size><object><name>{name}</name><bndbox>{corners}</bndbox>"
        "</object></annotation>".encode(encoding),
    )


def voc(images: str, annotations: str, *lists: str, count: int = 4, **more: object) -> Write:
    """Pictures and xml files 0, 1, ... in these folders; ImageSets lists of the first half each."""

    def write(root: Path) -> None:
        for number in range(count):
            picture(root / images / f"{number}.png")
            xml(root / annotations / f"{number}.xml", **more)
        for at, name in enumerate(lists):
            numbers = range(count // 2) if at == 0 else range(count // 2, count)
            below = "".join(f"{Path(images).relative_to('JPEGImages') / str(number)}\n" for number in numbers)
            text(root / "ImageSets" / "Main" / f"{name}.txt", below)

    return write


def yolo(images: str, labels: str, first: int = 0, **files: str) -> Write:
    def write(root: Path) -> None:
        for number in range(first, first + 4):
            picture(root / images / f"{number}.png")
            text(root / labels / f"{number}.txt", ROW)
        for name, content in files.items():
            text(root / name.replace("_", "."), content)

    return write


def coco(root: Path, names: list[str], extra: str = "") -> None:
    images = [{"id": n, "file_name": name, "height": HEIGHT, "width": WIDTH} for n, name in enumerate(names)]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": BOX} for n in range(len(names))]
    content = json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]})
    for split in ("train", "val"):
        text(root / "annotations" / f"instances_{split}.json", content.replace('"id": 0, "im', f'{extra}"id": 0, "im'))
        for name in names[1:] if "first is gone" in extra else names:
            picture(root / "images" / split / name.replace("\\", "/"))


def coco_at(json_file: str, images: str, before: str = "") -> Write:
    """A json of two pictures, whose names in it follow ``before``."""

    def write(root: Path) -> None:
        coco(root / "here", ["0.png", "1.png"])
        content = (root / "here/annotations/instances_train.json").read_text()
        text(root / json_file, content.replace('"file_name": "', f'"file_name": "{json.dumps(before)[1:-1]}'))
        shutil.rmtree(root / "here")
        for number in range(2):
            picture(root / images / f"{number}.png")

    return write


def file(name: str, content: str) -> Write:
    return lambda root: text(root / name, content)


def both(*writers: Write) -> Write:
    def write(root: Path) -> None:
        for writer in writers:
            writer(root)

    return write


def each(write: Callable[..., Write], names: Sequence[str], first: str, second: str) -> Write:
    """For each of the names these two places, with it for {}."""
    return both(*(write(first.format(name), second.format(name)) for name in names))


def linked(kind: str) -> Write:
    """The other folders of a set with images/train lie elsewhere, and it has a second name."""

    def write(root: Path) -> None:
        yolo("images", "labels", 4)(root.parent / "elsewhere")
        (root.parent / "elsewhere/images/7.png").unlink()
        (root / kind / "val").symlink_to(root.parent / "elsewhere" / kind)
        (root / kind / "again").symlink_to("train")

    return write


def changed(write: Write, *pairs: tuple[str, str]) -> Write:
    def write_changed(root: Path) -> None:
        write(root)
        for path in (path for path in root.rglob("*") if path.suffix in (".xml", ".txt", ".json")):
            content = path.read_text()
            for pair in pairs:
                content = content.replace(*pair)
            path.write_text(content)

    return write_changed


SPLITS = ("train", "dev", "test")
EXPORTS: dict[str, tuple[Write, int, int, str]] = {  # images of train and val with one box each; options
    "images beside annotations": (voc("images", "annotations"), 4, 4, ""),
    "sub-folders": (voc("JPEGImages/cam", "Annotations/cam", "default"), 2, 2, ""),
    "xml beside pictures": (both(voc("train", "train"), voc("valid", "valid", count=3)), 4, 3, ""),
    "only the list for training": (voc("JPEGImages", "Annotations", "train", "test"), 2, 2, ""),
    "no size": (voc("JPEGImages", "Annotations", size=(0, 0)), 4, 4, ""),
    "another encoding": (voc("JPEGImages", "Annotations", name="猫", encoding="GBK"), 4, 4, ""),
    "labels beside images": (yolo("images", "labels", classes_txt="cat"), 4, 4, ""),
    "folders of splits": (each(yolo, ("train", "valid"), "{}/images", "{}/labels"), 4, 4, "cat"),
    "folders of splits, and a list of tests": (
        both(yolo("train", "train"), yolo("val", "val", 4), yolo("test", "test", 8), file("test.txt", "test/8.png")),
        4, 4, "cat",
    ),
    "moved": (
        yolo(
            "obj_train_data", "obj_train_data", obj_names="cat",
            obj_data="classes=1\ntrain=data/train.txt\nvalid=data/train.txt\nnames=data/obj.names",
            train_txt="".join(f"data/obj_train_data/{number}.png\n" for number in range(4)),
        ), 4, 4, "",
    ),
    "Roboflow's COCO": (each(coco_at, ("train", "valid", "test"), "{}/_annotations.coco.json", "{}"), 2, 2, ""),
    "Roboflow's Darknet": (
        both(
            yolo("train", "train"), file("train/_darknet.labels", "cat"), yolo("valid", "valid", 4),
            yolo("test", "test", 8),
        ), 4, 4, "",
    ),
    "a json beside its images": (coco_at("labels.json", "data"), 2, 2, ""),
    "names that begin elsewhere": (coco_at("labels.json", "pics", "/home/me/img/"), 2, 2, ""),
    "names of an upload": (coco_at("result.json", "images", "..\\..\\media\\1\\"), 2, 2, ""),
    "another yaml": (
        both(
            yolo("images/train", "labels/train"), yolo("images/val", "labels/val"),
            file("dataset.yaml", "train: /content/set/images/train\nval: C:\\set\\images\\val\nnames: [cat]"),
        ), 4, 4, "",
    ),
    "lists beside the images": (
        both(
            yolo("images", "labels", classes_txt="cat"),
            file("train.txt", "C:\\set\\images\\0.png\nC:\\set\\images\\1.png"),
            file("val.txt", "images/2.png"), file("test.txt", "images/3.png"),
        ), 2, 1, "",
    ),
    "lists of xml files": (
        both(
            voc("pictures", "labels"), file("train.txt", "0\n1\n"), file("val.txt", "2"), file("test.txt", "3")
        ), 2, 1, "",
    ),
    "two years": (
        both(*(
            both(voc(f"{year}/JPEGImages", f"{year}/Annotations"), *(
                file(f"{year}/ImageSets/{place}.txt", lines)
                for place, lines in (("Main/train", "0\n1"), ("Main/val", "2"), ("Layout/train", "3"))
            )) for year in ("VOC2007", "VOC2012")
        )), 4, 2, "",
    ),
    "long names": (each(yolo, ("training", "validation", "testing"), "images/{}", "labels/{}"), 4, 4, "cat"),
    "keys of FiftyOne and CVAT": (
        both(
            yolo("images/train", "labels/train"), yolo("images/validation", "labels/validation", 4),
            file("data.yaml", "Train: ./images/train/\nvalidation: images/validation\nnames: {0: cat}"),
        ), 4, 4, "",
    ),
    "LVIS": (changed(coco_at("lvis_v1_train.json", "a/b"), ('file_name": "', 'coco_url": "http://c/a/b/')), 2, 2, ""),
    "names that begin elsewhere, in folders": (
        both(changed(coco_at("a.json", "train/p/1"), ('"0.p', '"v1/p/1/0.p'), ('"1.p', '"v1/p/2/1.p')), lambda root: (
            (root / "train/p/2").mkdir(), shutil.move(root / "train/p/1/1.png", root / "train/p/2")
        )), 2, 2, "",
    ),
    "no size in a json": (changed(coco_at("a.json", "a"), ('"height": 32, "width": 64', '"width": null')), 2, 2, ""),
    "xml files that name folders": (
        both(voc("a/1", "xml/1"), voc("a/2", "xml/2"), lambda root: [
            (text(root / f"xml/{at}_{n}.xml", (root / f"xml/{at}/{n}.xml").read_text().replace(
                f"<filename>{n}", f"<folder>a</folder><filename>{at}\\{n}"
            )), (root / f"xml/{at}/{n}.xml").unlink()) for at in (1, 2) for n in range(4)
        ]), 8, 8, "",
    ),
    "no images for validation": (both(voc("train", "train"), voc("test", "test")), 4, 4, ""),
    "unnamed folders beside tests": (both(yolo("images", "labels"), yolo("test/images", "test/labels")), 4, 4, "cat"),
    "train, dev and test": (each(yolo, SPLITS, "{}/images", "{}/labels"), 4, 4, "cat"),
    "below a folder called so": (each(yolo, SPLITS, "training_data/{}/images", "training_data/{}/labels"), 4, 4, "cat"),
    "a trainset and a testset": (each(yolo, ("trainset", "TestPictures"), "{}/images", "{}/labels"), 4, 4, "cat"),
    "train, holdout and dev": (each(yolo, ("train", "holdout", "dev"), "{}/images", "{}/labels"), 4, 4, "cat"),
    "val and test": (each(yolo, ("val", "test"), "{}/images", "{}/labels"), 4, 4, "cat"),
    "lists of a class": (
        both(voc("JPEGImages", "Annotations"), *(
            file(f"ImageSets/Main/cat_{split}.txt", lines) for split, lines in (("train", "0 1\n1 -1"), ("val", "2  1"))
        )), 2, 1, "",
    ),
    "lists of images and xml files": (
        both(
            voc("a", "b"), file("train_list.txt", "a/0.png b/0.xml\na/1.png b/1.xml"), file("val_list.txt", "a/2.png")
        ), 2, 1, "",
    ),
    "lists of a splitting tool": (
        both(
            yolo("images", "labels", classes_txt="cat"), file("autosplit_train.txt", "./images/0.png\n./images/1.png"),
            file("autosplit_val.txt", "./images/2.png"), file("autosplit_test.txt", "./images/3.png"),
        ), 2, 1, "",
    ),
    "a list whose first image is gone": (
        both(
            yolo("images", "labels", classes_txt="cat"), file("ImageSets/train.txt", "gone.png\nimages/1.png"),
            file("ImageSets/test.txt", "images/2.png"),
        ), 1, 1, "skip",
    ),
    "a list whose first xml is gone": (
        both(voc("pictures", "labels"), file("training.txt", "gone\n1"), file("testing.txt", "2")), 1, 1, "skip"
    ),
    "linked folders": (
        both(yolo("images/train", "labels/train"), linked("images"), linked("labels")), 4, 3, "cat"
    ),
    "names beside the images": (yolo(".", ".", obj_names="cat"), 4, 4, ""),
    "classes beside the labels": (both(yolo("images", "labels"), file("labels/classes.txt", "cat")), 4, 4, ""),
    "objects with attributes": (
        changed(voc("a", "a", name="&#29483;"), ("<object>", '<object id="1">')), 4, 4, ""
    ),
    "tags in capitals": (changed(voc("a", "a"), ("<object", "<OBJECT"), ("</object", "</OBJECT")), 4, 4, ""),
    "a namespace, and objects below others": (
        changed(
            voc("a", "a"), ("<annotation>", '<annotation xmlns="http://a.b">'), ("<object>", "<objects><object>"),
            ("</object>", "</object></objects>"),
        ), 4, 4, "",
    ),
    "comments": (changed(voc("a", "a"), ("<name>cat", "<!-- <name>old</name> --><name>c<![CDATA[at]]>")), 4, 4, ""),
    "of Windows": (lambda root: coco(root, ["a\\0.png", "a\\1.png"]), 2, 2, ""),
    "NaN where nobody reads": (lambda root: coco(root, ["0.png", "1.png"], '"attributes": NaN, '), 2, 2, ""),
    "first image gone": (lambda root: coco(root, ["0.png", "1.png"], '"note": "first is gone", '), 1, 1, "skip"),
}  # fmt: skip


OPTIONS = {"skip": ["data.on_error=skip"], "cat": ["data.names=[cat]"], "": []}


def typed(root: Path, *more: str) -> DataConfig:
    options = [override("data", root), f"data.index_dir={root.parent / 'index'}", *more]
    return compose.compose("anchors", AnchorsConfig, options).data


def opened(root: Path, split: str, *more: str) -> Annotations:
    return open_annotations(typed(root, *more), split)


BELOW = {"LVIS", "names that begin elsewhere, in folders", "of Windows", "xml files that name folders"}
LISTED = {case for case in EXPORTS if "list" in case} | {"moved", "sub-folders", "two years"}


@pytest.mark.parametrize("case", a_few_of(EXPORTS))
def test_exports_are_read_as_they_are_and_each_file_beside_their_images_is_named(case: str, tmp_path: Path) -> None:
    write, train, val, option = EXPORTS[case]
    write(tmp_path / "set")
    config = typed(tmp_path / "set", *OPTIONS[option])
    found = [open_annotations(config, split) for split in ("train", "val")]
    for one, count in zip(found, (train, val), strict=True):
        assert len(one) == count and one.boxes_xywh.tolist() == [BOX] * count
        assert one.sizes.tolist() == [[HEIGHT, WIDTH]] * count and len(one.names) == 1
        assert len({one.path(index) for index in range(count) if Path(one.path(index)).is_file()}) == count
    if case in LISTED:  # a list says which images there are
        return
    assert not any("do not name" in note or "of no image" in note for note in found[0].notes)
    path = Path(found[0].path(0))
    picture(path.with_name("lost.png"))
    text(path.with_name("other.heic"), "")
    beside = [file for file in (tmp_path / "set").rglob("*.txt") if file.stem == path.stem]
    for label in beside:
        text(label.with_name("alone.txt"), ROW)
    if case in BELOW:  # folders below others have no stamp
        config = replace(config, index_dir=str(tmp_path / "new"))
    notes = open_annotations(config, "train").notes
    for name in ("/lost.png", "/other.heic", *(["/alone.txt"] if beside else [])):
        (note,) = (note for note in notes if name in note)
        assert " (1), first" in note


JSONS = {"train_all.json": "eval_all.json", "a/training.json": "a/validation.json", "train/a.json": "val/a.json"}


@pytest.mark.parametrize("folders", a_few_of([["pictures_train", "pictures_eval"], ["train/images", "val/images"]]))
@pytest.mark.parametrize("json_file", JSONS)
def test_images_of_one_name_are_those_of_their_split(json_file: str, folders: list[str], tmp_path: Path) -> None:
    both(coco_at(json_file, folders[0]), coco_at(JSONS[json_file], folders[1]))(tmp_path / "set")
    picture(tmp_path / "set/all/0.png")
    for split, folder in zip(("train", "val"), folders, strict=True):
        found = opened(tmp_path / "set", split)
        assert [found.path(index) for index in range(2)] == [f"{tmp_path}/set/{folder}/{n}.png" for n in range(2)]


def test_a_list_of_names_means_the_xml_files_of_its_split(tmp_path: Path) -> None:
    lists = (file(f"ImageSets/Main/{split}.txt", "0\n1") for split in ("train", "val"))
    both(*(voc(f"JPEGImages/{split}", f"Annotations/{split}") for split in ("train", "val")), *lists)(tmp_path / "set")
    for split in ("train", "val"):
        found = opened(tmp_path / "set", split)
        assert [Path(found.path(index)).parent.name for index in range(len(found))] == [split] * 2


JSON, PAIR = coco_at("a.json", "a"), ("train", "val")
ATTRIBUTES = "<attributes><attribute><name>rotation</name><value>9</value></attribute></attributes></object>"
CORNERS = r"look like \[left, top, right, bottom\] \(2\)"
GUESSES: dict[str, tuple[Write, str]] = {  # what is left out or may be meant otherwise, and the line that says so
    "a folder in no split": (each(yolo, (*PAIR, "more"), "images/{}", "labels/{}"), "no split .*images/more"),
    "xml files in no split": (each(voc, (*PAIR, "more"), "{}", "{}"), "no split reads .*more"),
    "a json in no split": (each(coco_at, (*PAIR, "dev"), "{}/a.json", "{}"), "no split .*dev/a"),
    "tests that are trained on": (
        both(yolo("a", "a"), file("train.txt", "a/0.png\na/1.png"), file("test.txt", "a/1.png\na/2.png")),
        r"tests .* trained on \(1\), first: a/1.png",
    ),
    "two images of one name": (both(yolo("a", "a"), lambda root: picture(root / "a/0.webp")), "label file .*0.webp"),
    "two images of an xml file": (
        both(changed(voc("a", "a"), ("0.png<", "0<")), lambda root: picture(root / "a/0.webp")), "several .*0.png"
    ),
    "a list with an image twice": (both(yolo("a", "a"), file("train.txt", "a/0.png\n./a/0.png")), "again .*a/0.png"),
    "a json with an image twice": (changed(JSON, ('"1.png', '"./b/..//0.png')), "again .*0.png"),
    "corners by their areas": (changed(JSON, (json.dumps(BOX), '[8, 8, 24, 16], "area": 128')), CORNERS),
    "corners that reach out": (changed(JSON, (json.dumps(BOX), "[40, 8, 60, 16]")), CORNERS),
    "centres": (changed(JSON, (json.dumps(BOX), "[56, 16, 16, 16]")), r"look like \[centre x, .* \(2\)"),
    "annotations to ignore": (
        changed(JSON, ('"category_id"', '"ignore": 1, "category_id"')), r"ignore=1, .* \(2\), .*a.json: annotation 0"
    ),
    "rotated boxes in a json": (
        changed(JSON, ('"category_id"', '"attributes": {"rotation": 3.0}, "category_id"')), r"rotation, .*\(2\).*a.json"
    ),
    "LVIS": (changed(JSON, ('"file_name"', '"neg_category_ids": [], "file_name"')), r"LVIS.*\(2\)"),
    "rotated boxes in xml files": (changed(voc("a", "a"), ("</object>", ATTRIBUTES)), r"rotation, .*\(4\).*a/0.xml"),
    "one xml file for two images": (both(voc("a/1", "xml"), voc("a/2", "xml")), "several .*a/1/0.png"),
}  # fmt: skip


@pytest.mark.parametrize("case", a_few_of(GUESSES))
def test_what_is_guessed_or_left_out_is_named(case: str, tmp_path: Path) -> None:
    write, line = GUESSES[case]
    write(tmp_path / "set")
    more = ["data.names=[cat]"] if any(tmp_path.rglob("*/0.txt")) else []
    notes = opened(tmp_path / "set", "train", *more).notes
    assert sum(re.search(line, note) is not None for note in notes) == 1


UNCLEAR: dict[str, tuple[Write, str]] = {
    "classes in another order": (
        both(*(both(yolo(name, name), file(f"{name}/classes.txt", order)) for name, order in (
            ("train", "cat\ndog"), ("val", "dog\ncat")
        ))), "train/classes.txt and val/classes.txt differ",
    ),
    "tests below the images": (both(yolo(".", "."), yolo("test", "test")), r"in \. lie above those in test"),
    "only a list of tests": (both(yolo("a", "a"), file("test.txt", "a/0.png")), "test.txt names images.* no list"),
    "lists of others": (both(voc("a", "b"), file("test.txt", "1"), file("val.txt", "2")), "names images.* no list"),
    "two lists": (both(voc("a", "b"), file("x_train.txt", "1"), file("y_train.txt", "2")), "are for one split"),
    "a page in place of an xml file": (both(voc("a", "a"), file("a/0.xml", "<html/>")), "a/0.xml is not of Pascal VOC"),
    "a lost encoding": (both(voc("a", "a"), file("a/0.xml", "<?xml encoding='x-y'?><a/>")), "a/0.xml is not valid XML"),
    "a comment": (both(yolo("a", "a"), file("classes.txt", "# animals\ncat")), "classes.txt holds '# animals'"),
    "names of two folders": (both(voc("a", "b"), voc("c", "d"), file("train.txt", "0")), "b/0.xml or .*/d/0.xml"),
    "splits of images alone": (both(*(voc(f"a/{name}", "xml") for name in SPLITS)), "the xml files do not"),
}  # fmt: skip


@pytest.mark.parametrize("case", a_few_of(UNCLEAR, 2))
def test_what_cannot_be_told_apart_is_refused(case: str, tmp_path: Path) -> None:
    write, said = UNCLEAR[case]
    write(tmp_path / "set")
    more = [] if (tmp_path / "set/classes.txt").exists() else ["data.names=[cat,dog]"]
    with pytest.raises(ValueError, match=f"{said}.* fix: "):
        opened(tmp_path / "set", "train", *more)


def test_a_set_beside_another_is_its_own(tmp_path: Path) -> None:
    data_yaml = "train: ../train/images\nval: ../valid/images\nnames: [cat]"
    for root, first in ((tmp_path, 0), (tmp_path / "B", 10)):
        both(yolo("train/images", "train/labels", first), yolo("valid/images", "valid/labels", first))(root)
        text(root / "data.yaml", data_yaml)
    assert opened(tmp_path / "B", "train").image_ids.tolist() == [10, 11, 12, 13]


def test_copies_of_an_image_stay_in_one_split(tmp_path: Path) -> None:
    for original in range(12):
        for copy in ("0a", "b1", "Cc"):
            name = f"{original}_png.rf.{copy * 16}"
            picture(tmp_path / "set" / "images" / f"{name}.png")
            text(tmp_path / "set" / "labels" / f"{name}.txt", ROW)
    text(tmp_path / "set" / "data.yaml", "train: images\nval: images\nnames: [cat]")
    splits = [opened(tmp_path / "set", split, "data.split=0.4") for split in ("train", "val")]
    originals = [{part.file_name(i).partition("_png")[0] for i in range(len(part))} for part in splits]
    assert all(originals) and not originals[0] & originals[1]


def test_validation_inside_training_is_a_warning(tmp_path: Path) -> None:
    yolo("images/train", "labels/train")(tmp_path / "set")
    for number, label in enumerate(tmp_path.glob("set/labels/*/*.txt")):
        text(label, f"0 .5 .5 .25 {0.1 + number / 20}\n")
    text(tmp_path / "set" / "data.yaml", "train: a.txt\nval: b.txt\nnames: [cat]")
    for name, numbers in (("a", "012"), ("b", "123")):  # as many, and the first of both has no boxes
        text(tmp_path / f"set/{name}.txt", "".join(f"images/train/{number}.png\n" for number in numbers))
    text(tmp_path / "set/labels/train/1.txt", "")
    train, val = (opened(tmp_path / "set", split) for split in ("train", "val"))
    assert "2 of 3" in str(warn_of_shared_images(train, val)) and "1.png" in str(warn_of_shared_images(train, val))
