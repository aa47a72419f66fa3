"""Activations, convolutions and layers that join maps, with Darknet's names and constants.

Every layer here and in pools.py takes the maps of its sources as positional arguments, each (batch,
channels, rows, columns), and returns one map. sections.py builds them from a .cfg.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pools import Blur

NORMALISER_EPS = 1e-4  # Darknet's; keeps channel normalisation finite if nothing is positive


class Functional(nn.Module):
    """An activation without parameters, from a function of tensors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def loggy(x: Tensor) -> Tensor:
    """Logistic stretched to -1..1."""
    return 2 * x.sigmoid() - 1


def ramp(x: Tensor) -> Tensor:
    """Rectifier with a tenth of the input added everywhere."""
    return x.relu() + 0.1 * x


def plse(x: Tensor) -> Tensor:
    """Piecewise linear approximation of the logistic function."""
    return torch.where(x < -4, 0.01 * (x + 4), torch.where(x > 4, 0.01 * (x - 4) + 1, 0.125 * x + 0.5))


def lhtan(x: Tensor) -> Tensor:
    """Identity in 0..1, a thousandth of the slope outside."""
    return torch.where(x < 0, 0.001 * x, torch.where(x > 1, 0.001 * (x - 1) + 1, x))


def stair(x: Tensor) -> Tensor:
    """Steps at even whole numbers, joined by slopes."""
    floor = x.floor()
    half = (x / 2).floor()
    return torch.where(floor % 2 == 0, half, x - floor + half)


def hard_mish(x: Tensor) -> Tensor:
    """Quadratic between -2 and 0, identity above, zero below."""
    return torch.where(x > 0, x, torch.where(x > -2, x * x / 2 + x, torch.zeros_like(x)))


def normalize_channels(x: Tensor) -> Tensor:
    """Positive values divided by their sum over the channels (dimension 1), zero elsewhere."""
    positive = x.relu()
    return positive / (positive.sum(1, keepdim=True) + NORMALISER_EPS)


def normalize_channels_softmax(x: Tensor) -> Tensor:
    """Exponentials divided by their sum over the channels (dimension 1)."""
    powers = x.exp()
    return powers / (powers.sum(1, keepdim=True) + NORMALISER_EPS)


def normalize_channels_softmax_maxval(x: Tensor) -> Tensor:
    """normalize_channels_softmax after subtracting the largest channel."""
    return normalize_channels_softmax(x - x.amax(1, keepdim=True))


POINTWISE = (loggy, ramp, plse, lhtan, stair, hard_mish)
OVER_CHANNELS = (normalize_channels, normalize_channels_softmax, normalize_channels_softmax_maxval)
# In-place where the output alone gives the gradient: backward then keeps one map fewer.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),  # Darknet's slope
    "revleaky": lambda: nn.LeakyReLU(0.1, inplace=True),  # only Darknet's gradient differs
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "logistic": nn.Sigmoid,
    "mish": nn.Mish,
    "swish": nn.SiLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "hardtan": nn.Hardtanh,
    "relie": lambda: nn.LeakyReLU(0.01, inplace=True),
    **{function.__name__: partial(Functional, function) for function in (*POINTWISE, *OVER_CHANNELS)},
}


class Convolution(nn.Module):
    """Convolution, batch normalisation (or the convolution's bias instead), activation.

    blur: a low-pass filter after the activation, which then has the stride in place of the
    convolution. xnor: kernels become their signs times each filter's mean magnitude, the input
    becomes its signs, and padding counts as -1, as in Darknet's inference (XNOR-Net, Rastegari et
    al. 2016).
    """

    def __init__(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, activation: str, blur: Blur | None, xnor: bool
    ) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm
        self.activation = ACTIVATIONS[activation]()
        self.blur = blur
        self.xnor = xnor

    def forward(self, x: Tensor) -> Tensor:
        x = self._binary(x) if self.xnor else self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        activated: Tensor = self.activation(x)
        return activated if self.blur is None else self.blur(activated)

    def _binary(self, x: Tensor) -> Tensor:
        conv = self.conv
        assert not isinstance(conv.padding, str)
        signs = F.pad(binary_signs(x), conv.padding * 2, value=-1.0)  # rows and columns have the same padding
        return F.conv2d(signs, binary_kernels(conv.weight), conv.bias, conv.stride, 0, conv.dilation, conv.groups)


