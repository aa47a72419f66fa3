"""Overlap and recall of anchors against plain formulas; a fit finds planted sizes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.anchors import choose_anchors, describe_set, match_anchors, network_sizes, recall
from models.decode import wh_iou
from tests.data.conftest import CocoSet

SIDE = 100
BOX_SIZES = np.array([[6.0, 8.0], [12.0, 30.0], [60.0, 50.0]])
FAR = np.array([[200.0, 10.0], [10.0, 300.0], [400.0, 400.0], [2.0, 90.0]])


def test_overlaps_are_those_of_the_loss() -> None:
    generator = np.random.default_rng(0)
    sizes, anchors = generator.uniform(1, 300, (70_000, 2)), generator.uniform(1, 300, (5, 2))
    reference = wh_iou(torch.from_numpy(sizes), torch.from_numpy(anchors))
    overlaps, nearest = match_anchors(sizes, anchors)
    np.testing.assert_allclose(overlaps, reference.max(1).values, rtol=1e-9)
    assert (nearest == reference.argmax(1).numpy()).all()
    assert recall(sizes, anchors, 0.5) == pytest.approx(float((reference.max(1).values > 0.5).double().mean()))


def test_sizes_are_those_of_the_letterboxed_images(coco_set: CocoSet) -> None:
    coco_set.json["annotations"][-1]["iscrowd"] = 1
    annotations = coco_set.open()
    expected = []
    for i, (height, width) in enumerate(annotations.sizes.tolist()):
        rows = slice(annotations.offsets[i], annotations.offsets[i + 1])
        for (_, _, w, h), crowd in zip(annotations.boxes_xywh[rows].tolist(), annotations.crowd[rows], strict=True):
            if not crowd:
                expected.append((w * 320 / max(height, width), h * 320 / max(height, width)))
    assert len(expected) == len(annotations.classes) - 1
    np.testing.assert_allclose(network_sizes(annotations, 320), expected)


def boxes(sizes: np.ndarray, crowd: bool = False) -> Any:
    """The index of one image with boxes of these sizes in pixels, letterboxed as it is."""
    count = len(sizes)
    return SimpleNamespace(
        classes=np.zeros(count, np.int32),
        crowd=np.full(count, crowd),
        boxes_xywh=np.concatenate([np.zeros((count, 2)), sizes], axis=1).reshape(count, 4),
        offsets=np.array([0, count]),
        sizes=np.array([[SIDE, SIDE]]),
    )


@pytest.mark.parametrize("slots", [[0, 1, 2], [3, 0, 2]])
def test_planted_sizes_fill_the_rows_in_use_from_small_to_large(slots: list[int]) -> None:
    sizes = np.repeat(BOX_SIZES, 40, axis=0) * np.random.default_rng(0).uniform(0.95, 1.05, (120, 2))
    found, _ = choose_anchors(boxes(sizes), SIDE, FAR, slots, 0.2)
    assert found is not None
    np.testing.assert_allclose(found[slots], BOX_SIZES, rtol=0.05)
    unused = [row for row in range(len(FAR)) if row not in slots]
    assert (found[unused] == FAR[unused]).all()
    again, _ = choose_anchors(boxes(sizes), SIDE, FAR, slots, None)
    assert again is not None and (again == found).all()


def test_anchors_of_the_cfg_stay_unless_the_fit_gains_enough() -> None:
    sizes = np.full((30, 2), 20.0)
    for lacking, stays in ((0.029, True), (0.031, False)):
        current = np.array([[20.0, 20.0 * (1 - lacking)]])
        assert match_anchors(sizes, current)[0][0] == pytest.approx(1 - lacking)
        found, sentence = choose_anchors(boxes(sizes), SIDE, current, [0], 0.999)
        assert (found is None) is stays is ("the anchors of the .cfg stay" in sentence), sentence


@pytest.mark.parametrize("sizes", [[[20.0, 30.0]] * 9, [[20.0, 30.0]], [[20.0, 30.0], [5.0, 5.0]]])
def test_fewer_sizes_than_anchors_are_fitted_with_neighbours(sizes: list[list[float]]) -> None:
    found, _ = choose_anchors(boxes(np.array(sizes)), SIDE, FAR, [0, 1, 2, 3], None)
    assert found is not None and len(np.unique(found, axis=0)) == 4
    assert match_anchors(np.array(sizes), found)[0].min() > 0.99


def test_no_boxes_and_tiny_boxes() -> None:
    for nothing in (boxes(np.zeros((0, 2))), boxes(BOX_SIZES, crowd=True)):
        found, sentence = choose_anchors(nothing, SIDE, FAR, [0, 1], 0.2)
        assert found is None and "no boxes to fit to" in sentence
    found, _ = choose_anchors(boxes(np.array([[0.01, 0.02], [0.03, 0.01], [1.3, 1.4]])), SIDE, FAR, [0, 1], 0.2)
    assert found is not None and found[:2].min() >= 1


@pytest.mark.parametrize("missed", [0, 1])
def test_anchors_near_the_boxes_stay_however_well_others_fit(missed: int) -> None:
    """Boxes of 20 x 20 overlap an anchor of 40 x 40 by a quarter, thin ones by less."""
    sizes, current = np.full((100, 2), 20.0), np.array([[40.0, 40.0]])
    sizes[: 30 + missed] = [20.0, 3.0]
    for anchor_iou in (0.2, None):  # that of the loss, and Darknet's loss, which has none
        found, sentence = choose_anchors(boxes(sizes), SIDE, current, [0], anchor_iou)
        assert (found is None) == (missed == 0) == ("the anchors of the .cfg stay" in sentence), sentence


def test_the_summary_of_a_training(coco_set: CocoSet) -> None:
    annotations = coco_set.open()
    side = 1000  # above all sizes of the anchors
    fitting, far = network_sizes(annotations, side), np.array([[5000.0, 9.0]])
    line, warning = describe_set(annotations, side, fitting, 0.2)
    assert line.startswith(f"7 images (2 without boxes), {len(annotations.classes)} boxes, 3 classes") and not warning
    one = fitting[:1]
    assert describe_set(annotations, side, one, 0.2)[0].endswith(f"{recall(fitting, one, 0.2):.4f} at IoU 0.2")
    assert recall(fitting, one, 0.2) != recall(fitting, one, 0.5)
    line, warning = describe_set(annotations, side, far, 0.2)
    assert line.endswith("0.0000 at IoU 0.2") and "100.0%" in str(warning) and "model.anchors=auto" in str(warning)
    assert f"{len(fitting)} boxes (" in describe_set(annotations, 1, fitting, 0.2)[0], "all are below 2 px there"
    box, content = coco_set.json["annotations"][0], coco_set.json
    content["images"] = [image for image in content["images"] if image["id"] == box["image_id"]]
    content["categories"] = [category for category in content["categories"] if category["id"] == box["category_id"]]
    content["annotations"] = [box]
    assert describe_set(coco_set.open(), side, fitting, None)[0].startswith("1 image, 1 box, 1 class\n")
