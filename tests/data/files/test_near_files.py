"""Errors about a name in the wrong case or with another suffix give the right one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from data import DataConfig, DataError, DataFormat, OnError, SplitConfig, open_annotations
from tests.data.bad_inputs import GOOD_ROW, NAMES, PICTURE, coco_content, config_of
from tests.data.bad_labels import voc_text

WRITTEN = {  # name in the annotations: name on the disk, name in the error
    "b.JPG": ("images/b.jpg", "b.jpg"),
    "b.jpg": ("images/b.JPG", "b.JPG"),
    "b.jpeg": ("images/b.jpg", "b.jpg"),
    "b.png": ("images/b.webp", "b.webp"),
    "B.jpg": ("images/b.jpg", "b.jpg"),
    "sub/b.jpg": ("images/Sub/b.jpg", "images/Sub/b.jpg"),
    "Sub/B.JPG": ("images/sub/b.jpg", "images/sub/b.jpg"),
}


def write(root: Path, form: DataFormat, written: str, on_disk: str) -> DataConfig:
    for folder in ("images", "labels", "Annotations", "images/" + str(Path(written).parent)):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / on_disk).parent.mkdir(exist_ok=True)
    if Path(written).parent != Path() and not (root / "images" / written).parent.samefile((root / on_disk).parent):
        (root / "images" / written).parent.rmdir()
    Image.fromarray(PICTURE).save(root / "images" / "a.png")
    Image.fromarray(PICTURE).save(root / on_disk, {".webp": "WEBP"}.get(Path(on_disk).suffix, "JPEG"))
    (root / "set.json").write_text(json.dumps(coco_content(written)))
    (root / "list.txt").write_text(f"images/a.png\nimages/{written}\n")
    for stem in ("a", str(Path(written).with_suffix(""))):
        (root / "labels" / stem).parent.mkdir(exist_ok=True)
        (root / "labels" / f"{stem}.txt").write_text(GOOD_ROW)
    if form == DataFormat.coco:
        return config_of(root, form, "set.json", "images", NAMES)
    return config_of(root, form, "list.txt", ".", NAMES)


@pytest.mark.parametrize("form", [DataFormat.coco, DataFormat.yolo])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_missing_image(written: str, form: DataFormat, tmp_path: Path) -> None:
    on_disk, called = WRITTEN[written]
    config = write(tmp_path / "set", form, written, on_disk)
    with pytest.raises(DataError, match=rf"{written}, which is not in .*, but there is (/.*/)?{called}\. fix: "):
        open_annotations(config, "train")
    skipped = open_annotations(replace(config, on_error=OnError.skip), "train").skipped
    assert len(skipped) == 2 and skipped[1].endswith(called)


@pytest.mark.parametrize("form", [DataFormat.coco, DataFormat.yolo])
def test_all_images_missing(form: DataFormat, tmp_path: Path) -> None:
    config = write(tmp_path / "set", form, "b.png", "images/b.PNG")
    (tmp_path / "set" / "images" / "a.png").rename(tmp_path / "set" / "images" / "A.png")
    with pytest.raises(DataError, match=r"none of the 2 images .* \(first: .*a\.png, but there is A\.png\)\. fix: "):
        open_annotations(config, "train")


@pytest.mark.parametrize("name", ["Images", "SET.json"])
def test_paths_of_the_options(name: str, tmp_path: Path) -> None:
    config = write(tmp_path / "set", DataFormat.coco, "b.jpg", "images/b.jpg")
    part = SplitConfig("set.json", name) if name == "Images" else SplitConfig(name, "images")
    with pytest.raises(DataError, match=rf"there is no .*/{name}, but there is {name.lower()}\. fix: "):
        open_annotations(replace(config, train=part), "train")
    with pytest.raises(DataError, match=r"there is no .*/Set/set\.json, but there is /.*/set/set\.json\. fix: "):
        open_annotations(replace(config, root=str(tmp_path / "Set")), "train")
    with pytest.raises(DataError, match=r"data\.root: there is no .*/SET, but there is set\. fix: "):
        open_annotations(
            replace(
                config, format=DataFormat.yolo, root=str(tmp_path / "SET"), train=SplitConfig(None, "."), names=None
            ),
            "train",
        )


@pytest.mark.parametrize("there", ["labels/b.TXT", "labels/B.txt", "Labels/b.txt"])
def test_a_label_file_in_another_case_is_no_empty_image(there: str, tmp_path: Path) -> None:
    root = tmp_path / "set"
    config = write(root, DataFormat.yolo, "b.jpg", "images/b.jpg")
    assert len(open_annotations(config, "train").boxes_xywh) == 2
    (root / there).parent.mkdir(exist_ok=True)
    (root / "labels" / "b.txt").rename(root / there)
    if there.startswith("Labels"):
        (root / "labels" / "a.txt").rename(root / "labels" / "A.txt")
        with pytest.raises(DataError, match=r"none of the 2 images .* has a label file"):
            open_annotations(config, "train")
        return
    with pytest.raises(DataError, match=rf"b\.jpg has the label file .*/{there}, which is to be called .*/b\.txt"):
        open_annotations(config, "train")
    assert len(open_annotations(replace(config, on_error=OnError.skip), "train").skipped) == 2


VOC_PLACES = {  # where xml and images lie; data.train.annotations and images
    "beside the images": ("train", "train", "train", "train"),
    "beside the images, from the root": ("train/x", "train/x", ".", "."),
    "folders beside each other": ("xmls", "pictures", "xmls", "pictures"),
    "voc folders without a list": ("Annotations", "JPEGImages", "Annotations", "."),
    "subfolders of both": ("xmls/1/2", "pictures/1/2", "xmls", "pictures"),
    "a list of xml beside images": ("train", "train", "list.txt", "train"),
    "a list of file names": ("Annotations", "JPEGImages", "list.txt", "."),
}
SUFFIXES = {"jpg": ".jpg", "JPG": ".JPG", "png though xml says jpg": ".png", "PNG though xml says jpg": ".PNG"}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("places", VOC_PLACES)
def test_voc_with_and_without_a_list(places: str, suffix: str, tmp_path: Path) -> None:
    xmls, images, annotations, folder = VOC_PLACES[places]
    root = tmp_path / "set"
    for stem in "abc":
        for name in (xmls, images):
            (root / name).mkdir(parents=True, exist_ok=True)
        kind = "PNG" if "png" in suffix.lower() else "JPEG"
        Image.fromarray(PICTURE).save(root / images / f"{stem}{SUFFIXES[suffix]}", kind)
        file_name = f"C:\\pictures\\{stem}.jpg" if stem == "a" else f"{stem}.jpg"
        (root / xmls / f"{stem}.xml").write_text(voc_text().replace("b.png", file_name))
    (root / "list.txt").write_text("a.jpg\nb.jpg\nc.jpg\n" if places == "a list of file names" else "a\nb\nc\n")
    config = config_of(root, DataFormat.voc, annotations, folder, NAMES)
    found = open_annotations(config, "train")
    assert [found.path(index) for index in range(3)] == [f"{root / images}/{stem}{SUFFIXES[suffix]}" for stem in "abc"]
    assert found.boxes_xywh.tolist() == [[15, 10, 30, 20]] * 3 and found.image_ids.tolist() == [1, 2, 3]
    (root / xmls / "b.xml").write_text(voc_text().replace("<xmax>45", "<xmax>55"))
    assert open_annotations(config, "train").boxes_xywh[1].tolist() == [15, 10, 40, 20], "an xml file was changed"
    (root / xmls / "c.xml").rename(root / xmls / "c.XML")
    if annotations == "list.txt":
        with pytest.raises(DataError, match=r"list names c, but there is no .*/c\.xml, but there is c\.XML\. fix: "):
            open_annotations(config, "train")
    else:
        assert len(open_annotations(config, "train")) == 3


def test_a_folder_without_xml(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    with pytest.raises(DataError, match=r"/set holds no xml file in or below it\. fix: set data\.<split>\.images"):
        open_annotations(config_of(root, DataFormat.voc, ".", ".", NAMES), "train")
