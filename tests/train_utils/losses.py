"""Options of losses for two classes: each way to choose positives, and each kind of term."""

from __future__ import annotations

from functools import cache

from conf.entry import compose
from conf.schema import TrainConfig
from models import LossSection

TEN = "loss.positives=10"
COST = ("loss=yolov3", TEN, "loss.positives_by=cost", "loss.balance=damped")
LOSSES = (
    ("loss=yolov3",),
    ("loss=yolov3", "loss.anchor_iou=0", "loss.class_weights=[0.5,1.5]"),
    ("loss=yolov3_pooled", TEN),
    ("loss=yolov3", TEN, "loss.positives_by=alignment"),
    COST,
    ("loss=darknet",),
)


@cache
def loss_options(*overrides: str) -> LossSection:
    """The options of a training with some ``overrides``."""
    return compose("train", TrainConfig, list(overrides)).loss
