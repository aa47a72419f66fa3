"""What options of the loss leave to the training set, to the weights and to an earlier start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import auto
from conf.entry import compose
from conf.schema import TrainConfig
from models import Darknet, LossConfig, parse_cfg
from tests.models.cfg_writer import cfg, conv, head
from train_utils.distributed import World

CPU = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")


def images_with(count: int, side: float = 200) -> Any:
    """``count`` boxes of ``side`` pixels in one image of 640 x 480, none in the other."""
    return SimpleNamespace(
        names=["a", "b"], classes=np.zeros(count, np.int32), crowd=np.zeros(count, bool),
        sizes=np.array([[480, 640]] * 2), offsets=np.array([0, count, count]),
        boxes_xywh=np.full((count, 4), side, dtype=float),
    )  # fmt: skip


def configured(*given: str) -> TrainConfig:
    return compose("train", TrainConfig, list(given))


@pytest.mark.parametrize(
    ("count", "side", "given", "decided"),
    [
        (2, 200, [], (200, "damped")), (3, 200, [], (37.4, "equal")), (2, 100, [], (37.4, "equal")),
        (0, 200, [], (37.4, "equal")), (2, 200, ["loss.classification=50"], (50, "damped")),
        (2, 200, ["loss.balance=equal"], (200, "equal")), (2, 200, ["loss=yolov3_pooled"], (200, "pooled")),
        (9, 30, ["loss.classification=50", "loss.balance=damped"], (50, "damped")),
    ],
)  # fmt: skip
def test_the_loss_suits_images_that_hold_few_large_objects(
    count: int, side: int, given: list[str], decided: tuple[float, str]
) -> None:
    config, images = configured(*given), images_with(count, side)
    found, note = auto.choose_loss(config, images)
    assert isinstance(found.loss, LossConfig) and (found.loss.classification, found.loss.balance) == decided
    assert ("loss.classification=200" in (note or "")) == (decided[0] == 200)
    assert ("loss.balance=damped" in (note or "")) == (decided[1] == "damped" and count == 2)
    assert note is None or ("2.0 each" in note and "31%" in note)
    few = (count, side) == (2, 200)
    assert (found.loss.positives, found.loss.positives_by) == ((10, "cost") if few else (None, "shape"))
    assert found.model.scale_x_y == (2 if few else None)
    assert auto.choose_loss(found, images_with(0)) == (found, None), "what is decided stays"
    images.names = ["one"]
    assert auto.choose_loss(config, images)[1] is None, "there is nothing to tell apart"
    darknet = configured("loss=darknet")
    assert auto.choose_loss(darknet, images) == (darknet, None)


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        (["model.weights=a.weights"], (10, "cost", 2)), (["model.scale_x_y=1.5"], (10, "cost", 1.5)),
        (["loss.positives=5"], (5, "overlap", None)),
        (["loss.positives_by=shape"], (None, "shape", None)),
        (["loss.positives=5", "loss.positives_by=alignment"], (5, "alignment", None)),
    ],
)  # fmt: skip
def test_few_large_objects_have_more_positives_unless_told_otherwise(
    given: list[str], decided: tuple[int | None, str, float | None]
) -> None:
    found, note = auto.choose_loss(configured(*given), images_with(1))
    assert isinstance(found.loss, LossConfig) and note is not None and "loss.classification=200" in note
    assert (found.loss.positives, found.loss.positives_by, found.model.scale_x_y) == decided
    assert ("loss.positives=10" in note) == (decided[0] == 10)
    assert ("model.scale_x_y=2" in note) == (decided[2] == 2)


def network(scale_x_y: float = 1, heads_kept: bool = False) -> Darknet:
    text = cfg(conv(8, 3, 2), head(0, 1, scale_x_y=scale_x_y))
    model = Darknet(parse_cfg(text, "a.cfg"))
    model.heads_kept = heads_kept
    return model


@pytest.mark.parametrize(
    ("scale", "kept", "given", "decided", "reach"),
    [
        (1, False, (), "cost", 2), (1, True, (), "shape", 1), (2, True, (), "cost", 2), (3, True, (), "cost", 3),
        (1, False, ("loss.positives_by=shape",), "shape", 1), (1, False, ("model.scale_x_y=1.5",), "cost", 1.5),
        (1, False, ("loss=darknet",), None, 1),
    ],
)  # fmt: skip
def test_fresh_heads_reach_their_neighbours_and_kept_ones_stay(
    scale: float, kept: bool, given: tuple[str, ...], decided: str | None, reach: float
) -> None:
    """The network, its .cfg's text and the options agree, and a resumed run keeps all of it."""
    model = network(scale, kept)
    found, lines = auto.fit_loss(configured(*given), CPU, model, images_with(2))
    assert getattr(found.loss, "positives_by", None) == decided
    assert [head.scale_x_y for head in model.heads] == [reach]
    assert [head.scale_x_y for head in Darknet(model.cfg).heads] == [reach]
    assert found.model.scale_x_y == (reach if reach != scale else None)
    assert any("loss.positives_by=cost" in line for line in lines) == (decided == "cost")

    # Later the set may have other figures, as after a change of it, and the heads be unknown.
    again = network(scale)
    resumed, lines = auto.fit_loss(found, CPU, again, images_with(9, 9))
    assert (resumed, lines) == (found, [])
    assert again.heads == model.heads and again.cfg.text == model.cfg.text


def test_rare_classes_weigh_more_and_the_boxes_as_much_as_before() -> None:
    """Four boxes of the first class, one of the second, crowds and none of the others."""
    images = SimpleNamespace(
        names=["a", "b", "c", "d"],
        classes=np.array([0, 0, 1, 0, 0, 2], np.int32),
        crowd=np.array([False] * 5 + [True]),
    )
    config = configured("loss.class_weights=auto")
    found, note = auto.weigh_classes(config, images)
    assert isinstance(found.loss, LossConfig)
    a, *others = found.loss.class_weights
    assert others == [pytest.approx(2 * a, abs=1e-3)] * 3 and 4 * a + others[0] == pytest.approx(5, abs=1e-3)
    assert note == "loss.class_weights=auto: from 0.8333 for a to 1.6667 for b"
    assert auto.weigh_classes(found, images) == (found, None), "what is decided stays"
    images.crowd[:] = True
    assert getattr(auto.weigh_classes(config, images)[0].loss, "class_weights") == [1, 1, 1, 1]  # noqa: B009
    for given in ("loss=darknet", "loss.class_weights=[1,2]"):
        other = configured(given)
        assert auto.weigh_classes(other, images) == (other, None)
