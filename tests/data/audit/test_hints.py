"""What is said of a training set that is likely to disappoint: each limit, by a hair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.audit.hints import FEW_BOXES, LEAST_RECALL, MANY_SMALL, SMALL_PIXELS, data_hints
from data.audit.summary import FIT_RECALL

SIDE, COUNT = 100, 200
ANCHORS = np.array([[20.0, 20.0]])
THIN = (20.0, 3.0)  # overlaps the anchor by .15
SMALL = (SMALL_PIXELS - 0.1, 4.0)


class Set(SimpleNamespace):
    """An index of one image."""

    def __len__(self) -> int:
        return 1


def train_set(odd: tuple[float, float], share: float, boxes_of_rare: int = COUNT, crowd: int = 0) -> Any:
    """One image of two classes with COUNT boxes of 20 x 20, a share of them ``odd`` instead."""
    sizes = np.full((COUNT + boxes_of_rare, 2), 20.0)
    sizes[: round(share * len(sizes))] = odd
    return Set(
        classes=np.repeat([0, 1], [COUNT, boxes_of_rare]),
        crowd=np.arange(len(sizes)) >= len(sizes) - crowd,
        boxes_xywh=np.concatenate([np.zeros_like(sizes), sizes], axis=1),
        offsets=np.array([0, len(sizes)]),
        sizes=np.array([[SIDE, SIDE]]),
        names=["cup", "bowl"],
    )


def hints(*about: Any, min_iou: float | None = 0.2, size: int = SIDE, **more: int) -> list[str]:
    return data_hints(train_set(*about, **more), size, ANCHORS, min_iou)


@pytest.mark.parametrize(
    ("odd", "limit", "told"),
    [
        (
            THIN,
            1 - LEAST_RECALL,
            "10% of the boxes overlap no anchor by more than 0.2, so they are not learnt.",
        ),
        (SMALL, MANY_SMALL, "10% of the boxes are smaller than 8 pixels at train.image_size=100, where few are found"),
    ],
)
def test_a_share_is_told_above_its_limit_only(odd: tuple[float, float], limit: float, told: str) -> None:
    min_iou = 0.2 if odd is THIN else 0.0
    assert hints(odd, limit, min_iou=min_iou) == []
    (sentence,) = hints(odd, limit + 1 / (2 * COUNT), min_iou=min_iou)
    assert sentence.startswith(told)


def test_other_anchors_are_named_only_where_they_help() -> None:
    looser = "loss.anchor_iou=0.1"  # kept heads, whose own anchors must stay, can only take this
    fitted = f"model.anchors=auto; with the heads of pretrained weights, {looser}"
    for share, fix in ((1 - FIT_RECALL, looser), (1 - FIT_RECALL + 0.01, fitted)):
        (sentence,) = hints(THIN, share)
        assert sentence.endswith(f"so they are not learnt. fix: {fix}")


def test_a_loss_that_gives_each_box_its_best_anchor_needs_no_overlap() -> None:
    assert hints(THIN, 0.9, min_iou=None) == []


def test_the_size_is_that_in_the_training() -> None:
    assert hints(SMALL, 0.5, size=2 * SIDE, min_iou=0.0) == []
    assert "fix: train.image_size=160" in hints(SMALL, 0.5, min_iou=0.0)[0]


def test_rare_classes_are_named_and_crowds_are_no_boxes() -> None:
    assert hints(THIN, 0.0, boxes_of_rare=FEW_BOXES) == []
    (sentence,) = hints(THIN, 0.0, boxes_of_rare=FEW_BOXES, crowd=1)
    assert sentence.startswith("1 of 2 classes have fewer than 20 boxes (bowl 19). fix: more images of them, or train")
    assert "(bowl 0)" in hints(THIN, 0.0, boxes_of_rare=0)[0]
