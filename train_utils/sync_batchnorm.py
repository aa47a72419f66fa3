"""Batch normalisation with the statistics of the micro-batches of all processes, for devices without a kernel for it.

torch has nn.SyncBatchNorm on CUDA only. The formulas are those of Ioffe & Szegedy 2015 with sums over the images and
positions of all ranks. Each image is summed by itself, and the images are merged in their order in the global
micro-batch, of which each rank holds every so manieth: so all ranks hold the same statistics to the last bit, and the
same as one process with all images would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Stack = Callable[[Tensor], Tensor]  # a tensor of one shape on all ranks -> (ranks, *shape), the same on all ranks


class Sums(Protocol):
    """Where gradients go that are summed elsewhere: see image_sums.GradientSums."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradient of some images: (images, *the parameter's shape)."""


POSITIONS = (2, 3)  # of (batch, channels, rows, columns)


class Statistics(NamedTuple):
    """Of a map (batch, channels, rows, columns), over all ranks."""

    mean: Tensor  # (channels,) float64
    variance: Tensor  # (channels,) float64, biased
    elements: float  # of a channel


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d whose training statistics are those of the maps of all ranks, as many on each; sizes may differ.

    Takes over the parameters, statistics and mode of ``norm``, and has its state dict. In evaluation it is plain
    batch normalisation. Forward and backward each call ``stack_over_ranks`` once, so all ranks must run both, in the
    same order. Input of float32, float64 or, beside float32 parameters, bfloat16; its memory format is kept. Where
    ``sums`` is set, the gradients of weight and bias go there and not to their ``.grad``.
    """

    def __init__(self, norm: nn.BatchNorm2d, stack_over_ranks: Stack) -> None:
        if not (norm.affine and norm.track_running_stats and norm.momentum is not None):
            raise ValueError(f"this needs a batch norm with weights, running statistics and momentum, got {norm}")
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.training = norm.training
        self.stack_over_ranks = stack_over_ranks
        self.sums: Sums | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, rows, columns); in training the running statistics move as in torch."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        stack = self.stack_over_ranks
        statistics = global_statistics(input.detach(), self.weight.detach(), stack)
        self._follow(statistics)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, statistics, self)
        return normalised

    @torch.no_grad()
    def _follow(self, statistics: Statistics) -> None:
        """Move the running statistics, of which the variance is the unbiased one."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        unbiased = statistics.variance * (statistics.elements / (statistics.elements - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            running.copy_(running.double().lerp(new, self.momentum))
        self.num_batches_tracked.add_(1)


def global_statistics(x: Tensor, like: Tensor, stack_over_ranks: Stack) -> Statistics:
    """Mean and variance of x (batch, channels, rows, columns) over all ranks.

    Merged by the formula of Chan et al. 1979, which loses no digits where the mean is large. ``like``: a tensor
    (channels,) in the format of the parameters. Raises ValueError where all ranks together have one value a channel.
    """
    # Image by image in the format of the parameters, over images in float64: then the dealing of images to ranks has no
    # say in the statistics.
    per_image = x.numel() // (x.shape[0] * x.shape[1])
    means = x.sum(POSITIONS, dtype=like.dtype, keepdim=True) / per_image
    centred = x - means
    means = means.flatten(1).double()
    shifts = centred.sum(POSITIONS).double() / per_image  # what rounding left of the means
    squares = centred.square_().sum(POSITIONS).double() - per_image * shifts.square()
    means += shifts
    parts = torch.stack((means, squares, torch.full_like(means, per_image)), dim=1)
    means, squares, counts = _in_order(stack_over_ranks(parts)).unbind(1)  # (images, channels) each
    total = float(counts[:, 0].sum())
    if total <= 1:
        raise ValueError(f"batch norm needs more than one value for each channel over all ranks, got {tuple(x.shape)}")
    mean = (means * counts).sum(0) / total
    squares = (squares + counts * (means - mean).square()).sum(0)
    return Statistics(mean, squares / total, total)


def _in_order(stacked: Tensor) -> Tensor:
    """(ranks, images, ...) as (ranks * images, ...) in the order of the global micro-batch."""
    return stacked.transpose(0, 1).flatten(0, 1)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias, with the gradient that also flows through the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics, layer: GlobalBatchNorm2d
    ) -> Tensor:
        mean, variance = statistics.mean.to(weight.dtype), statistics.variance.to(weight.dtype)
        ctx.save_for_backward(x, weight, mean, (variance + layer.eps).rsqrt())
        ctx.elements, ctx.layer = statistics.elements, layer
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        layer: GlobalBatchNorm2d = ctx.layer
        centred = x - mean.view(1, -1, 1, 1)
        parts = torch.stack(  # (images, 2, channels)
            (
                centred.mul_(grad).sum(POSITIONS).double() * scale.double(),
                grad.sum(POSITIONS, dtype=weight.dtype).double(),
            ),
            dim=1,
        )
        grad_weight = grad_bias = None
        if layer.sums is not None:
            for parameter, gradient in zip((layer.weight, layer.bias), parts.unbind(1), strict=True):
                if parameter.requires_grad:
                    layer.sums.add(parameter, gradient)
        else:
            grad_weight, grad_bias = parts.sum(0).to(weight.dtype)
        of_weight, of_bias = _in_order(layer.stack_over_ranks(parts)).sum(0) / ctx.elements
        # d loss / dx = factor * (grad - of_bias - (x - mean) * scale * of_weight) as grad * a + x * b + c
        factor, scale64 = (weight * scale).double(), scale.double()
        a, b = factor, -factor * scale64 * of_weight
        c = -factor * of_bias - b * mean.double()
        a, b, c = (vector.to(weight.dtype).view(1, -1, 1, 1) for vector in (a, b, c))
        grad_x = torch.addcmul(c, x, b, out=torch.empty_like(x, dtype=weight.dtype)).addcmul_(grad, a)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None
