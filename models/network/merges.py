"""Layers that join several maps: sums, concatenations, products."""

import torch
from torch import Tensor, nn

from models.network.activations import ACTIVATIONS, NORMALISER_EPS


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
