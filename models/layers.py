"""Activations and layers, with Darknet's names and constants.

Every layer takes the maps of its sources (batch, channels, rows, columns) and returns one.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]
# What makes the module, by name. In-place where the output alone gives the gradient: backward then
# keeps one map fewer.
ACTIVATIONS: dict[str, Callable[[], Activation]] = {
    "linear": nn.Identity,
    "leaky": partial(nn.LeakyReLU, 0.1, inplace=True),  # Darknet's slope
    "relu": partial(nn.ReLU, inplace=True),
    "relu6": partial(nn.ReLU6, inplace=True),
    "logistic": nn.Sigmoid,
    "mish": nn.Mish,
    "swish": nn.SiLU,
    "silu": nn.SiLU,  # the name outside of Darknet
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": partial(nn.GELU, approximate="tanh"),
    "tanh": nn.Tanh,
}


class Activated(nn.Module):
    """What ends in an activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()


class Convolution(Activated):
    """Convolution, batch normalisation (or the convolution's bias instead), activation.

    xnor: kernels become their signs times the mean magnitude of their filter, the input becomes its
    signs, and padding counts as -1, as in Darknet's inference (XNOR-Net, Rastegari et al. 2016).
    """

    # Takes the place of batch norm and activation in training: (map, norm, activation) -> map.
    # train_utils/sync_batchnorm.py may set it; modules and state dict stay as they are.
    fused_norm: Callable[[Tensor, nn.BatchNorm2d, Activation], Tensor] | None = None

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, activation: str, xnor: bool) -> None:
        super().__init__(activation)
        self.conv = conv
        self.norm = norm
        self.xnor = xnor

    def forward(self, x: Tensor) -> Tensor:
        return self.normalised(self._binary(x) if self.xnor else self.conv(x), self.activation)

    def normalised(self, x: Tensor, activation: Activation) -> Tensor:
        """`activation` of `x` after batch normalisation, if there is one."""
        norm = self.norm
        if norm is None:
            return activation(x)
        if self.fused_norm is not None and norm.training:
            return self.fused_norm(x, norm, activation)
        return activation(norm(x))

    def _binary(self, x: Tensor) -> Tensor:
        conv, weight = self.conv, self.conv.weight
        assert not isinstance(conv.padding, str)
        # The gradient of signs is 1 between -1 and 1, else 0; that of kernels is the identity's.
        signs, passed = torch.where(x > 0, 1.0, -1.0).to(x.dtype), F.hardtanh(x)
        signs = passed + (signs - passed).detach()
        magnitude = weight.abs().mean(dim=(1, 2, 3), keepdim=True)
        kernels = weight + (torch.where(weight > 0, magnitude, -magnitude) - weight).detach()
        signs = F.pad(signs, conv.padding * 2, value=-1.0)  # rows and columns have the same padding
        return F.conv2d(signs, kernels, conv.bias, conv.stride, dilation=conv.dilation)


class SharedConvolution(Activated):
    """A convolution with the weights and batch normalisation of another one (share_index).

    The other layer is not a submodule, so its tensors appear once in parameters and state. In a
    deep copy of the network both are copies.
    """

    source: Convolution  # the layer that owns the tensors

    def __init__(self, source: Convolution, stride: int, padding: int, dilation: int, activation: str) -> None:
        super().__init__(activation)
        self.__dict__["source"] = source  # an ordinary attribute would be a submodule
        self.stride = stride
        self.padding = padding
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        source = self.source
        weight, bias = source.conv.weight, source.conv.bias
        x = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, source.conv.groups)
        return source.normalised(x, self.activation)


class YoloMap(nn.Module):
    """The raw map of one [yolo] section: a view of its input, not decoded.

    (batch, anchors * (5 + classes), rows, columns) -> (batch, anchors, rows, columns, 5 + classes).
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(1, (self.num_anchors, -1))
        return split.permute(0, 1, 3, 4, 2)


class Shortcut(Activated):
    """Sum of maps of one size, then an activation. The result has the channels of the first map.

    Only the channels that both maps have are added (partial residual networks, Wang et al. 2019).
    """

    def forward(self, total: Tensor, *others: Tensor) -> Tensor:
        channels = total.shape[1]
        for other in others:
            shared = other.shape[1]
            if shared < channels:
                total = torch.cat((total[:, :shared] + other, total[:, shared:]), 1)
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
            sources = tuple(source.chunk(self.groups, 1)[self.group] for source in sources)
        return sources[0] if len(sources) == 1 else torch.cat(sources, 1)


class Product(Activated):
    """Product of two maps, then an activation; for [scale_channels] the first map is 1x1."""

    def forward(self, factors: Tensor, x: Tensor) -> Tensor:
        return self.activation(x * factors)


class MaxPool(nn.Module):
    """Max pooling with Darknet's padding: `padding` rows in all, padding // 2 of them before.

    Rows and columns are multiples of the stride, so windows reach only `size - stride - padding //
    2` past the far edge. Only that is padded: 2x2/2 pooling, the most frequent, needs no copy.
    """

    def __init__(self, size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.size = size
        self.stride = stride
        self.before = padding // 2
        self.after = max(0, size - stride - self.before)

    def forward(self, x: Tensor) -> Tensor:
        if self.after == self.before and 2 * self.before <= self.size:
            return F.max_pool2d(x, self.size, self.stride, self.before)
        padded = F.pad(x, (self.before, self.after) * 2, value=float("-inf"))
        return F.max_pool2d(padded, self.size, self.stride)


class Dropout(nn.Dropout):
    """[dropout]: single values become 0 in training, the others 1 / (1 - p) times as large.

    Each rank draws for the whole micro-batch and takes its own images, so that an image has the
    same zeros on any number of ranks. `place`: this rank, their number, how many images in turn.
    """

    place = 0, 1, 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        rank, ranks, unit = self.place
        turns = -(-len(x) // unit)
        shape = turns, ranks, unit, *x.shape[1:]
        drawn = torch.empty(shape, dtype=torch.bool, device=x.device)
        kept = drawn.bernoulli_(1 - self.p)[:, rank].flatten(0, 1)[: len(x)]
        scale = 1 / (1 - self.p) if self.p < 1 else 0
        return x * kept * scale


class Reorg(nn.Module):
    """[reorg3d]: each stride x stride block becomes one pixel with stride^2 times the channels.

    Output channel (dy * stride + dx) * channels + c is channel c of the block's pixel (dy, dx).
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        blocks: Tensor = F.pixel_unshuffle(x, self.stride).unflatten(1, (x.shape[1], -1))
        return blocks.transpose(1, 2).flatten(1, 2)
