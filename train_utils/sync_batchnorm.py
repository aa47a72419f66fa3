"""Batch normalisation with the statistics of the micro-batches of all processes, for devices without a kernel for it.

torch has nn.SyncBatchNorm on CUDA only. The formulas are those of Ioffe & Szegedy 2015 with sums over the images and
positions of all ranks; each rank sums its part by torch's own kernels, and the parts are merged in the order of the
ranks, so that all ranks hold the same statistics to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Stack = Callable[[Tensor], Tensor]  # a tensor of one shape on all ranks -> (ranks, *shape), the same on all ranks


POSITIONS = (2, 3)  # of (batch, channels, rows, columns)


class Statistics(NamedTuple):
    """Of a map (batch, channels, rows, columns), over all ranks."""

    mean: Tensor  # (channels,) float64
    variance: Tensor  # (channels,) float64, biased
    elements: float  # of a channel


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d whose training statistics are those of the maps of all ranks, which may differ in batch and size.

    Takes over the parameters, statistics and mode of ``norm``, and has its state dict. In evaluation it is plain
    batch normalisation. Forward and backward each call ``stack_over_ranks`` once, so all ranks must run both, in the
    same order. Input of float32, float64 or, beside float32 parameters, bfloat16; its memory format is kept.
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

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, rows, columns); in training the running statistics move as in torch."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        stack = self.stack_over_ranks
        statistics = global_statistics(input.detach(), self.weight.detach(), stack)
        self._follow(statistics)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, statistics, self.eps, stack)
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
    # say in the statistics but in digits that float32 does not have.
    per_image = x.numel() // (x.shape[0] * x.shape[1])
    image_means = x.sum(POSITIONS, dtype=like.dtype, keepdim=True) / per_image
    centred = x - image_means
    image_means = image_means.flatten(1).double()
    shifts = centred.sum(POSITIONS).double() / per_image  # what rounding left of the means
    squares = centred.square_().sum(POSITIONS).double() - per_image * shifts.square()
    image_means += shifts
    mean = image_means.mean(0)
    squares = squares.sum(0) + per_image * (image_means - mean).square().sum(0)
    count = torch.full_like(mean, per_image * x.shape[0])
    means, variances, counts = stack_over_ranks(torch.stack((mean, squares / count, count))).unbind(1)
    total = float(counts[:, 0].sum())
    if total <= 1:
        raise ValueError(f"batch norm needs more than one value for each channel over all ranks, got {tuple(x.shape)}")
    global_mean = (means * counts).sum(0) / total
    squares = ((variances + (means - global_mean).square()) * counts).sum(0)
    return Statistics(global_mean, squares / total, total)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias, with the gradient that also flows through the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics, eps: float, stack_over_ranks: Stack
    ) -> Tensor:
        mean, variance = statistics.mean.to(weight.dtype), statistics.variance.to(weight.dtype)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.eps, ctx.elements, ctx.stack_over_ranks = eps, statistics.elements, stack_over_ranks
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        centred = x - mean.view(1, -1, 1, 1)
        parts = torch.stack(
            (
                centred.mul_(grad).sum(POSITIONS).double().sum(0) * scale.double(),
                grad.sum(POSITIONS, dtype=weight.dtype).double().sum(0),
            )
        )
        grad_weight, grad_bias = parts.to(weight.dtype)
        of_weight, of_bias = ctx.stack_over_ranks(parts).sum(0) / ctx.elements
        # d loss / dx = factor * (grad - of_bias - (x - mean) * scale * of_weight) as grad * a + x * b + c
        factor, scale64 = (weight * scale).double(), scale.double()
        a, b = factor, -factor * scale64 * of_weight
        c = -factor * of_bias - b * mean.double()
        a, b, c = (vector.to(weight.dtype).view(1, -1, 1, 1) for vector in (a, b, c))
        grad_x = torch.addcmul(c, x, b, out=torch.empty_like(x, dtype=weight.dtype)).addcmul_(grad, a)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None
