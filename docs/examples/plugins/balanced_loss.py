"""A loss: YOLOv3-SPP's with a weight for the objectness of each head.

Fine heads have many cells and few objects. A larger weight keeps their objectness from vanishing in
the mean: ``python train.py plugins=[balanced_loss.py] loss=yolov3 loss.name=balanced``.
"""

from collections.abc import Sequence
from typing import Any

from models import Head, LossConfig, YoloLoss
from plugins import LOSSES

WEIGHTS = (0.4, 1.0, 4.0)  # of the objectness, coarse to fine


class BalancedLoss(YoloLoss):
    """The loss of one micro-batch; called and summed over ranks as YoloLoss is."""

    def __init__(self, heads: Sequence[Head], config: LossConfig) -> None:
        super().__init__(heads, config)
        strides = sorted((head.stride for head in heads), reverse=True)
        self.weights = [WEIGHTS[min(strides.index(head.stride), len(WEIGHTS) - 1)] for head in heads]

    def _terms(self, *arguments: Any) -> Any:
        terms, gains = super()._terms(*arguments)
        weighed = [(box, weight * there, of) for (box, there, of), weight in zip(terms, self.weights, strict=True)]
        return weighed, gains


LOSSES["balanced"] = BalancedLoss
