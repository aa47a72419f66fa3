"""Sums, concatenations and products of maps against loops over their channels."""

import numpy as np
import pytest
import torch

from models.layers import Product, Route, Shortcut, stored_names


@pytest.mark.parametrize("channels", [(4, 4), (4, 2), (4, 6), (4, 1, 6)])
def test_shortcut_adds_the_channels_that_both_have(channels: tuple[int, ...]) -> None:
    sources = [torch.randn(2, count, 3, 5) for count in channels]
    expected = sources[0].numpy().copy()
    for source in sources[1:]:
        for channel in range(min(channels[0], source.shape[1])):
            expected[:, channel] += source[:, channel].numpy()
    before = [source.clone() for source in sources]
    out = Shortcut("leaky", len(sources), 0, "none")(*sources)
    torch.testing.assert_close(out, torch.from_numpy(np.where(expected > 0, expected, 0.1 * expected)))
    assert all(source.equal(old) for source, old in zip(sources, before, strict=True))


@pytest.mark.parametrize("normalization", ["none", "relu", "softmax"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_weighted_shortcut(normalization: str, per_channel: bool) -> None:
    sources = [torch.randn(2, count, 3, 2, dtype=torch.float64) for count in (4, 4, 2, 6)]
    module = Shortcut("linear", 4, 4 if per_channel else 1, normalization).double()
    assert stored_names(module) == ("weights",)
    with torch.no_grad():
        module.weights.copy_(torch.randn(module.weights.shape))
    weights = module.weights.detach().numpy()
    expected = np.zeros(sources[0].shape)
    for channel in range(4):
        column = weights[:, channel if per_channel else 0]
        if normalization == "relu":
            column = np.maximum(column, 0) / (1e-4 + np.maximum(column, 0).sum())
        elif normalization == "softmax":
            column = np.exp(column - column.max()) / (1e-4 + np.exp(column - column.max()).sum())
        for weight, source in zip(column, sources, strict=True):
            if channel < source.shape[1]:
                expected[:, channel] += weight * source[:, channel].numpy()
    torch.testing.assert_close(module(*sources).detach(), torch.from_numpy(expected))
    module(*sources).square().sum().backward()
    assert module.weights.grad.abs().sum() > 0


def test_route_joins_a_group_of_each_source() -> None:
    first, second = torch.randn(1, 4, 2, 2), torch.randn(1, 6, 2, 2)
    assert Route(2, 1)(first, second).equal(torch.cat((first[:, 2:], second[:, 3:]), 1))
    assert Route(2, 0)(second).equal(second[:, :3])
    assert Route(1, 0)(second, first, second).equal(torch.cat((second, first, second), 1))
    assert Route(1, 0)(first) is first


def test_product_of_maps_and_of_channels() -> None:
    x, attention, factors = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 1, 1)
    for first in (attention, factors):
        expected = np.zeros(x.shape)
        for index in np.ndindex(*x.shape):
            value = float(x[index]) * float(first[index if first is attention else (*index[:2], 0, 0)])
            expected[index] = max(value, 0)
        torch.testing.assert_close(Product("relu")(first, x).double(), torch.from_numpy(expected))
