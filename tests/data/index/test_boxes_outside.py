"""Boxes that reach out of their image: cut for training, unchanged for scoring, reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from data import DataConfig, DataError, DataFormat, ImageSource, OnError, TrainDataset, open_annotations
from data.plan import Request
from scripts.check_data import check_dataset
from tests.data.bad_inputs import HEIGHT, NAMES, PICTURE, WIDTH, coco_content, config_of
from tests.data.bad_labels import CORNERS, OBJECT, voc_set, voc_text
from tests.data.conftest import NO_AUGMENT

OVERSHOOTS = (0.0, 0.3, 0.99, 1.14, 7.0, 1e6)
SIDES = {"left": (-1, 0), "top": (0, -1), "right": (1, 0), "bottom": (0, 1)}


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


def write_set(root: Path, form: DataFormat, boxes: list[list[float]]) -> DataConfig:
    """An image b with these boxes and a good image a, as COCO json, YOLO txt or VOC xml."""
    if form == DataFormat.voc:
        corners = [CORNERS.replace(">15<", f">{x!r}<").replace(">10<", f">{y!r}<") for x, y, _, _ in boxes]
        objects = "".join(
            OBJECT.format(text.replace(">45<", f">{x + w!r}<").replace(">30<", f">{y + h!r}<"))
            for text, (x, y, w, h) in zip(corners, boxes, strict=True)
        )
        before, _, after = voc_text().partition(OBJECT.format(CORNERS))
        return replace(voc_set((before + objects + after).encode())(root), names=NAMES)
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for stem in ("a", "b"):
        Image.fromarray(PICTURE).save(root / "images" / f"{stem}.png")
    if form == DataFormat.yolo:
        rows = [((x + w / 2) / WIDTH, (y + h / 2) / HEIGHT, w / WIDTH, h / HEIGHT) for x, y, w, h in boxes]
        (root / "labels" / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
        (root / "labels" / "b.txt").write_text("".join(f"0 {' '.join(map(repr, row))}\n" for row in rows))
        return config_of(root, form, "images", ".", NAMES)
    content = coco_content()
    content["annotations"] = content["annotations"][:1] + [
        {"id": 20 + i, "image_id": 2, "category_id": 1, "bbox": box, "area": 7.5, "iscrowd": 0}
        for i, box in enumerate(boxes)
    ]
    (root / "set.json").write_text(json.dumps(content))
    return config_of(root, form, "set.json", "images", None)


FORMATS = [DataFormat.coco, DataFormat.yolo, DataFormat.voc]
FRACTIONS = 2.0  # YOLO rows beyond twice the image count as pixels, another error


def boxes_for(form: DataFormat, boxes: list[list[float]]) -> list[list[float]]:
    return [box for box in boxes if form != DataFormat.yolo or max(map(abs, box)) < FRACTIONS * HEIGHT]


@pytest.mark.parametrize("on_error", [OnError.clip, OnError.skip])
@pytest.mark.parametrize("form", FORMATS)
def test_training_boxes_are_cut_and_reported_with_how_far_they_reached(
    form: DataFormat, on_error: OnError, tmp_path: Path
) -> None:
    boxes = boxes_for(form, BOXES)
    annotations = open_annotations(replace(write_set(tmp_path / "set", form, boxes), on_error=on_error), "train")
    low = np.maximum(np.array(boxes)[:, :2], 0)
    high = np.minimum(np.array(boxes)[:, :2] + np.array(boxes)[:, 2:], [WIDTH, HEIGHT])
    _, found = annotations.training_boxes(1)
    np.testing.assert_allclose(found, np.concatenate([low, high], axis=1), atol=1e-4)
    assert annotations.skipped == []
    (note,) = annotations.notes
    beyond = sum(max(-x, -y, x + w - WIDTH, y + h - HEIGHT) > 1 for x, y, w, h in boxes)
    assert note.startswith(f"boxes that reach out of their image and are cut there ({beyond}), first: ")
    farthest = "1,000,000.00" if form != DataFormat.yolo else "7.00"
    assert f"reaches {farthest} px out of its image of 60 x 40 pixels" in note
    rows = annotations.boxes_xywh[annotations.offsets[1] :]
    assert (rows[:, :2] > -1.001).all() and (rows[:, :2] + rows[:, 2:] < np.array([WIDTH, HEIGHT]) + 1.001).all()
    dataset = TrainDataset(annotations, NO_AUGMENT, 0, 1, ImageSource(annotations, on_error))
    targets = dataset.__getitems__([Request(1, 64, 64, 0)]).targets.numpy()
    assert len(targets) == len(boxes) and (targets[:, 4:] > 0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_what_has_nothing_inside_stops_or_is_left_out(form: DataFormat, tmp_path: Path) -> None:
    for number, box in enumerate(boxes_for(form, OUTSIDE) + NO_AREA):
        config = write_set(tmp_path / str(number), form, [box, BOXES[3]])
        said = "has no area" if box in NO_AREA else "lies outside its image of 60 x 40 pixels"
        for on_error in (OnError.clip, OnError.stop):
            with pytest.raises(DataError, match=f"{said}.*fix: "):
                open_annotations(replace(config, on_error=on_error), "train")
        annotations = open_annotations(replace(config, on_error=OnError.skip), "train")
        assert len(annotations.boxes_xywh) == 2 and said in annotations.skipped[1]
        assert len(annotations.notes) == 1, "the real object beside it is kept, and cut"


@pytest.mark.parametrize("form", FORMATS)
def test_stop_names_the_first_box_that_reaches_out(form: DataFormat, tmp_path: Path) -> None:
    config = replace(write_set(tmp_path / "set", form, [BOXES[1], BOXES[3]]), on_error=OnError.stop)
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"reaches 1\.14 px out of its image .*data\.on_error=clip"):
            open_annotations(config, split)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("on_error", [OnError.clip, OnError.skip])
def test_validation_keeps_every_box_that_pycocotools_counts(
    form: DataFormat, on_error: OnError, tmp_path: Path
) -> None:
    boxes = boxes_for(form, BOXES + OUTSIDE) + NO_AREA
    annotations = open_annotations(replace(write_set(tmp_path / "set", form, boxes), on_error=on_error), "val")
    kept = annotations.boxes_xywh[annotations.offsets[1] :]
    if form == DataFormat.coco:
        assert kept.tolist() == boxes, "the very numbers"
        reference = COCO(str(tmp_path / "set" / "set.json"))
        assert [row["bbox"] for row in reference.imgToAnns[2]] == boxes
        assert set(annotations.areas[1:]) == {7.5}
    np.testing.assert_allclose(kept, boxes, atol=1e-9)
    assert annotations.skipped == [] and len(annotations.notes) == 2
    assert "are scored unchanged" in annotations.notes[0] and "no detection can match" in annotations.notes[1]


def test_the_check_of_a_set_calls_them_problems(tmp_path: Path) -> None:
    config = write_set(tmp_path / "set", DataFormat.coco, [*BOXES, *OUTSIDE, *NO_AREA])
    network = (64, np.array([[10.0, 10.0]]), 0.2)
    report = check_dataset(config, *network)
    found = {(entry.split, entry.kind): entry.count for entry in report.problems}
    assert found["train", "boxes that reach out of their image and are cut there"] == 13
    assert found["train", "boxes outside their image"] == 4 and found["train", "boxes without area"] == 2
    assert found["val", "boxes that reach out of their image and are scored unchanged"] == 13 + 3
    assert found["val", "boxes without area that are scored unchanged"] == 2
