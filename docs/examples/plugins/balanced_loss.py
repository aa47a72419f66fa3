"""A loss: YOLOv3-SPP's with a weight for the objectness of each head.

Fine heads have many cells and few objects. A larger weight keeps their objectness from vanishing in
the mean: ``python train.py plugins=[balanced_loss.py] loss=yolov3 loss.name=balanced``.
"""

from typing import Any

from models import YoloLoss
from plugins import LOSSES


class BalancedLoss(YoloLoss):
    """The loss of one micro-batch; called and summed over ranks as YoloLoss is."""

    def _terms(self, *arguments: Any) -> Any:
        terms, gains = super()._terms(*arguments)
        pairs = zip(terms, self.heads, strict=True)
        return [(box, 16 / head.stride * there, of_class) for (box, there, of_class), head in pairs], gains


LOSSES["balanced"] = BalancedLoss
