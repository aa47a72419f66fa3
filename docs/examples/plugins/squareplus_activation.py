"""An activation: squareplus (Barron 2021), a smooth rectifier without exponentials.

``activation=squareplus`` in a .cfg, then
``python train.py model.cfg=my.cfg plugins=[squareplus_activation.py]``.
"""

from torch import Tensor, nn

from plugins import ACTIVATIONS

BEND = 4.0  # 0 is a ReLU; larger is smoother


class Squareplus(nn.Module):
    """Half of the sum of x and the root of x^2 + BEND."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return (x + (x * x + BEND).sqrt()) / 2


ACTIVATIONS["squareplus"] = Squareplus
