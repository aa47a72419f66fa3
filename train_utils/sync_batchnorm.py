"""Batch norm with statistics over all ranks; its own on CPUs, where torch has no SyncBatchNorm.

Each rank computes its own mean and variance; they are merged as sums of values and squares, in
float64, since such sums lose digits where a mean is large. Formulas: Ioffe & Szegedy 2015.
"""

from typing import Any

import torch
from torch import Tensor, nn

from train_utils.distributed import World, sum_over_ranks


class ReducedBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d with training statistics over all ranks; in evaluation it is plain.

    Takes over the parameters, statistics, mode and state dict of ``norm``. Ranks may have different
    numbers of images and sizes. Forward and backward each exchange one tensor, so all ranks must
    run both in the same order. Input is of any float dtype, with parameters of float32 or more; its
    dtype and memory format are kept. Raises ValueError if all ranks together have a single value in
    each channel.
    """

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.training = norm.training

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, rows, columns); update running statistics as torch does."""
        if not self.training:
            return super().forward(input)
        mean, variance, elements = _statistics(input.detach(), self.weight.dtype)
        if not torch.compiler.is_compiling() and elements <= 1:
            raise ValueError(f"batch norm needs more than one value for each channel, got {tuple(input.shape)}")
        with torch.no_grad():
            unbiased = variance * (elements / (elements - 1))
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                assert running is not None and self.momentum is not None
                running.copy_(running.double().lerp(new, self.momentum))
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, mean, variance, elements, self.eps)
        return normalised


@torch.no_grad()
def _statistics(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, float64, and the values in each.

    ``dtype`` is that of the parameters.
    """
    x, count = x.to(dtype), x.numel() // x.shape[1]
    # In two passes: torch.var_mean has one thread for each channel, and takes eight times as long.
    rough = x.sum((0, 2, 3)) / count
    centred = _scaled(x, torch.ones_like(rough), -rough)
    shift = centred.sum((0, 2, 3)).double() / count  # the rounding error of the first pass
    square = centred.square_().sum((0, 2, 3)).double() / count
    mean, variance = rough.double() + shift, square - shift.square()
    values = torch.cat((mean, variance + mean.square(), mean.new_ones(1)))
    total = sum_over_ranks(values * count)
    mean, square = (total[:-1] / total[-1]).chunk(2)
    return mean, (square - mean.square()).clamp(min=0), total[-1]


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias; gradients pass the statistics too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, elements: Tensor, eps: float
    ) -> Tensor:
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
        ctx.save_for_backward(x, weight, mean, variance, elements)
        ctx.eps = eps
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, elements = ctx.saved_tensors
        by_channel = x.is_contiguous(memory_format=torch.channels_last)
        grad = grad.contiguous(memory_format=torch.channels_last if by_channel else torch.contiguous_format)
        # As if the statistics were constants: the sums of grad * normalised x, and of grad.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        of_weight, of_bias = (sum_over_ranks(torch.cat((grad_weight, grad_bias))) / elements.to(weight.dtype)).chunk(2)
        scale = (variance + ctx.eps).rsqrt()
        # d loss / dx = weight * scale * (grad - of_bias - (x - mean) * scale * of_weight)
        factor = weight * scale
        slope = -factor * scale * of_weight
        grad_x = _scaled(grad.to(weight.dtype), factor, -factor * of_bias - slope * mean)
        grad_x += _scaled(x.to(weight.dtype), slope, torch.zeros_like(slope))
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


def _scaled(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """``x * factor + addend`` by channel, by torch's kernel for it: broadcasting takes longer."""
    zeros, ones = torch.zeros_like(factor), torch.ones_like(factor)
    # torch 2.11 refuses an eps of 0; 1 + 1e-30 is 1.
    return nn.functional.batch_norm(x, zeros, ones, factor, addend, training=False, eps=1e-30)


def convert_sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Change batch norm to statistics over all ranks; names and state dict are kept.

    Call it before ``wrap_ddp``. On CUDA this is torch's SyncBatchNorm. On a CPU it is
    ReducedBatchNorm2d, for a single rank as well: the statistics of torch's kernel are off by 1e-5
    (docs/results/), the network amplifies that, and one rank would train another model than two.
    """
    if world.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.world_size > 1 else model
        return converted
    if type(model) is nn.BatchNorm2d:
        return ReducedBatchNorm2d(model)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, world))
    return model
