"""Losses for two classes: each kind, and each way to choose positives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from conf.compose import compose
from conf.schema import TrainConfig
from models import Head, HeadLoss, LossConfig
from train_utils.build import build_loss

COST = ("loss=yolox", "loss.positives_by=cost")
LOSSES = (("loss=yolov3",), ("loss=yolov3", "loss.anchor_iou=0"), ("loss=yolox",), COST, ("loss=darknet",))
GRAPHS = (LOSSES[0], *LOSSES[2:])  # another anchor_iou is another number in the same graph


@cache
def loss_options(*overrides: str) -> LossConfig:
    return compose("train", TrainConfig, list(overrides)).loss


def loss_of(heads: Sequence[Head], *overrides: str) -> HeadLoss:
    """The loss of ``heads``, whose cells reach far if it needs that."""
    if "loss=yolox" in overrides:
        heads = [replace(head, scale_x_y=6) for head in heads]
    return build_loss(heads, loss_options(*overrides))
