"""Sets by their path, Darknet's obj.data, and files of class names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf import ConfigError
from conf.cli.program import PROGRAMS
from conf.compose import compose
from conf.schema import TrainConfig
from data import Annotations, DataConfig, DataError, open_annotations
from data.voc import CORNERS
from tests.data.sets import SIZES, YoloSet, a_few_of, assert_whole

NAMES = ["x", "y", "z"]


def open_as_typed(yolo_set: YoloSet, root: Path, *overrides: str, split: str = "train") -> Annotations:
    given = ["data=yolo", f"data.root={root}", f"data.index_dir={yolo_set.root.parent}/index", *overrides]
    return open_annotations(compose("train", TrainConfig, given).data, split)


def test_a_split_may_have_images_of_its_own(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    yolo_set.add("more", "more", "b")
    yolo_set.write("data.yaml", "train: images\nval: images\nnames: [x, y, z]")
    more = ["data.val.annotations=more", "data.names=[x,y,z]"]
    assert_whole(open_as_typed(yolo_set, yolo_set.root, *more))
    val = open_as_typed(yolo_set, yolo_set.root, *more, split="val")
    assert val.path(0) == str(yolo_set.root / "more" / "b.jpg") and val.names == NAMES
    by_file = open_as_typed(yolo_set, yolo_set.root / "data.yaml", *more, split="val")
    assert by_file.path(0) == val.path(0), "paths start at the folder of the file"
    (yolo_set.root / "data.yaml").rename(yolo_set.root / "set.YAML")
    assert open_as_typed(yolo_set, yolo_set.root).names == NAMES


OBJ = "classes= 3\ntrain  = {0}train.txt\nvalid  = {0}test.txt\nnames = {0}obj.names\nbackup = backup/\n"
LINES = [f"images/{stem}.jpg" for stem in "abc"]
DARKNETS = {  # folder of obj.data, prefix of the names in it, and of the lists' lines
    "beside its lists": ("", "", ""),
    "started above": ("", "set/", "set/"),
    "absolute": ("", "{root}/", "{root}/"),
    "cfg folder": ("cfg/", "", ""),
    "windows": ("", "set\\", ".\\"),
}


@pytest.mark.parametrize("case", DARKNETS)
def test_obj_data(case: str, yolo_set: YoloSet) -> None:
    folder, before, line_start = (part.format(root=yolo_set.root) for part in DARKNETS[case])
    ending = "\r\n" if case == "windows" else "\n"
    yolo_set.add("images", "labels")
    yolo_set.write("obj.names", f"x{ending}y{ending}z{ending}{ending}")
    yolo_set.write("train.txt", ending.join(line_start + line for line in LINES))
    yolo_set.write("test.txt", line_start + LINES[1] + ending)
    path = yolo_set.write(f"{folder}obj.data", f"# Darknet{ending};{ending}" + OBJ.format(before).replace("\n", ending))
    train = open_as_typed(yolo_set, path)
    assert_whole(train)
    assert train.names == NAMES and train.category_ids.tolist() == [0, 1, 2]
    val = open_as_typed(yolo_set, path, split="val")
    assert [Path(val.path(index)).name for index in range(len(val))] == ["b.jpg"]
    yolo_set.write("obj.names", "x\ny\nother")
    assert open_as_typed(yolo_set, path).names == ["x", "y", "other"], "another index"


CATEGORIES = {"categories": [{"id": 9, "name": "z"}, {"id": 2, "name": "x"}, {"id": 5, "name": "y"}]}
NAME_FILES = {
    "classes.txt": "x\ny\nz\n",
    "coco.names": "\ufeffx \r\n y\r\nz",
    "no suffix": "x\ny\nz",
    "set.json": json.dumps(CATEGORIES),
    "set.yaml": "nc: 3\nnames: {'0': x, '1': y, '2': z}",
    "set.yml": "names: [x, y, z]",
    "obj.data": "names = classes.names",
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "in the set") for name in NAME_FILES),
        ("classes.txt", "here"),
        ("obj.data", "here"),
        ("obj.data", "absolute"),
    ],
)
def test_names_from_a_file(name: str, place: str, yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    yolo_set.add("images", "labels")
    here = yolo_set.root.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    folder = here if place == "here" else yolo_set.root
    (folder / "classes.names").write_text("x\ny\nz")
    (folder / name).write_text(NAME_FILES[name], encoding="utf-8")
    given = f"'{folder / name}'" if place == "absolute" else f"'{name}'"
    named = open_as_typed(yolo_set, yolo_set.root, "data.train.annotations=images", f"data.names={given}")
    assert_whole(named)
    assert named.names == NAMES


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nowhere.names", None, r"nowhere\.names cannot be read .*\. fix: name a text file"),
        ("a.names", b"x\x00", r"a\.names is not a text file in UTF-8"),
        ("a.names", b"x\n\ny", r"a\.names:2 is empty, but each line counts as a class"),
        ("a.names", b"x\ny\nx", r"data\.names lists 'x' twice"),
        ("a.json", b'{"categories": [{"id": 1}]}', r"a\.json holds no class names"),
        ("a.json", b'{"categories": []}', r"a\.json holds no class names"),
        ("a.yaml", b"train: x", r"a\.yaml holds no class names"),
        ("a.data", b"train = x", r"a\.data holds no class names"),
    ],
)
def test_names_files_that_are_none(name: str, content: bytes | None, said: str, yolo_set: YoloSet) -> None:
    if content is not None:
        (yolo_set.root / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        replace(yolo_set.config("images"), names=name)
    assert "fix: " in str(caught.value) or "twice" in str(caught.value)


def coco(stems: str, folder: str = "") -> str:
    """The pictures as a COCO json whose categories have gaps in their ids."""
    images, boxes = [], []
    for number, stem in enumerate(stems, start=1):
        (height, width), which = SIZES[stem], "abc".index(stem)
        images.append({"id": number, "file_name": f"{folder}{stem}.jpg", "height": height, "width": width})
        box = [0.375 * width, 0.25 * height, 0.25 * width, 0.5 * height]
        boxes.append({"id": number, "image_id": number, "category_id": 2 + 3 * which, "bbox": box, "area": 1})
    categories = [{"id": 2 + 3 * which, "name": name} for which, name in enumerate(NAMES)]
    return json.dumps({"images": images, "annotations": boxes, "categories": categories})


def voc(folder: str) -> dict[str, str]:
    """The pictures' xml files, with a part of an object that has a name of its own."""
    texts = {}
    for which, (stem, (height, width)) in enumerate(SIZES.items()):
        corners = zip(CORNERS, (0.375 * width, 0.25 * height, 0.625 * width, 0.75 * height), strict=True)
        box = "".join(f"<{corner}>{value}</{corner}>" for corner, value in corners)
        texts[f"{folder}/{stem}.xml"] = (
            f"<annotation><size><width>{width}</width><height>{height}</height></size><object><name>{NAMES[which]}"
            f"</name><bndbox>{box}</bndbox><part><name>head</name></part></object></annotation>"
        )
    return texts


