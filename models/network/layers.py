"""Convolutions of a Darknet network, and the tensors that a .weights file holds per layer.

Every layer here, in merges.py and in pools.py takes the maps of its sources as positional
arguments, each (batch, channels, rows, columns), and returns one map. sections.py builds them from
a .cfg.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.activations import ACTIVATIONS
from models.network.merges import Shortcut
from models.network.pools import Blur


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
