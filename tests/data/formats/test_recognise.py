"""``data=<path>``: the same pictures in every layout that people have, read where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import HydraException

from conf.entry import compose
from conf.messages import explain
from conf.programs import PROGRAMS
from conf.schema import TrainConfig
from data import DataConfig, DataError, open_annotations
from data.voc import CORNERS
from tests.data.yolo_set import SIZES, YoloSet, assert_whole

NAMES = ["x", "y", "z"]


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


def voc(folder: Path, stems: str = "abc") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem in stems:
        (height, width), which = SIZES[stem], "abc".index(stem)
        part = "<part><name>head</name></part>"
        corners = zip(CORNERS, (0.375 * width, 0.25 * height, 0.625 * width, 0.75 * height), strict=True)
        box = "".join(f"<{corner}>{value}</{corner}>" for corner, value in corners)
        (folder / f"{stem}.xml").write_text(
            f"<annotation><size><width>{width}</width><height>{height}</height></size>"
            f"<object><name>{NAMES[which]}</name><bndbox>{box}</bndbox>{part}</object></annotation>"
        )


def yaml_at(path: str, text: str, images: str = "images", labels: str = "labels") -> Callable[[YoloSet], str]:
    def made(yolo_set: YoloSet) -> str:
        for split in ("train", "val"):
            yolo_set.add(images.format(split), labels.format(split))
        yolo_set.write(path, f"{text}\nnc: 3\n" + ("" if "names" in text else "names: [x, y, z]"))
        return path

    return made


def of_coco(path: str, images: str, annotations: str, inside: str = "") -> Callable[[YoloSet], str]:
    def made(yolo_set: YoloSet) -> str:
        for split in ("train", "valid" if "_annotations" in annotations else "val"):
            word = split if "_annotations" in annotations else f"{split}2017"
            yolo_set.add(images.format(word), "unused")
            yolo_set.write(annotations.format(word), coco("abc", inside))
        return path

    return made


def of_voc(path: str, xmls: str, images: str, lists: bool = False) -> Callable[[YoloSet], str]:
    def made(yolo_set: YoloSet) -> str:
        for split in ("train", "valid"):
            yolo_set.add(images.format(split), "unused")
            voc(yolo_set.root / xmls.format(split))
            if lists:
                yolo_set.write(f"ImageSets/Main/{split[:5].removesuffix('id')}.txt", "a\nb\nc\n")
        return path

    return made


def darknet(yolo_set: YoloSet) -> str:
    yolo_set.add("images", "labels")
    yolo_set.write("train.txt", "images/a.jpg\nimages/b.jpg\nimages/c.jpg\n")
    yolo_set.write("obj.names", "x\ny\nz\n")
    yolo_set.write("obj.data", "classes = 3\ntrain = train.txt\nvalid = train.txt\nnames = obj.names\n")
    return "obj.data"


def polygons(yolo_set: YoloSet) -> str:
    """Rows of segmentation, and of turned boxes, whose corners lie on the upright box."""
    yaml_at("data.yaml", "train: images\nval: images")(yolo_set)
    for number, stem in enumerate("abc"):
        corners = "0.375 0.25 0.625 0.25 0.625 0.75 0.375 0.75" + (" 0.5 0.5" if stem == "b" else "")
        yolo_set.write(f"labels/{stem}.txt", f"{number} {corners}\n")
    return "data.yaml"


def beside(yolo_set: YoloSet) -> str:
    yolo_set.add(".", ".")
    yolo_set.write("classes.txt", "x\ny\nz\n")
    return "./"


LAYOUTS: dict[str, Callable[[YoloSet], str]] = {
    "ultralytics, path and dictionary": yaml_at(
        "coco8.yaml", "path: .\ntrain: images/train\nval: images/val\nnames: {0: x, 1: y, 2: z}",
        "images/{}", "labels/{}",
    ),
    "path below datasets of the current folder": yaml_at(
        "conf/coco8.yaml", "path: coco8\ntrain: images/train\nval: [images/val]", "datasets/coco8/images/{}",
        "datasets/coco8/labels/{}",
    ),
    "path beside the current folder": yaml_at(
        "conf/coco8.yml", "path: ../set/coco8 \ntrain: images\nval: images", "coco8/images", "coco8/labels"
    ),
    "Roboflow, a level too high": yaml_at(
        "data.yaml", "train: ../train/images\nval: ../val/images", "{}/images", "{}/labels"
    ),
    "Roboflow, two levels too high": yaml_at(
        "data.yaml", "train: ../../train/images\nval: ../../val/images", "{}/images", "{}/labels"
    ),
    "Darknet": darknet,
    "polygons": polygons,
    "Roboflow COCO by its json": of_coco("valid/_annotations.coco.json", "{}", "{}/_annotations.coco.json"),
    "COCO": of_coco("./", "{}", "annotations/instances_{}.json"),
    "COCO in images": of_coco("annotations/instances_train2017.json", "images/{}", "annotations/instances_{}.json"),
    "Label Studio's COCO": of_coco("./", "images", "result.json", "images/"),
    "one json": of_coco("boxes.json", "pictures", "boxes.json", "pictures/"),
    "VOC": of_voc("./", "Annotations", "JPEGImages", lists=True),
    "images and label files": beside,
    "a folder of xml files": of_voc("./", "./", "./"),
}  # fmt: skip
ONE_SET = ("Label Studio's COCO", "one json", "a folder of xml files", "images and label files")


def composed(program: str, *options: str) -> DataConfig:
    data: DataConfig = compose(program, PROGRAMS[program].schema, list(options), None).data
    return data


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_program_reads_a_layout_by_its_path(
    layout: str, yolo_set: YoloSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LAYOUTS[layout](yolo_set)
    monkeypatch.chdir(yolo_set.root)
    before = {path: path.stat().st_mtime_ns for path in yolo_set.root.rglob("*")}
    index = f"data.index_dir={tmp_path / 'index'}"
    if layout in ONE_SET:
        for program in ("train", "check_data"):
            with pytest.raises(Exception, match=r"no validation images of its own: .* fix: data\.split=0\.1"):
                composed(program, f"data={path}")
    split = ["data.split=0.5"] if layout in ONE_SET else []
    configs = [composed("anchors", f"data={path}", index)]
    configs += [composed(program, f"data={path}", index, *split) for program in ("train", "check_data")]
    assert len({(config.name, config.root, str(config.train), str(config.names)) for config in configs}) == 1
    assert configs[0].name == ("coco8" if "coco8" in path else "boxes" if "boxes" in path else "set")
    for each in ("train", "val"):
        found = open_annotations(configs[0], each)
        assert_whole(found)
        assert found.names == NAMES
    assert {path: path.stat().st_mtime_ns for path in yolo_set.root.rglob("*")} == before


def test_a_file_of_our_own_options_and_a_choice_by_its_name(yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(yolo_set.root)
    yolo_set.write("mine/cats.yaml", "defaults: [coco]\nname: cats\nroot: /data/cats\n")
    yolo_set.write("coco/data.yaml", "train: .\nnames: [x]\n")
    mine = composed("train", "data=mine/cats.yaml")
    assert (mine.name, mine.root, mine.format) == ("cats", "/data/cats", "coco") and mine.train.images == "train2017"
    assert composed("train", "data=coco").root == "datasets/coco"  # bare words are names
    with pytest.raises(HydraException) as refused:
        composed("train", "data=mine")
    assert "no choice data=mine; there are: bccd" in explain(refused.value, TrainConfig)
    assert composed("train", "data=./coco").root == f"{yolo_set.root}/coco/data.yaml"
    yolo_set.write("mine.yaml", "defaults:\n- finetune\n- override /data: ./coco\n- _self_\ntrain: {epochs: 7}\n")
    whole = compose("train", TrainConfig, ["experiment=mine.yaml"])
    assert (whole.train.epochs, whole.train.batch_size, whole.name) == (7, 8, "finetune-coco")


@pytest.mark.parametrize(
    ("text", "typed", "said"),
    [
        ("download: https://x.org/a.zip\n", "a.yaml", "correct its path, or get the images first"),
        (
            "download: |\n  import os\n  os.mkdir('ran')  # https://x.org/a.zip\n",
            "a.yaml",
            "or get the images first",
        ),
        ("", "a.txt", "is no data set that can be read as it is. fix: name a data.yaml"),
        ("", "empty/", "/empty is no data set that can be read as it is. fix: name a data.yaml"),
        ("", "jsons/", "/jsons is no data set that can be read as it is. fix: name a data.yaml"),
    ],
)
def test_what_cannot_be_read_is_named(
    text: str, typed: str, said: str, yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(yolo_set.root)
    for name in ("a.yaml",):
        yolo_set.write(name, f"train: images\nval: images\nnames: [x]\n{text}")
    for name in ("a.txt", "empty/a.txt"):
        yolo_set.write(name, "")
    for name in ("jsons/a.json", "jsons/b.json"):
        yolo_set.write(name, coco("a"))
    with pytest.raises(DataError) as found:
        open_annotations(composed("train", f"data={typed}"), "train")
    assert said in str(found.value) and not (yolo_set.root / "ran").exists()
