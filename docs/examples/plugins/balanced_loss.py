"""A loss: YOLOv3-SPP's with a weight for the objectness of each head.

Fine heads have many cells and few objects. A larger weight keeps their objectness from vanishing in
the mean: ``python train.py plugins=[balanced_loss.py] loss=balanced plugin.balanced.box=5``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from models import Head, LossConfig, YoloLoss
from models.config import Balance, IouKind, PositivesBy
from plugins import loss


@dataclass
class Balanced:
    """Weights of the terms."""

    box: float = 3.54
    objectness: float = 64.3
    classification: float = 37.4  # at 80 classes
    heads: list[float] = field(default_factory=lambda: [0.4, 1.0, 4.0])  # of the objectness, coarse to fine


@loss("balanced", Balanced)
class BalancedLoss(YoloLoss):
    """The loss of one micro-batch; called and summed over ranks as YoloLoss is."""

    def __init__(self, heads: Sequence[Head], options: Balanced) -> None:
        gains = options.box, options.objectness, options.classification
        super().__init__(
            heads,
            LossConfig(
                "balanced",
                *gains,
                IouKind.giou,
                0.2,
                1.0,
                1.0,
                0.0,
                0.0,
                None,
                Balance.equal,
                PositivesBy.shape,
                None,
            ),
        )
        strides = sorted((head.stride for head in heads), reverse=True)
        self.weights = [options.heads[min(strides.index(head.stride), len(options.heads) - 1)] for head in heads]

    def _terms(self, *arguments: Any) -> Any:
        terms, gains = super()._terms(*arguments)
        weighed = [(box, weight * there, of) for (box, there, of), weight in zip(terms, self.weights, strict=True)]
        return weighed, gains
