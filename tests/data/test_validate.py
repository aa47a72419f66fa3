"""Every bad entry is an error with its fix, or is left out and reported."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

import data
from data.errors import DataError
from tests.data.bad_inputs import as_coco, images, labels, xmls
from tests.data.conftest import NO_AUGMENT
from tests.data.sets import GOOD_BOX, HEIGHT, PICTURE, WIDTH, coco_content, config_of

Edit = Callable[[dict[str, Any]], Any]
OVERSHOOTS = (0.0, 0.3, 0.99, 1.14, 7.0, 1e6)
SIDES = {"left": (-1, 0), "top": (0, -1), "right": (1, 0), "bottom": (0, 1)}


def set_box(*numbers: float) -> Edit:
    return lambda content: content["annotations"][0].update(bbox=list(numbers))


SKIPPABLE: dict[str, tuple[Edit, str]] = {
    "no width": (set_box(1, 2, 0, 5), r"annotation 100 of 11.png, box \[1, 2, 0, 5\] .* has no area"),
    "three numbers": (set_box(1, 2, 3), r"has the bbox \(1.0, 2.0, 3.0\) instead of four numbers"),
    "no box": (lambda c: c["annotations"][0].pop("bbox"), r"annotation 100 has the bbox None instead"),
    "iscrowd of two": (lambda c: c["annotations"][0].update(iscrowd=2), r"annotation 100 has iscrowd=2"),
    "unknown category": (lambda c: c["annotations"][0].update(category_id=99), r"has category 99"),
    "unknown image": (lambda c: c["annotations"][0].update(image_id=99), r"image id 99.*no image of the file"),
    "not a number": (set_box(1, float("nan"), 5, 5), r"not finite"),
}

FATAL: dict[str, tuple[Edit, str]] = {
    "no images": (lambda c: c.pop("images"), r"missing required field `images`"),
    "empty images": (lambda c: c.update(images=[], annotations=[]), r"instances\.json holds no images"),
    "no categories": (lambda c: c.update(categories=[]), r"defines no categories"),
    "category twice": (lambda c: c["categories"].append({"id": 1, "name": "cow"}), r"two categories with the id 1"),
    "name twice": (lambda c: c["categories"].append({"id": 4, "name": "dog"}), r"two categories with the name 'dog'"),
    "width beyond 64 bits": (lambda c: c["images"][0].update(width=2**70), r"at `\$.images\[0\].width`"),
    "image without name": (lambda c: c["images"][1].pop("file_name"), r"`file_name` - at `\$.images\[1\]`"),
}


@pytest.mark.parametrize("case", SKIPPABLE)
def test_bad_box(case: str, coco_set) -> None:
    edit, message = SKIPPABLE[case]
    total = len(coco_set.open().boxes_xywh)
    edit(coco_set.json)
    with pytest.raises(DataError, match=message) as caught:
        coco_set.open()
    assert "instances.json" in str(caught.value) and "data.on_error=skip" in str(caught.value)
    annotations = coco_set.open(on_error=data.OnError.skip)
    assert len(annotations) == 7 and len(annotations.boxes_xywh) == total - 1
    assert annotations.skipped[0].endswith("(1)") and len(annotations.skipped) == 2
    assert coco_set.open(on_error=data.OnError.skip).skipped == annotations.skipped, "the report is part of the index"


@pytest.mark.parametrize("case", FATAL)
@pytest.mark.parametrize("on_error", data.OnError)
def test_unusable_file(case: str, on_error: data.OnError, coco_set) -> None:
    edit, message = FATAL[case]
    edit(coco_set.json)
    with pytest.raises(DataError, match=message) as caught:
        coco_set.open(on_error=on_error)
    assert "fix: " in str(caught.value) and "instances.json" in str(caught.value)
    assert not list((coco_set.root / "index").glob("*")), "nothing half-written stays"


def test_the_error_counts_all_bad_entries(coco_set) -> None:
    for record in coco_set.json["annotations"][:3]:
        record["bbox"] = [1, 2, 0, 0]
    coco_set.json["annotations"][3]["category_id"] = 99
    with pytest.raises(DataError, match=r"4 bad entries in all: .*class not in use \(1\), boxes without area \(3\)"):
        coco_set.open()


def test_images_of_one_id(coco_set) -> None:
    coco_set.json["images"][2]["id"] = 11
    coco_set.json["annotations"] = [item for item in coco_set.json["annotations"] if item["image_id"] != 12]
    with pytest.raises(DataError, match=r"12.png has the image id 11 of another"):
        coco_set.open()
    annotations = coco_set.open(on_error=data.OnError.skip)
    assert [annotations.file_name(i) for i in range(len(annotations))] == [f"{n}.png" for n in (10, 11, 13, 14, 15, 16)]


def test_missing_images(coco_set) -> None:
    everything = coco_set.open()
    for name in ("11.png", "13.png"):
        (coco_set.root / "images" / name).unlink()
    coco_set.json["info"] = {}  # another file, so another index
    with pytest.raises(DataError, match=r"11.png is not in .*images .*missing image files \(2\)"):
        coco_set.open()
    annotations = coco_set.open(on_error=data.OnError.skip)
    assert annotations.image_ids.tolist() == [10, 12, 14, 15, 16]
    gone = np.diff(everything.offsets)[[1, 3]].sum()
    assert len(annotations.boxes_xywh) == len(everything.boxes_xywh) - gone
    assert annotations.skipped[0] == "left out: missing image files (2)", "their boxes go with them, without a word"


@pytest.mark.parametrize("on_error", data.OnError)
def test_a_wrong_image_folder_is_never_skipped(on_error: data.OnError, coco_set) -> None:
    (coco_set.root / "other").mkdir()
    with pytest.raises(DataError, match=r"none of the 7 images .*10.png.*data.train.images"):
        coco_set.open(on_error=on_error, train=data.SplitConfig("instances.json", "other"))


def test_paths_that_lead_nowhere(coco_set) -> None:
    with pytest.raises(DataError, match=r"data.train.annotations: there is no /.*/nowhere.json. fix: set data.root"):
        coco_set.open(train=data.SplitConfig("nowhere.json", "images"))
    with pytest.raises(DataError, match=r"data.val.images: there is no /.*/nowhere"):
        coco_set.open("val", val=data.SplitConfig("instances.json", "nowhere"))
    with pytest.raises(DataError, match=r"data.train.annotations: .* is not a file"):
        coco_set.open(train=data.SplitConfig("images", "images"))


def test_a_public_set_that_is_not_here_names_the_command_that_fetches_it(coco_set, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root, name in (("datasets/coco", "coco2017"), ("datasets/VOCdevkit", "voc2007")):
        with pytest.raises(DataError, match=rf"fix: .*python -m scripts\.get_data {name}"):
            coco_set.open(root=root)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b"[" * 100_000, b"3", b'{"images": []}'])
def test_no_coco_file(content: bytes, coco_set) -> None:
    coco_set.save()
    (coco_set.root / "instances.json").write_bytes(content)
    with pytest.raises(DataError, match=r"instances.json is not (valid JSON|a COCO instances file).* fix: "):
        data.open_annotations(coco_set.config, "train")


IMAGES = images()
CASES = IMAGES | labels() | xmls()


def outcome(config: data.DataConfig) -> tuple[data.Annotations, list[np.ndarray | None]]:
    annotations = data.open_annotations(config, "train")
    source = data.ImageSource(annotations, config.on_error)
    return annotations, [source.read(index) for index in range(len(annotations))]


@pytest.fixture
def time_limit() -> Iterator[None]:
    """End the process of a test that hangs, as one that waits for a pipe."""
    signal.alarm(20)
    yield
    signal.alarm(0)


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
        skipping = replace(config, on_error=data.OnError.skip)
        if case.left is None:
            with pytest.raises(DataError, match=case.error):
                outcome(skipping)
        else:
            annotations, pictures = outcome(skipping)
            readable = [index for index, picture in enumerate(pictures) if picture is not None]
            boxes = [box for index in readable for box in annotations.training_boxes(index)[1]]
            assert (len(readable), len(boxes)) == case.left
            assert annotations.skipped or annotations.notes or len(readable) < len(annotations)


def box_over(side: str, pixels: float) -> list[float]:
    """x, y, w, h of a box with its centre on the edge or inside, ``pixels`` of it outside."""
    x, y = SIDES[side]
    left, right = (-pixels, 12.0) if x < 0 else (WIDTH - 12.0, WIDTH + pixels) if x else (20.0, 40.0)
    top, bottom = (-pixels, 9.0) if y < 0 else (HEIGHT - 9.0, HEIGHT + pixels) if y else (10.0, 30.0)
    return [left, top, right - left, bottom - top]


BOXES = [box_over(side, pixels) for side in SIDES for pixels in OVERSHOOTS] + [[-3.0, -5.0, WIDTH + 9.0, HEIGHT + 5.5]]
OUTSIDE = [
    [-20.0, 5.0, 19.5, 10.0], [WIDTH + 0.0, 5.0, 10.0, 10.0], [WIDTH + 0.4, 5.0, 0.5, 4.0], [5.0, -9.0, 5.0, 9.0],
]  # fmt: skip
NO_AREA = [[10.0, 10.0, 0.0, 5.0], [10.0, 10.0, 5.0, -5.0]]


def write_set(root: Path, boxes: list[list[float]]) -> data.DataConfig:
    (root / "images").mkdir(parents=True)
    for stem in ("a", "b"):
        Image.fromarray(PICTURE).save(root / "images" / f"{stem}.png")
    content = coco_content()
    content["annotations"] = content["annotations"][:1] + [
        {"id": 20 + i, "image_id": 2, "category_id": 1, "bbox": box, "area": 7.5, "iscrowd": 0}
        for i, box in enumerate(boxes)
    ]
    (root / "set.json").write_text(json.dumps(content))
    return config_of(root, data.DataFormat.coco, "set.json", "images", None)


@pytest.mark.parametrize("on_error", [data.OnError.clip, data.OnError.skip])
def test_training_boxes_are_cut_and_reported_with_how_far_they_reached(on_error: data.OnError, tmp_path: Path) -> None:
    boxes = BOXES
    annotations = data.open_annotations(replace(write_set(tmp_path / "set", boxes), on_error=on_error), "train")
    low = np.maximum(np.array(boxes)[:, :2], 0)
    high = np.minimum(np.array(boxes)[:, :2] + np.array(boxes)[:, 2:], [WIDTH, HEIGHT])
    _, found = annotations.training_boxes(1)
    np.testing.assert_allclose(found, np.concatenate([low, high], axis=1), atol=1e-4)
    note, repeated = annotations.notes
    assert annotations.skipped == [] and repeated.startswith("repeated boxes ("), "once they are cut"
    beyond = sum(max(-x, -y, x + w - WIDTH, y + h - HEIGHT) > 1 for x, y, w, h in boxes)
    assert note.startswith(f"boxes that reach out of their image and are cut there ({beyond}), first: ")
    assert "reaches 1,000,000.00 px out of its image of 60 x 40 pixels" in note
    rows = annotations.boxes_xywh[annotations.offsets[1] :]
    assert (rows[:, :2] > -1.001).all() and (rows[:, :2] + rows[:, 2:] < np.array([WIDTH, HEIGHT]) + 1.001).all()
    dataset = data.TrainDataset(annotations, data.ImageSource(annotations, on_error), NO_AUGMENT, seed=0, epochs=1)
    targets = dataset.__getitems__([data.Request(1, 64, 64, 0)]).targets.numpy()
    assert len(targets) == len(boxes) and (targets[:, 4:] > 0).all()


def test_what_has_nothing_inside_stops_or_is_left_out(tmp_path: Path) -> None:
    for number, box in enumerate(OUTSIDE + NO_AREA):
        config = write_set(tmp_path / str(number), [box, BOXES[3]])
        said = "has no area" if box in NO_AREA else "lies outside its image of 60 x 40 pixels"
        for on_error in (data.OnError.clip, data.OnError.stop):
            with pytest.raises(DataError, match=f"{said}.*fix: "):
                data.open_annotations(replace(config, on_error=on_error), "train")
        annotations = data.open_annotations(replace(config, on_error=data.OnError.skip), "train")
        assert len(annotations.boxes_xywh) == 2 and said in annotations.skipped[1]
        assert len(annotations.notes) == 1, "the real object beside it is kept, and cut"


def test_stop_names_the_first_box_that_reaches_out(tmp_path: Path) -> None:
    config = replace(write_set(tmp_path / "set", [BOXES[1], BOXES[3]]), on_error=data.OnError.stop)
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"reaches 1\.14 px out of its image .*data\.on_error=clip"):
            data.open_annotations(config, split)


@pytest.mark.parametrize("on_error", [data.OnError.clip, data.OnError.skip])
def test_validation_keeps_every_box_that_pycocotools_counts(on_error: data.OnError, tmp_path: Path) -> None:
    boxes = BOXES + OUTSIDE + NO_AREA
    annotations = data.open_annotations(replace(write_set(tmp_path / "set", boxes), on_error=on_error), "val")
    kept = annotations.boxes_xywh[annotations.offsets[1] :]
    assert kept.tolist() == boxes, "the very numbers"
    reference = COCO(str(tmp_path / "set" / "set.json"))
    assert [row["bbox"] for row in reference.imgToAnns[2]] == boxes
    assert set(annotations.areas[1:]) == {7.5}
    assert annotations.skipped == [] and len(annotations.notes) == 2
    assert "are scored unchanged" in annotations.notes[0] and "no detection can match" in annotations.notes[1]