NAMED = "nc: 3\nnames: [x, y, z]\n"
LISTED = "\n".join(LINES)
# What is typed, the folders of images and labels, and the other files; {} is train, val and valid.
LAYOUTS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "ultralytics, path and dictionary": (
        "coco8.yaml", "images/{}", "labels/{}",
        {"coco8.yaml": "path: .\ntrain: images/train\nval: images/val\nnames: {0: x, 1: y, 2: z}"},
    ),
    "path below datasets of the current folder": (
        "conf/coco8.yaml", "datasets/coco8/images/{}", "datasets/coco8/labels/{}",
        {"conf/coco8.yaml": f"path: coco8\ntrain: images/train\nval: [images/val]\n{NAMED}"},
    ),
    "Roboflow, a level too high": (
        "data.yaml", "{}/images", "{}/labels", {"data.yaml": f"train: ../train/images\nval: ../val/images\n{NAMED}"},
    ),
    "Darknet": (
        "obj.data", "images", "labels",
        {"train.txt": LISTED, "test.txt": LISTED, "obj.names": "x\ny\nz\n", "obj.data": OBJ.format("")},
    ),
    "Roboflow COCO by its json": (
        "valid/_annotations.coco.json", "{}", "unused", {"{}/_annotations.coco.json": coco("abc")}
    ),
    "COCO": ("./", "{}2017", "unused", {"annotations/instances_{}2017.json": coco("abc")}),
    "COCO json files in the folder": ("./", "{}2017", "unused", {"instances_{}.json": coco("abc")}),
    "COCO in images, without a year": (
        "./", "images/{}", "unused", {"annotations/instances_{}2017.json": coco("abc")}
    ),
    "COCO in images": (
        "annotations/instances_train2017.json", "images/{}2017", "unused",
        {"annotations/instances_{}2017.json": coco("abc")},
    ),
    "one json": ("boxes.json", "pictures", "unused", {"boxes.json": coco("abc", "pictures/")}),
    "VOC": ("./", "JPEGImages", "unused", voc("Annotations") | {"ImageSets/Main/{}.txt": "a\nb\nc\n"}),
    "images and label files": ("./", ".", ".", {"classes.txt": "x\ny\nz\n"}),
    "a folder of xml files": ("./", ".", "unused", voc(".")),
}  # fmt: skip
ONE_SET = ("one json", "a folder of xml files", "images and label files")


def composed(program: str, *options: str) -> DataConfig:
    data: DataConfig = compose(program, PROGRAMS[program].schema, list(options), None).data
    return data


