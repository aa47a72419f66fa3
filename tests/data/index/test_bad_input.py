"""Every bad entry is an error with its fix, or is left out and reported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import (
    Annotations,
    DataConfig,
    DataError,
    DataFormat,
    ImageSource,
    OnError,
    SplitConfig,
    open_annotations,
)
from tests.data.bad_images import as_coco, images
from tests.data.bad_inputs import GOOD_BOX, HEIGHT, WIDTH
from tests.data.bad_jsons import jsons
from tests.data.bad_labels import labels, xmls

Edit = Callable[[dict[str, Any]], Any]


def set_box(*numbers: float) -> Edit:
    return lambda content: content["annotations"][0].update(bbox=list(numbers))


SKIPPABLE: dict[str, tuple[Edit, str]] = {
    "no width": (set_box(1, 2, 0, 5), r"annotation 100 of 11.png, box \[1, 2, 0, 5\] .* has no area"),
    "negative height": (set_box(1, 2, 5, -5), r"has no area"),
    "outside": (set_box(1000, 2, 500, 5), r"lies outside its image of \d+ x \d+ pixels"),
    "left of the image": (set_box(-11.5, 2, 10, 5), r"lies outside its image"),
    "three numbers": (set_box(1, 2, 3), r"has the bbox \(1.0, 2.0, 3.0\) instead of four numbers"),
    "no box": (lambda c: c["annotations"][0].pop("bbox"), r"annotation 100 has the bbox None instead"),
    "unknown category": (lambda c: c["annotations"][0].update(category_id=99), r"has category 99"),
    "unknown image": (lambda c: c["annotations"][0].update(image_id=99), r"image id 99.*no image of the file"),
}

FATAL: dict[str, tuple[Edit, str]] = {
    "no images": (lambda c: c.pop("images"), r"missing required field `images`"),
    "images of numbers": (lambda c: c.update(images=[1, 2]), r"got `int` - at `\$.images\[0\]`"),
    "nan": (set_box(1, float("nan"), 5, 5), r"is not valid JSON"),
    "text in the box": (
        lambda c: c["annotations"][0].update(bbox=["a", 2, 3, 4]),
        r"annotations\[0\].bbox\[0\]`",
    ),
    "empty images": (lambda c: c.update(images=[], annotations=[]), r"lists no usable image"),
    "no categories": (lambda c: c.update(categories=[]), r"defines no categories"),
    "no boxes": (lambda c: c.update(annotations=[]), r"no usable box for its 7 images.*data.train.annotations"),
    "category twice": (lambda c: c["categories"].append({"id": 1, "name": "cow"}), r"two categories with the id 1"),
    "name twice": (lambda c: c["categories"].append({"id": 4, "name": "dog"}), r"two categories with the name 'dog'"),
    "id of text": (lambda c: c["images"][0].update(id="x10"), r"got `str` - at `\$.images\[0\].id`. fix: "),
    "fractional class": (
        lambda c: c["annotations"][0].update(category_id=1.5),
        r"annotations\[0\].category_id`",
    ),
    "fractional width": (lambda c: c["images"][1].update(width=60.5), r"at `\$.images\[1\].width`"),
    "image without name": (
        lambda c: c["images"][1].pop("file_name"),
        r"`file_name` - at `\$.images\[1\]`",
    ),
}


@pytest.mark.parametrize("case", SKIPPABLE)
def test_bad_box(case: str, coco_set) -> None:
    edit, message = SKIPPABLE[case]
    total = len(coco_set.open().boxes_xywh)
    edit(coco_set.json)
    with pytest.raises(DataError, match=message) as caught:
        coco_set.open()
    assert "instances.json" in str(caught.value) and "data.on_error=skip" in str(caught.value)
    annotations = coco_set.open(on_error=OnError.skip)
    assert len(annotations) == 7 and len(annotations.boxes_xywh) == total - 1
    assert annotations.skipped[0].endswith("(1)") and len(annotations.skipped) == 2
    assert coco_set.open(on_error=OnError.skip).skipped == annotations.skipped, "the report is part of the index"


@pytest.mark.parametrize("case", FATAL)
@pytest.mark.parametrize("on_error", OnError)
def test_unusable_file(case: str, on_error: OnError, coco_set) -> None:
    edit, message = FATAL[case]
    edit(coco_set.json)
    with pytest.raises(DataError, match=message) as caught:
        coco_set.open(on_error=on_error)
    assert "fix: " in str(caught.value) and "instances.json" in str(caught.value)
    assert not list((coco_set.root / "index").glob("*")), "nothing half-written stays"


def test_up_to_a_pixel_outside_is_rounding(coco_set) -> None:
    image = coco_set.json["images"][1]
    coco_set.json["annotations"][0]["bbox"] = [-1, -1, image["width"] + 2, image["height"] + 2]
    assert coco_set.open().boxes_xyxy(1)[0].tolist() == [0, 0, image["width"], image["height"]]


def test_a_validation_set_may_hold_no_boxes(coco_set) -> None:
    coco_set.json["annotations"] = []
    annotations = coco_set.open("val")
    assert len(annotations) == 7 and annotations.boxes_xywh.shape == (0, 4)


def test_the_error_counts_all_bad_entries(coco_set) -> None:
    for record in coco_set.json["annotations"][:3]:
        record["bbox"] = [1, 2, 0, 0]
    coco_set.json["annotations"][3]["category_id"] = 99
    with pytest.raises(DataError, match=r"4 bad entries in all: .*class not in use \(1\), boxes without area \(3\)"):
        coco_set.open()


def test_reports_name_the_first_twenty(empty_set) -> None:
    boxes = [(1, [5.0, 5.0, 5.0, 0.0])] * 30 + [(1, [5.0, 5.0, 5.0, 5.0])]
    empty_set.add_image(np.zeros((40, 40, 3), dtype=np.uint8), boxes)
    skipped = empty_set.open(on_error=OnError.skip).skipped
    assert skipped[0] == "left out: boxes without area (30)" and len(skipped) == 21


def test_images_of_one_id(coco_set) -> None:
    coco_set.json["images"][2]["id"] = 11
    coco_set.json["annotations"] = [item for item in coco_set.json["annotations"] if item["image_id"] != 12]
    with pytest.raises(DataError, match=r"image id 11 is used twice, also by 12.png"):
        coco_set.open()
    annotations = coco_set.open(on_error=OnError.skip)
    assert [annotations.file_name(i) for i in range(len(annotations))] == [f"{n}.png" for n in (10, 11, 13, 14, 15, 16)]


def test_missing_images(coco_set) -> None:
    everything = coco_set.open()
    for name in ("11.png", "13.png"):
        (coco_set.root / "images" / name).unlink()
    coco_set.json["info"] = {}  # another file, so another index
    with pytest.raises(DataError, match=r"names 11.png, which is not in .*images .*missing image files \(2\)"):
        coco_set.open()
    annotations = coco_set.open(on_error=OnError.skip)
    assert annotations.image_ids.tolist() == [10, 12, 14, 15, 16]
    gone = np.diff(everything.offsets)[[1, 3]].sum()
    assert len(annotations.boxes_xywh) == len(everything.boxes_xywh) - gone
    assert annotations.skipped[0] == "left out: missing image files (2)", "their boxes go with them, without a word"


@pytest.mark.parametrize("on_error", OnError)
def test_a_wrong_image_folder_is_never_skipped(on_error: OnError, coco_set) -> None:
    (coco_set.root / "other").mkdir()
    with pytest.raises(DataError, match=r"none of the 7 images .* \(first: 10.png\).*data.train.images"):
        coco_set.open(on_error=on_error, train=SplitConfig("instances.json", "other"))


def test_paths_that_lead_nowhere(coco_set) -> None:
    with pytest.raises(DataError, match=r"data.train.annotations: there is no /.*/nowhere.json. fix: set data.root"):
        coco_set.open(train=SplitConfig("nowhere.json", "images"))
    with pytest.raises(DataError, match=r"data.val.images: there is no /.*/nowhere"):
        coco_set.open("val", val=SplitConfig("instances.json", "nowhere"))
    with pytest.raises(DataError, match=r"data.train.annotations: .* is not a file"):
        coco_set.open(train=SplitConfig("images", "images"))
    with pytest.raises(DataError, match=r"data.train.images: .* is not a folder"):
        coco_set.open(train=SplitConfig("instances.json", "instances.json"))


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b"[]", b"3", b'{"images": []}'])
def test_no_coco_file(content: bytes, coco_set) -> None:
    coco_set.save()
    (coco_set.root / "instances.json").write_bytes(content)
    with pytest.raises(DataError, match=r"instances.json is not (valid JSON|a COCO instances file).* fix: "):
        open_annotations(coco_set.config, "train")


VOC_XML = """<annotation><filename>a.png</filename><size><width>60</width><height>50</height></size>
<object><name>cat</name><bndbox><xmin>5</xmin><ymin>6</ymin><xmax>25</xmax><ymax>36</ymax></bndbox></object>
<object><name>{name}</name><bndbox><xmin>1</xmin><ymin>2</ymin>{right}<ymax>9</ymax></bndbox></object></annotation>"""


def open_voc(coco_set, root: Path, text: str, on_error: OnError = OnError.stop):
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "JPEGImages" / "a.png").touch()
    (root / "Annotations" / "a.xml").write_text(text)
    (root / "list.txt").write_text("a\n")
    coco_set.config.format = DataFormat.voc
    part = SplitConfig("list.txt", ".")
    return coco_set.open(root=str(root), train=part, names=["cat", "dog"], on_error=on_error)


def test_voc_objects_that_cannot_be_used(coco_set, tmp_path: Path) -> None:
    good = VOC_XML.format(name="dog", right="<xmax>8</xmax>")
    annotations = open_voc(coco_set, tmp_path, good)
    assert annotations.boxes_xywh.tolist() == [[5, 6, 20, 30], [1, 2, 7, 7]] and annotations.classes.tolist() == [0, 1]
    for name, right, message in (
        ("dgo", "<xmax>8</xmax>", r"object 2 of a.xml is of class 'dgo', .* did you mean 'dog'"),
        ("dog", "", r"object 2 of a.xml has no bndbox"),
        ("dog", "<xmax>one</xmax>", r"object 2 of a.xml has no bndbox"),
        ("dog", "<xmax>1</xmax>", r"object 2 of a.xml .* has no area"),
        ("dog", "<xmax>99</xmax>", r"object 2 of a.xml .* reaches 39\.00 px out"),
    ):
        text = VOC_XML.format(name=name, right=right)
        with pytest.raises(DataError, match=message):
            open_voc(coco_set, tmp_path, text)
        assert len(open_voc(coco_set, tmp_path, text, OnError.skip).boxes_xywh) == 1 + ("99" in right)


def test_voc_files_that_cannot_be_used(coco_set, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.xml is not valid XML"):
        open_voc(coco_set, tmp_path, "<annotation>")
    with pytest.raises(DataError, match=r"a.xml has the height '' in <size>"):
        open_voc(coco_set, tmp_path, "<annotation><object/></annotation>")


IMAGES = images()
CASES = IMAGES | jsons() | labels() | xmls()


def outcome(config: DataConfig) -> tuple[Annotations, list[np.ndarray | None]]:
    """Read everything that training would read of a set."""
    annotations = open_annotations(config, "train")
    source = ImageSource(annotations, config.on_error)
    return annotations, [source.read(index) for index in range(len(annotations))]


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Stop a test that hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("name", CASES)
def test_each_input_gives_a_correct_sample_or_one_sentence(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    written = case.write(tmp_path / "set")
    for config in (
        (written, as_coco(written)) if written.train.annotations == "list.txt" and name in IMAGES else (written,)
    ):
        if case.error is None:
            annotations, pictures = outcome(config)
            assert len(annotations) == 2 and annotations.skipped == []
            assert all(picture is not None and picture.shape == (HEIGHT, WIDTH, 3) for picture in pictures)
            if case.pixels is not None:
                assert np.abs(pictures[1].astype(int) - case.pixels).mean() <= 1, "not the picture"
            rows = slice(annotations.offsets[1], annotations.offsets[2])
            boxes = np.column_stack([annotations.classes[rows], annotations.boxes_xywh[rows]])
            expected = [[0, *GOOD_BOX]] if case.boxes is None else case.boxes
            np.testing.assert_allclose(boxes, np.reshape(expected, (-1, 5)), atol=1e-9)
            continue
        with pytest.raises(DataError, match=case.error) as caught:
            outcome(config)
        assert "fix: " in str(caught.value) and "\n" not in str(caught.value)
        skipping = replace(config, on_error=OnError.skip)
        if case.left is None:
            with pytest.raises(DataError, match=case.error):
                outcome(skipping)
        else:
            annotations, pictures = outcome(skipping)
            readable = [index for index, picture in enumerate(pictures) if picture is not None]
            assert (len(readable), sum(map(len, map(annotations.boxes_xyxy, readable)))) == case.left
            assert annotations.skipped or annotations.notes or len(readable) < len(annotations)
