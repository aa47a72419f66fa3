"""Batch norm with statistics over all ranks, on CUDA: one exchange in each pass, no wait.

torch's SyncBatchNorm picks ranks by a boolean mask, so in each layer the host waits for the device,
and torch.compile breaks its graph there. Here the device never reports to the host. Each rank
computes its own mean and variance in one pass over the map; they are merged as sums of values and
squares. Such sums lose digits in float32 where a mean is large. Subtracting a common value first
would need one more exchange, as running means start at 0; float64 for 2 * channels numbers costs
nothing. Formulas: Ioffe & Szegedy 2015.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from train_utils.loop.interfaces import SumOverRanks
from train_utils.parallel.sync_batchnorm import POSITIONS, Statistics, SyncedBatchNorm2d


class ReducedBatchNorm2d(SyncedBatchNorm2d):
    """nn.BatchNorm2d with training statistics over all ranks, summed by ``sum_over_ranks``.

    Ranks may have different numbers of images and sizes. Forward and backward each call
    ``sum_over_ranks`` once, so all ranks must run both in the same order. Input is of any float
    dtype, with parameters of float32 or more; its dtype and memory format are kept.
    """

    def __init__(self, norm: nn.BatchNorm2d, sum_over_ranks: SumOverRanks) -> None:
        super().__init__(norm)
        self.sum_over_ranks = sum_over_ranks

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, rows, columns); update running statistics as torch does."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        statistics = self._statistics(input.detach())
        self._follow(statistics)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, *statistics, self.eps, self.sum_over_ranks)
        return normalised

    @torch.no_grad()
    def _statistics(self, x: Tensor) -> Statistics:
        """Statistics of all ranks; ``elements`` is a tensor, which the host need not know."""
        mean, variance = (part.double() for part in _moments(x, self.weight.dtype))
        values = torch.cat((mean, variance + mean.square(), mean.new_ones(1)))
        total = self.sum_over_ranks(values * (x.numel() // x.shape[1]))
        mean, square = (total[:-1] / total[-1]).chunk(2)
        return Statistics(mean, (square - mean.square()).clamp(min=0), total[-1])


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, (channels,) in ``dtype``."""
    if x.is_cuda and not torch.compiler.is_compiling():  # reads bfloat16 without a float32 copy of the map
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        variance, mean = torch.var_mean(x.to(dtype), (0, *POSITIONS), correction=0)
    return mean, variance


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias; gradients pass the statistics too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        elements: Tensor,
        eps: float,
        sum_over_ranks: SumOverRanks,
    ) -> Tensor:
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
        ctx.save_for_backward(x, weight, mean, variance, elements)
        ctx.eps, ctx.sum_over_ranks = eps, sum_over_ranks
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, elements = ctx.saved_tensors
        by_channel = x.is_contiguous(memory_format=torch.channels_last)
        grad = grad.contiguous(memory_format=torch.channels_last if by_channel else torch.contiguous_format)
        # As if the statistics were constants: the sums of grad * normalised x, and of grad.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        averages = ctx.sum_over_ranks(torch.cat((grad_weight, grad_bias))) / elements.to(weight.dtype)
        of_weight, of_bias = averages.chunk(2)
        grad_x = _grad_of_input(grad, x, weight, mean, (variance + ctx.eps).rsqrt(), of_weight, of_bias)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _grad_of_input(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, of_weight: Tensor, of_bias: Tensor
) -> Tensor:
    """The gradient weight * scale * (grad - of_bias - (x - mean) * scale * of_weight)."""
    if x.is_cuda and not torch.compiler.is_compiling():  # one kernel, which divides sums by their number: here 1
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        found: Tensor = torch.batch_norm_backward_elemt(grad, x, mean, scale, weight, of_bias, of_weight / scale, one)
        return found
    mean, of_bias, slope, factor = (
        vector.view(1, -1, 1, 1) for vector in (mean, of_bias, scale * of_weight, weight * scale)
    )
    return ((grad - of_bias - (x - mean) * slope) * factor).to(x.dtype)
