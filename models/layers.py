"""The layers of a Darknet network as torch modules; graph.py makes them from the sections of a .cfg.

Every layer takes the maps of its sources as positional arguments, each (batch, channels, rows, columns), and returns
one map. The order and the names of the parameters of Convolution are what weights.py reads and writes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# In-place where the gradient can be had from the output alone: one activation map less to keep for the backward pass.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),  # Darknet's slope
    "relu": lambda: nn.ReLU(inplace=True),
    "logistic": nn.Sigmoid,
    "mish": nn.Mish,
    "swish": nn.SiLU,
}


class Convolution(nn.Module):
    """Convolution, batch normalisation (or a bias in its place), activation."""

    def __init__(
        self,
        in_channels: int,
        filters: int,
        size: int,
        stride: int,
        padding: int,
        groups: int,
        batch_norm: bool,
        activation: str,
        bn_eps: float,
        bn_momentum: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, filters, size, stride, padding, groups=groups, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(filters, bn_eps, bn_momentum) if batch_norm else None
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        activated: Tensor = self.activation(x)
        return activated


class Shortcut(nn.Module):
    """Sum of two maps of the same shape, then an activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        activated: Tensor = self.activation(x + other)
        return activated


class Route(nn.Module):
    """Concatenation of maps along the channels; of each source only the part `group` of `groups` equal ones."""

    def __init__(self, groups: int, group: int) -> None:
        super().__init__()
        self.groups = groups
        self.group = group

    def forward(self, *sources: Tensor) -> Tensor:
        if self.groups > 1:
            sources = tuple(source.chunk(self.groups, dim=1)[self.group] for source in sources)
        return sources[0] if len(sources) == 1 else torch.cat(sources, dim=1)


class MaxPool(nn.Module):
    """Max pooling with Darknet's padding: `padding` rows in all, padding // 2 of them in front, the rest behind.

    The input's rows and columns must be multiples of the stride, which Darknet's forward sees to. Then the windows
    reach only `size - stride - padding // 2` past the far edge, and the padding beyond that is not made at all: 2x2/2
    pooling, the most frequent case, runs without a copy.
    """

    def __init__(self, size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.size = size
        self.stride = stride
        self.front = padding // 2
        self.behind = max(0, size - stride - self.front)

    def forward(self, x: Tensor) -> Tensor:
        if self.front == self.behind:
            return F.max_pool2d(x, self.size, self.stride, self.front)
        padded = F.pad(x, (self.front, self.behind, self.front, self.behind), value=float("-inf"))
        return F.max_pool2d(padded, self.size, self.stride)


class Upsample(nn.Module):
    """Every pixel repeated `stride` times in both directions."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        enlarged: Tensor = F.interpolate(x, scale_factor=self.stride, mode="nearest")
        return enlarged


class YoloMap(nn.Module):
    """The raw map of one [yolo] section: a view of its input, nothing is decoded.

    (batch, anchors * (5 + classes), rows, columns) -> (batch, anchors, rows, columns, 5 + classes); the last
    dimension is x, y, w, h, objectness, classes. In channels_last memory it is the contiguous one.
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(1, (self.num_anchors, -1))
        return split.permute(0, 1, 3, 4, 2)
