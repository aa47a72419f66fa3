"""A layer: squeeze and excitation (Hu et al. 2018), which weighs the channels of a map.

    [squeeze]
    ratio=8

in a .cfg, then ``python train.py model.cfg=my.cfg plugins=[squeeze_layer.py]``.
"""

from torch import Tensor, nn

from models.cfg import Section
from models.graph import Graph, Node
from plugins import LAYERS, SECTION_KEYS, layer_keys


class SqueezeExcite(nn.Module):
    """Multiply each channel by a weight in 0..1 that depends on the means of all channels."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A map (batch, channels, rows, columns) of the same shape."""
        weighted: Tensor = x * self.weights(x)
        return weighted


def squeeze(graph: Graph, section: Section) -> Node:
    """Squeeze and excitation of the previous map."""
    ratio = section.integer("ratio", 16, minimum=1)  # the bottleneck has this many times fewer channels
    source, shape = graph.previous()
    return Node(SqueezeExcite(shape.channels, max(1, shape.channels // ratio)), (source,), shape)


LAYERS["squeeze"] = squeeze
SECTION_KEYS["squeeze"] = layer_keys("ratio")
