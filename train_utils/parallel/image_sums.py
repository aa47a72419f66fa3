"""Gradients on a CPU that do not depend on the order in which images are summed.

Two ranks with four images each round differently from one rank with eight, and a deep network
amplifies the difference (docs/results/). Here every image passes through the network and the loss
alone (by_image.py). Its gradients are rounded to multiples of one small number and summed in
float64, where such sums are exact. The update then has the same bits at any number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from train_utils.loop.interfaces import Loss, LossParts, SumOverRanks
from train_utils.parallel.by_image import Images
from train_utils.parallel.sync_batchnorm import GlobalBatchNorm2d

# Gradients are rounded to multiples of 4e-12, too small to matter for a float32 weight. Sums are
# exact up to 2**53 multiples, 32,768; above, they round like any sum.
QUANTUM = 2.0**-38
EXACT_BELOW = 2.0**53 * QUANTUM
EXCHANGED = 2**20  # values in one exchange, 8 MiB
ROUNDER = 1.5 * 2**52 * QUANTUM  # adding and subtracting it rounds to a multiple of QUANTUM


class GradientSums:
    """The summed float64 gradients of one step, by parameter."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradients of some images: (images, *parameter shape)."""
        gradient = (gradient.double() + ROUNDER) - ROUNDER
        total = gradient[0] if len(gradient) == 1 else gradient.sum(0)
        if parameter in self._sums:
            self._sums[parameter] += total
        else:
            self._sums[parameter] = total

    def take(self, parameter: Tensor, alias: Tensor) -> None:
        """Add the gradient of one image, left by autograd in the parameter's ``alias``."""
        assert alias.grad is not None
        self.add(parameter, alias.grad[None])
        alias.grad = None

    def finish(self, model: nn.Module, sum_over_ranks: SumOverRanks) -> None:
        """Sum over all ranks and store the result in ``.grad`` of each trainable parameter.

        All ranks must call this together. A layer that was not used on this rank adds zero.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for group in _groups(trained):
            totals = sum_over_ranks(torch.cat([self._total(parameter).flatten() for parameter in group]))
            for parameter, total in zip(group, totals.split([p.numel() for p in group]), strict=True):
                assert parameter.grad is None, "this gradient went past the sums"
                parameter.grad = torch.empty_like(parameter)  # keeps the memory format
                parameter.grad.copy_(total.view(parameter.shape))
            if EXACT_BELOW <= (largest := float(totals.abs().max())) < math.inf:
                warnings.warn(
                    f"train.deterministic: a gradient of {largest:.3g} is not below {EXACT_BELOW:g}, so its sum is"
                    " rounded, and the last bits may differ with another number of ranks. fix: a lower weight of"
                    " the loss",
                    stacklevel=2,
                )

    def _total(self, parameter: nn.Parameter) -> Tensor:
        total = self._sums.pop(parameter, None)
        return torch.zeros(parameter.shape, dtype=torch.float64) if total is None else total

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSums:
        return GradientSums()  # a copied model has its own parameters


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split the parameters, in order, into groups large enough for one exchange."""
    group: list[nn.Parameter] = []
    for parameter in parameters:
        group.append(parameter)
        if sum(member.numel() for member in group) >= EXCHANGED:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def _one_of_each_parameter_for_each_image(
    model: nn.Module, sums: GradientSums, random_states: list[Tensor]
) -> Iterator[None]:
    """Replace trainable parameters by one alias per image, whose gradients go to ``sums``."""
    aliases: dict[Tensor, Images] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d) and module.training:
            continue  # it adds to the sums itself
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter not in aliases:
                each = [parameter.detach().requires_grad_() for _ in random_states]
                for alias in each:
                    alias.register_post_accumulate_grad_hook(partial(sums.take, parameter))
                aliases[parameter] = Images(each, random_states)
            replaced.append((module._parameters, name, parameter))
    try:
        for owner, name, trained in replaced:
            owner[name] = aliases[trained]
        yield
    finally:
        for owner, name, trained in replaced:
            owner[name] = trained


class ImageSummed(nn.Module):
    """Replaces DistributedDataParallel: computes image by image, with exact gradient sums.

    Each rank calls backward on its share of the loss; shares are summed, not averaged. Layers such
    as dropout draw an image's numbers from ``seed``, the step and its position in the data set.
    """

    def __init__(self, module: nn.Module, sum_over_ranks: SumOverRanks, seed: int) -> None:
        super().__init__()
        self.module = module
        self.sums = GradientSums()
        self.sum_over_ranks = sum_over_ranks
        self.seed = seed
        self.step = 0
        self.indices: Sequence[int] = ()
        for layer in module.modules():
            assert isinstance(layer, GlobalBatchNorm2d) or not (
                isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training
            ), f"{layer} has statistics of its own on each process"
            if isinstance(layer, GlobalBatchNorm2d):
                layer.sums = self.sums

    def begin(self, step: int, indices: Sequence[int]) -> None:
        """Set the step and the data-set positions of the next micro-batch's images."""
        self.step, self.indices = step, indices

    def forward(self, images: Tensor) -> list[Images]:
        """The module's raw maps for (batch, channels, height, width)."""
        states = [self._random_state(index) for index in self.indices or range(len(images))]
        outside = torch.default_generator.get_state()
        with _one_of_each_parameter_for_each_image(self.module, self.sums, states):
            maps: list[Images] = self.module(Images(images.split(1), states))
        assert torch.equal(torch.default_generator.get_state(), outside), "a layer drew numbers for all images at once"
        return maps

    def finish(self) -> None:
        """Store the gradients of the step; call after its last backward pass."""
        self.sums.finish(self.module, self.sum_over_ranks)

    def _random_state(self, index: int) -> Tensor:
        entropy = np.random.SeedSequence([self.seed, self.step, index]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0])).get_state()


class SummedParts(NamedTuple):
    """The parts of a loss, summed over images; see interfaces.LossParts."""

    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor


class ImagewiseLoss:
    """Calls a loss once for each image, as if each image were a rank; its shares add up."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(
        self,
        raw_maps: Sequence[Any],
        targets: Tensor,
        *,
        objectness_ratio: float,
        sum_over_ranks: SumOverRanks,
        world_size: int,
    ) -> LossParts:
        """The parts of the loss, summed over the images of this rank; ``raw_maps`` are Images."""
        count = len(raw_maps[0].each)
        counted: list[Tensor] = []

        def of_images(sum_over_images: SumOverRanks) -> list[LossParts]:
            return [
                self.loss(
                    [maps.each[image] for maps in raw_maps],
                    _targets_of(targets, image),
                    objectness_ratio=objectness_ratio,
                    sum_over_ranks=sum_over_images,
                    world_size=world_size * count,
                )
                for image in range(count)
            ]

        def note(tensor: Tensor) -> Tensor:
            counted.append(tensor)
            return tensor

        with torch.no_grad():
            of_images(note)  # collects what each image would sum over ranks
        total = sum_over_ranks(torch.stack(counted).sum(0))
        parts = of_images(lambda _: total)
        return SummedParts(*(torch.stack(summands).sum() for summands in zip(*parts, strict=True)))


def _targets_of(targets: Tensor, image: int) -> Tensor:
    """The target rows (t, 6) of one image, renumbered as a batch of one."""
    rows = targets[targets[:, 0] == image]
    rows[:, 0] = 0
    return rows
