"""Activations and layers, with Darknet's names and constants.

Every layer takes the maps of its sources as positional arguments, each (batch, channels, rows,
columns), and returns one map. graph.py builds the layers of a .cfg.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What makes the module, by name. In-place where the output alone gives the gradient: backward then
# keeps one map fewer.
ACTIVATIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": nn.Identity,
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),  # Darknet's slope
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "logistic": nn.Sigmoid,
    "mish": nn.Mish,
    "swish": nn.SiLU,
    "silu": nn.SiLU,  # the name outside of Darknet
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
}


class Convolution(nn.Module):
    """Convolution, batch normalisation (or the convolution's bias instead), activation.

    xnor: kernels become their signs times the mean magnitude of their filter, the input becomes its
    signs, and padding counts as -1, as in Darknet's inference (XNOR-Net, Rastegari et al. 2016).
    """

    # Takes the place of batch norm and activation in training: (map, norm, activation) -> map.
    # train_utils/sync_batchnorm.py may set it; modules and state dict stay as they are.
    fused_norm: Callable[[Tensor, nn.BatchNorm2d, Callable[[Tensor], Tensor]], Tensor] | None = None

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, activation: str, xnor: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.xnor = conv, norm, xnor
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        x = self._binary(x) if self.xnor else self.conv(x)
        return self.normalised(x, self.activation)

    def normalised(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """`activation` of `x` after batch normalisation, if there is one."""
        if self.norm is None:
            return activation(x)
        if self.fused_norm is not None and self.norm.training:
            return self.fused_norm(x, self.norm, activation)
        return activation(self.norm(x))

    def _binary(self, x: Tensor) -> Tensor:
        conv = self.conv
        assert not isinstance(conv.padding, str)
        signs = F.pad(binary_signs(x), conv.padding * 2, value=-1.0)  # rows and columns have the same padding
        return F.conv2d(signs, binary_kernels(conv.weight), conv.bias, conv.stride, 0, conv.dilation, conv.groups)


class SharedConvolution(nn.Module):
    """A convolution with the weights and batch normalisation of another one (share_index).

    It has its own stride, padding, dilation and activation. The other layer is not a submodule, so
    its tensors appear once in parameters and state. In a deep copy of the network both are copies.
    """

    source: Convolution  # the layer that owns the tensors

    def __init__(self, source: Convolution, stride: int, padding: int, dilation: int, activation: str) -> None:
        super().__init__()
        self.__dict__["source"] = source  # an ordinary attribute would be a submodule
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        conv = self.source.conv
        x = F.conv2d(x, conv.weight, conv.bias, self.stride, self.padding, self.dilation, conv.groups)
        return self.source.normalised(x, self.activation)


class YoloMap(nn.Module):
    """The raw map of one [yolo] section: a view of its input, not decoded.

    (batch, anchors * (5 + classes), rows, columns) -> (batch, anchors, rows, columns, 5 + classes).
    The last dimension is contiguous in channels_last memory; Darknet.forward says what it holds.
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(1, (self.num_anchors, -1))
        return split.permute(0, 1, 3, 4, 2)


def binary_signs(x: Tensor) -> Tensor:
    """1 where x > 0, else -1. The gradient is 1 between -1 and 1, and 0 outside."""
    signs = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    passed = F.hardtanh(x)
    return passed + (signs - passed).detach()


def binary_kernels(weight: Tensor) -> Tensor:
    """Signs of kernels times the mean magnitude of their filter. The gradient is the identity's."""
    magnitude = weight.abs().mean(dim=(1, 2, 3), keepdim=True)
    binary = torch.where(weight > 0, magnitude, -magnitude)
    return weight + (binary - weight).detach()


class Shortcut(nn.Module):
    """Sum of maps of one size, then an activation. The result has the channels of the first map.

    Only the channels that both maps have are added (partial residual networks, Wang et al. 2019).
    """

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        total, channels = first, first.shape[1]
        for other in others:
            if other.shape[1] < channels:
                shared = other.shape[1]
                total = torch.cat((total[:, :shared] + other, total[:, shared:]), dim=1)
            else:
                total = total + other[:, :channels]
        return self.activation(total)


class Route(nn.Module):
    """Concatenate one of `groups` equal parts of each map's channels, number `group`."""

    def __init__(self, groups: int, group: int) -> None:
        super().__init__()
        self.groups, self.group = groups, group

    def forward(self, *sources: Tensor) -> Tensor:
        if self.groups > 1:
            sources = tuple(source.chunk(self.groups, dim=1)[self.group] for source in sources)
        return sources[0] if len(sources) == 1 else torch.cat(sources, dim=1)


class Product(nn.Module):
    """Product of two maps, then an activation; for [scale_channels] the first map is 1x1."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, factors: Tensor, x: Tensor) -> Tensor:
        return self.activation(x * factors)


class MaxPool(nn.Module):
    """Max pooling with Darknet's padding: `padding` rows in all, padding // 2 of them before.

    Rows and columns of the input are multiples of the stride, as the graph ensures. So the windows
    reach only `size - stride - padding // 2` past the far edge, and only that much is padded.
    2x2/2 pooling, the most frequent case, then needs no copy.
    """

    def __init__(self, size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.size, self.stride, self.before = size, stride, padding // 2
        self.after = max(0, size - stride - self.before)

    def forward(self, x: Tensor) -> Tensor:
        if self.after == self.before and 2 * self.before <= self.size:
            return F.max_pool2d(x, self.size, self.stride, self.before)
        return F.max_pool2d(F.pad(x, (self.before, self.after) * 2, value=float("-inf")), self.size, self.stride)


class Dropout(nn.Dropout):
    """[dropout]: single values become 0 in training, the others 1 / (1 - p) times as large.

    Each rank draws for the whole micro-batch and takes its own images, so that an image has the
    same zeros on any number of ranks, whose generators stay equal. `place` is set by the training:
    this rank, the number of ranks, and how many images in turn each gets.
    """

    place = 0, 1, 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        rank, ranks, unit = self.place
        turns = -(-len(x) // unit)
        drawn = torch.empty((turns, ranks, unit, *x.shape[1:]), dtype=torch.bool, device=x.device)
        kept = drawn.bernoulli_(1 - self.p)[:, rank].flatten(0, 1)[: len(x)]
        return x * kept * (1 / (1 - self.p) if self.p < 1 else 0)


class Reorg(nn.Module):
    """[reorg3d]: each stride x stride block becomes one pixel with stride^2 times the channels.

    Output channel (dy * stride + dx) * channels + c is channel c of the block's pixel (dy, dx).
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        # (batch, channels, rows, dy, columns, dx)
        blocks: Tensor = x.unflatten(3, (-1, self.stride)).unflatten(2, (-1, self.stride))
        return blocks.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
