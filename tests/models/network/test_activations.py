"""Activations against Darknet's formulas, number by number."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from models.layers import ACTIVATIONS


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return x if x > 20 else math.exp(x) if x < -20 else math.log1p(math.exp(x))


def stair(x: float) -> float:
    n = math.floor(x)
    return math.floor(x / 2) if n % 2 == 0 else (x - n) + math.floor(x / 2)


# Darknet's activations.h, with its constants.
FORMULAS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "leaky": lambda x: x if x > 0 else 0.1 * x,
    "revleaky": lambda x: x if x > 0 else 0.1 * x,
    "relu": lambda x: max(x, 0),
    "relu6": lambda x: min(max(x, 0), 6),
    "logistic": logistic,
    "loggy": lambda x: 2 / (1 + math.exp(-x)) - 1,
    "mish": lambda x: x * math.tanh(softplus(x)),
    "swish": lambda x: x * logistic(x),
    "hard_mish": lambda x: x if x > 0 else x * x / 2 + x if x > -2 else 0,
    "elu": lambda x: x if x >= 0 else math.exp(x) - 1,
    "selu": lambda x: 1.0507 * x if x >= 0 else 1.0507 * 1.6732 * (math.exp(x) - 1),
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(0.797885 * x + 0.035677 * x**3)),
    "tanh": math.tanh,
    "hardtan": lambda x: max(-1, min(1, x)),
    "relie": lambda x: x if x > 0 else 0.01 * x,
    "ramp": lambda x: x * (x > 0) + 0.1 * x,
    "plse": lambda x: 0.01 * (x + 4) if x < -4 else 0.01 * (x - 4) + 1 if x > 4 else 0.125 * x + 0.5,
    "lhtan": lambda x: 0.001 * x if x < 0 else 0.001 * (x - 1) + 1 if x > 1 else x,
    "stair": stair,
}
OVER_CHANNELS = {"normalize_channels", "normalize_channels_softmax", "normalize_channels_softmax_maxval"}


def test_every_activation_has_a_formula_here() -> None:
    assert FORMULAS.keys() | OVER_CHANNELS == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_equals_darknets_formula(name: str) -> None:
    x = torch.cat((torch.arange(-30.0, 30.5, 0.5), torch.randn(400) * 4))
    expected = torch.tensor([FORMULAS[name](value) for value in x.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name]()(x.clone()).double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_of_an_activation_is_that_of_its_values(name: str) -> None:
    x = (torch.randn(60, dtype=torch.float64) * 3).requires_grad_()  # no draw is near a kink
    activation = ACTIVATIONS[name]()
    assert torch.autograd.gradcheck(lambda value: activation(value * 1), x)  # * 1: some work in place


@pytest.mark.parametrize("name", sorted(OVER_CHANNELS))
def test_normalisation_over_channels(name: str) -> None:
    x = torch.randn(2, 5, 3, 2)
    x[0, :, 0, 0] = -1.0  # nothing positive
    expected = np.zeros(x.shape)
    for batch, row, column in np.ndindex(2, 3, 2):
        values = x[batch, :, row, column].double().numpy()
        if name == "normalize_channels":
            parts = np.maximum(values, 0)
        else:
            parts = np.exp(values - values.max() if name.endswith("maxval") else values)
        expected[batch, :, row, column] = parts / (1e-4 + parts.sum())
    torch.testing.assert_close(ACTIVATIONS[name]()(x).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-7)
