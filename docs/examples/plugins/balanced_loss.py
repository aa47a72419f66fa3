"""A loss: YOLOv3-SPP's with a weight for the objectness of each head.

Fine heads have many cells and few objects. A larger weight keeps their objectness from vanishing in
the mean: ``python train.py plugins=[balanced_loss.py] loss=yolov3 loss.name=balanced``.
"""

from models.loss import LossInputs, Terms, Weights, YoloLoss
from plugins import LOSSES


class BalancedLoss(YoloLoss):
    """The loss of a step, summed over passes and ranks as YoloLoss is."""

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Those of YoloLoss, the objectness of a head of stride 8 counted twice."""
        terms, weights = super().terms(inputs)
        for head, of_head in zip(self.heads, terms, strict=True):
            of_head["objectness"] = 16 / head.stride * of_head["objectness"]
        return terms, weights


LOSSES["balanced"] = BalancedLoss
