"""What is said in the first epochs of a training: once, in time, and not when all is well."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask

from tests.train_utils.coco_sets import draw
from train_utils.loop.early_look import LEAST_DONE, WATCHED_EPOCHS, EarlyLook
from train_utils.scores.operating_points import NEAR, overlooked_share


class Looked:
    """An early look at a training, and what it said."""

    def __init__(self, scored: float = 0.0) -> None:
        self.said: list[str] = []
        self.look = EarlyLook(self.said.append, 0.01, scored)

    def losses(self, *losses: float, first: int = 1) -> list[str]:
        for epoch, loss in enumerate(losses, first):
            self.look.trained(epoch, loss, lambda: ["the data are odd. fix: others"])
        return self.said


def test_the_data_are_told_once_and_only_after_the_first_epoch() -> None:
    assert Looked().losses(3.0, 2.0, 1.0) == ["hint: the data are odd. fix: others"]
    assert Looked().losses(3.0, 9.0, first=2) == []  # a resumed run


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((3.0, 3.0, 2.0), None),
        ((3.0, 2.9, 3.1, 4.0), "from 3 in epoch 1 to 3.1 in epoch 3"),
        ((3.0, *[2.0] * (WATCHED_EPOCHS - 2), 3.1), f"from 3 in epoch 1 to 3.1 in epoch {WATCHED_EPOCHS}"),
        ((3.0, *[2.0] * (WATCHED_EPOCHS - 1), 3.1), None),
        ((3.0, float("nan"), 2.0), None),  # max_nonfinite_steps judges
    ],
)
def test_a_loss_that_rises_above_that_of_the_first_epoch_is_told_once(losses: tuple[float, ...], told: str) -> None:
    said = Looked().losses(*losses)[1:]
    assert len(said) == (told is not None)
    assert all(told in line and line.endswith("fix: a lower learning rate, as optim.lr=0.0033") for line in said)


def test_boxes_that_nothing_overlaps_are_told_in_the_first_evaluation() -> None:
    truth, found = draw(0)
    perfect = np.repeat(found[:1], len(truth.classes))
    perfect["image_id"] = truth.image_ids[truth.image_of_box]
    perfect["box_xywh"] = truth.boxes_xywh
    sentence = "no detection overlaps 100% of the validation boxes"
    for first, told in ((found[:0], True), (perfect, False)):
        looked = Looked()
        looked.losses(1.0)
        looked.look.scored(truth, found[:0], LEAST_DONE - 0.01)  # too early to tell
        looked.look.scored(truth, first, LEAST_DONE)
        looked.look.scored(truth, found[:0], 0.5)  # no longer the first
        assert [sentence in line for line in looked.said[1:]] == [True] * told
    for scored, told in ((0.0, True), (LEAST_DONE - 0.01, True), (LEAST_DONE, False)):
        resumed = Looked(scored)  # which trains no first epoch
        resumed.look.scored(truth, found[:0], 0.5)
        assert [sentence in line for line in resumed.said] == [True] * told


def test_the_share_of_overlooked_boxes_is_that_of_pycocotools_overlaps() -> None:
    for seed in range(5):
        truth, found = draw(seed)
        seen = counted = 0
        for position, image in enumerate(truth.image_ids):
            rows = slice(truth.offsets[position], truth.offsets[position + 1])
            boxes = truth.boxes_xywh[rows][~truth.crowd[rows].astype(bool)]
            own = found["box_xywh"][found["image_id"] == image].astype(float)
            counted += len(boxes)
            if len(own) and len(boxes):
                seen += int((mask.iou(own, boxes, [False] * len(boxes)) >= NEAR).any(axis=0).sum())
        assert overlooked_share(truth, found) == pytest.approx(1 - seen / counted)
    none = replace(truth, crowd=truth.crowd.astype(bool) | True)
    assert overlooked_share(none, found) == 0