@pytest.mark.parametrize("layout", a_few_of(LAYOUTS, 3))
def test_a_layout_is_read_by_its_path(layout, yolo_set, tmp_path, monkeypatch) -> None:
    path, images, labels, texts = LAYOUTS[layout]
    for split in ("train", "val", "valid"):
        yolo_set.add(images.format(split), labels.format(split))
        for name, text in texts.items():
            yolo_set.write(name.format(split), text)
    monkeypatch.chdir(yolo_set.root)
    before = {path: path.stat().st_mtime_ns for path in yolo_set.root.rglob("*")}
    index = f"data.index_dir={tmp_path / 'index'}"
    if layout in ONE_SET:
        for program in ("train", "check_data"):
            with pytest.raises(Exception, match=r"no validation images of its own: .* fix: data\.split=0\.1"):
                composed(program, f"data={path}")
    split = ["data.split=0.5"] if layout in ONE_SET else []
    configs = [composed("anchors", f"data={path}", index)]
    if layout in (*ONE_SET, "COCO", "Darknet"):
        configs += [composed(program, f"data={path}", index, *split) for program in ("train", "check_data")]
    assert len({(config.name, config.root, str(config.train), str(config.names)) for config in configs}) == 1
    assert configs[0].name == ("coco8" if "coco8" in path else "set")
    for each in ("train", "val"):
        annotations = open_annotations(configs[0], each)
        assert_whole(annotations)
        assert annotations.names == NAMES
    assert {path: path.stat().st_mtime_ns for path in yolo_set.root.rglob("*")} == before


OF_TESTS = (
    "Roboflow, a level too high", "Roboflow COCO by its json", "COCO", "COCO in images, without a year", "VOC",
    "one json",
)  # fmt: skip


@pytest.mark.parametrize("layout", a_few_of(OF_TESTS, 3))
def test_the_test_images_of_a_set_are_read_by_its_path(layout, yolo_set, tmp_path, monkeypatch) -> None:
    path, images, labels, texts = LAYOUTS[layout]
    for split in ("train", "val", "valid", "test"):
        yolo_set.add(images.format(split), labels.format(split))
        for name, text in texts.items():
            tests = {"data.yaml": f"{text}test: ../test/images\n", "ImageSets/Main/test.txt": "b\n"}
            yolo_set.write(name.format(split), tests.get(name.format(split), text))
    monkeypatch.chdir(yolo_set.root)
    config = composed("anchors", f"data={path}", f"data.index_dir={tmp_path / 'index'}")
    if layout == "one json":
        with pytest.raises(DataError, match=r"no test images .* fix: name them by data\.val\.annotations"):
            open_annotations(config, "test")
        return
    read = open_annotations(config, "test")
    if layout == "VOC":
        assert [Path(read.path(0)).stem, len(read)] == ["b", 1]
    else:
        assert_whole(read)
        assert "test" in read.path(0) and read.names == NAMES
    if layout == "Roboflow, a level too high":
        with pytest.raises(DataError, match=rf"fix: data={yolo_set.root}$"):
            composed("anchors", "data=train/images")


def test_a_file_of_our_own_options_and_a_choice_by_its_name(yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(yolo_set.root)
    yolo_set.write("mine/cats.yaml", "defaults: [coco]\nname: cats\nroot: /data/cats\n")
    yolo_set.write("coco/data.yaml", "train: .\nnames: [x]\n")
    mine = composed("train", "data=mine/cats.yaml")
    assert (mine.name, mine.root, mine.format) == ("cats", "/data/cats", "coco") and mine.train.images == "train2017"
    assert composed("train", "data=coco").root == "datasets/coco"  # bare words are names
    yolo_set.write("dots.yaml", "train.epochs: 7\n")
    for word, said in (("data=mine", r"did you mean data=mine/\? there are: bccd"), ("experiment=dots.yaml", "a dot")):
        with pytest.raises(ConfigError, match=said):
            composed("train", word)
    assert composed("train", "data=./coco").root == f"{yolo_set.root}/coco/data.yaml"
    yolo_set.write("mine.yaml", "defaults:\n- finetune\n- override /data: ./coco\n- _self_\ntrain: {epochs: 7}\n")
    whole = compose("train", TrainConfig, ["experiment=mine.yaml"])
    assert (whole.train.epochs, whole.train.batch_size, whole.name) == (7, 8, "finetune-coco")


def test_what_cannot_be_read_is_named(yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(yolo_set.root)
    download = "download: |\n  import os\n  os.mkdir('ran')  # https://x.org/a.zip\n"
    yolo_set.write("a.yaml", f"train: images\nval: images\nnames: [x]\n{download}")
    for name in ("a.txt", "empty/a.txt"):
        yolo_set.write(name, "")
    with pytest.raises(DataError, match=r"a\.yaml names images, but there is no such place"):
        open_annotations(composed("train", "data=a.yaml"), "train")
    assert not (yolo_set.root / "ran").exists()
    for path in ("a.txt", "empty/"):
        with pytest.raises(DataError, match=rf"{path.strip('/')} is not a data set that .* as it is. fix: name"):
            composed("train", f"data={path}")


def test_a_data_file_names_no_place_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text("defaults: [shapes]\nindex_dir: elsewhere")
    with pytest.raises(DataError, match=r"index_dir.* fix: data\.index_dir="):
        composed("anchors", f"data={tmp_path}/set.yaml")