class SharedConvolution(nn.Module):
    """A convolution with the weights and batch normalisation of another one (share_index).

    It has its own stride, padding, dilation and activation. The other layer is not a submodule, so
    its tensors appear once in parameters and state. A deep copy of the network refers to the copy.
    """

    def __init__(
        self, source: Convolution, stride: tuple[int, int], padding: int, dilation: int, activation: str
    ) -> None:
        super().__init__()
        self._source = [source]  # in a list, which torch does not search for submodules
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.activation = ACTIVATIONS[activation]()

    @property
    def source(self) -> Convolution:
        """The layer that owns the tensors."""
        return self._source[0]

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self.source.conv, self.source.norm
        x = F.conv2d(x, conv.weight, conv.bias, self.stride, self.padding, self.dilation, conv.groups)
        if norm is not None:
            x = norm(x)
        activated: Tensor = self.activation(x)
        return activated


class YoloMap(nn.Module):
    """The raw map of one [yolo] section: a view of its input, not decoded.

    (batch, anchors * (5 + classes), rows, columns) -> (batch, anchors, rows, columns, 5 + classes).
    The last dimension is x, y, w, h, objectness, classes; it is contiguous in channels_last memory.
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(1, (self.num_anchors, -1))
        return split.permute(0, 1, 3, 4, 2)


def stored_names(layer: nn.Module) -> tuple[str, ...]:
    """State dict names of the tensors that a .weights file holds for a layer, in its order."""
    if isinstance(layer, Shortcut):
        return ("weights",) if layer.weights is not None else ()
    if not isinstance(layer, Convolution):
        return ()
    if layer.norm is None:
        return "conv.bias", "conv.weight"
    return "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "conv.weight"


def binary_signs(x: Tensor) -> Tensor:
    """1 where x > 0, else -1. The gradient is 1 between -1 and 1, and 0 outside."""
    signs = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    passed = F.hardtanh(x)
    return passed + (signs - passed).detach()


def binary_kernels(weight: Tensor) -> Tensor:
    """Signs of kernels times each filter's mean magnitude. The gradient is the identity's."""
    magnitude = weight.abs().mean(dim=(1, 2, 3), keepdim=True)
    binary = torch.where(weight > 0, magnitude, -magnitude)
    return weight + (binary - weight).detach()


class Shortcut(nn.Module):
    """Sum of maps of one size, then an activation. The result has the channels of the first map.

    Only the channels that both maps have are added (partial residual networks, Wang et al. 2019).
    With weights_per_source > 0 each source has weights: one, or one for each channel of the first
    map. `weights` is (sources, weights_per_source), as Darknet stores it. normalization: "none", or
    "relu" or "softmax", which make the weights of all sources add up to about 1.
    """

    weights: nn.Parameter | None

    def __init__(self, activation: str, num_sources: int, weights_per_source: int, normalization: str) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(num_sources, weights_per_source)) if weights_per_source else None
        self.normalization = normalization
        self.activation = ACTIVATIONS[activation]()

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        sources = [first, *others]
        if self.weights is not None:
            factors = self._factors(self.weights)[:, None, :, None, None]  # (sources, 1, 1 or channels, 1, 1)
            total = first * factors[0]
        else:
            factors, total = None, first
        for index, other in enumerate(sources[1:], start=1):
            shared = min(total.shape[1], other.shape[1])
            added = other if other.shape[1] == shared else other[:, :shared]
            if factors is not None:
                added = added * factors[index][:, : factors.shape[2] if factors.shape[2] == 1 else shared]
            if shared == total.shape[1]:
                total = total + added
            else:
                total = torch.cat((total[:, :shared] + added, total[:, shared:]), dim=1)
        activated: Tensor = self.activation(total)
        return activated

    def _factors(self, weights: Tensor) -> Tensor:
        """The weights, normalised over the sources."""
        if self.normalization == "none":
            return weights
        shifted = weights - weights.amax(0, keepdim=True)
        parts = weights.relu() if self.normalization == "relu" else shifted.exp()
        return parts / (parts.sum(0, keepdim=True) + NORMALISER_EPS)


class Route(nn.Module):
    """Concatenate maps along the channels: of each, part `group` of `groups` equal parts."""

    def __init__(self, groups: int, group: int) -> None:
        super().__init__()
        self.groups = groups
        self.group = group

    def forward(self, *sources: Tensor) -> Tensor:
        if self.groups > 1:
            sources = tuple(source.chunk(self.groups, dim=1)[self.group] for source in sources)
        return sources[0] if len(sources) == 1 else torch.cat(sources, dim=1)


class Product(nn.Module):
    """Product of two maps, then an activation.

    [sam]: spatial attention. [scale_channels] (Hu et al. 2018): the first map has one row and
    column.
    """

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, factors: Tensor, x: Tensor) -> Tensor:
        activated: Tensor = self.activation(x * factors)
        return activated
