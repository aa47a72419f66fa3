"""An activation: squareplus (Barron 2021), a smooth rectifier without exponentials.

``activation=squareplus`` in a .cfg, then
``python train.py model.cfg=my.cfg plugins=[squareplus_activation.py] plugin.squareplus.bend=1``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from plugins import activation


@dataclass
class Bend:
    """The shape of squareplus."""

    bend: float = 4.0  # 0 is a ReLU; larger is smoother

    def __post_init__(self) -> None:
        if self.bend < 0:
            raise ValueError(f"bend must be 0 or more, got {self.bend}")


@activation("squareplus", Bend)
class Squareplus(nn.Module):
    """Half of the sum of x and the root of x^2 + bend."""

    def __init__(self, options: Bend) -> None:
        super().__init__()
        self.bend = options.bend

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return (x + (x * x + self.bend).sqrt()) / 2
