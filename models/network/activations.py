"""The activation functions that a .cfg can name, with Darknet's names and constants."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

NORMALISER_EPS = 1e-4  # Darknet's; keeps channel normalisation finite if nothing is positive


class Functional(nn.Module):
    """An activation without parameters, from a function of tensors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.function.__name__


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
