"""Convolutions of a Darknet network, and which of a layer's tensors a .weights file holds.

Every layer, here and in merges.py and pools.py, takes the maps of its sources as positional arguments, each (batch,
channels, rows, columns), and returns one map; graph.py makes them from the sections of a .cfg.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.activations import ACTIVATIONS
from models.network.merges import Shortcut
from models.network.pools import Blur


class Convolution(nn.Module):
    """Convolution, batch normalisation (or a bias in its place), activation.

    stride: (rows, columns). xnor: kernels are replaced by their signs times the mean magnitude of each filter, the
    input by its signs, and the padding counts as -1, as in Darknet's inference (XNOR-Net, Rastegari et al. 2016).
    blur: size of a low-pass filter (2 or 3) behind the activation, which then thins the map out in place of the
    convolution; None for none.
    """

    def __init__(
        self,
        in_channels: int,
        filters: int,
        size: int,
        stride: tuple[int, int],
        padding: int,
        dilation: int,
        groups: int,
        batch_norm: bool,
        activation: str,
        bn_eps: float,
        bn_momentum: float,
        xnor: bool = False,
        blur: int | None = None,
    ) -> None:
        super().__init__()
        step = stride if blur is None else (1, 1)
        self.conv = nn.Conv2d(in_channels, filters, size, step, padding, dilation, groups, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(filters, bn_eps, bn_momentum) if batch_norm else None
        self.activation = ACTIVATIONS[activation]()
        self.blur = Blur(blur, stride) if blur is not None else None
        self.xnor = xnor
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        x = self._binary(x) if self.xnor else self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        activated: Tensor = self.activation(x)
        return activated if self.blur is None else self.blur(activated)

    def _binary(self, x: Tensor) -> Tensor:
        conv = self.conv
        signs = F.pad(binary_signs(x), (self.padding,) * 4, value=-1.0)
        return F.conv2d(signs, binary_kernels(conv.weight), conv.bias, conv.stride, 0, conv.dilation, conv.groups)


class SharedConvolution(nn.Module):
    """A convolution with the kernels, biases and batch normalisation of another one (Darknet's share_index).

    Its stride, padding, dilation and activation are its own. The other layer is no submodule, so that its tensors
    appear once among parameters and state; a deep copy of the network refers to the copied layer.
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


def stored_names(layer: nn.Module) -> tuple[str, ...]:
    """Names in the layer's state dict of the tensors that a .weights file holds for it, in Darknet's order."""
    if isinstance(layer, Shortcut):
        return ("weights",) if layer.weights is not None else ()
    if not isinstance(layer, Convolution):
        return ()
    if layer.norm is None:
        return "conv.bias", "conv.weight"
    return "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "conv.weight"


def binary_signs(x: Tensor) -> Tensor:
    """1 where x > 0, else -1; the gradient is that of the identity between -1 and 1, and 0 outside."""
    signs = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    passed = F.hardtanh(x)
    return passed + (signs - passed).detach()


def binary_kernels(weight: Tensor) -> Tensor:
    """Kernels (filters, channels, rows, columns) as signs times each filter's mean magnitude; the gradient is that of
    the identity."""
    magnitude = weight.abs().mean(dim=(1, 2, 3), keepdim=True)
    binary = torch.where(weight > 0, magnitude, -magnitude)
    return weight + (binary - weight).detach()
