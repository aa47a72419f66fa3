"""Batch norm with statistics over all ranks; its own on CPUs, where torch has no SyncBatchNorm.

Means and variances of ranks are merged in float64, since sums of squares lose digits where a mean
is large. Formulas: Ioffe & Szegedy 2015.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import TrainSection
from models import Darknet
from models.layers import Convolution
from train_utils.auto import fuses_norm
from train_utils.distributed import World, sum_over_ranks


class ReducedBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d with training statistics over all ranks; in evaluation it is plain.

    Takes over what ``norm`` holds. Ranks may have different numbers of images and sizes. Forward
    and backward each exchange one tensor, so all ranks must run both in the same order. Raises
    ValueError if all ranks together have a single value in each channel.
    """

    def __init__(self, norm: nn.BatchNorm2d, world_size: int) -> None:
        super().__init__(norm.num_features)
        vars(self).update(vars(norm))
        self.world_size = world_size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, rows, columns); update running statistics as torch does."""
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        dtype = self.weight.dtype
        mean, variance, values = _statistics(input.detach(), dtype, self.world_size)
        if not torch.compiler.is_compiling() and values <= 1:
            raise ValueError(f"batch norm needs more than one value for each channel, got {tuple(input.shape)}")
        unbiased = variance * (values / (values - 1))
        mean = mean.to(dtype)
        variance = variance.to(dtype)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased.to(dtype), self.momentum)
        self.num_batches_tracked.add_(1)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, mean, variance, values, self.eps)
        return normalised


def _statistics(x: Tensor, dtype: torch.dtype, world_size: int) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, biased variance (float64) and number of values of each channel over all ranks."""
    images, channels, rows, width = x.shape
    values = images * rows * width
    # Over channels_last maps torch's kernel adds up each channel in one float32: over 2 million
    # values the variance is .1 % short. So each column of the maps is a channel of its own here.
    columns = x.permute(0, 2, 3, 1).reshape(1, images * rows, 1, width * channels)
    unused = torch.zeros(width * channels, dtype=dtype)
    means, variances = torch.batch_norm_update_stats(columns.permute(0, 3, 1, 2), unused, unused, 0.0)
    between, mean = torch.var_mean(means.double().view(width, channels), 0, correction=0)
    variance = variances.double().view(width, channels).mean(0) + between
    if world_size == 1:
        return mean, variance, values
    moments = torch.cat((mean, variance + mean.square(), mean.new_ones(1)))
    sums = sum_over_ranks(moments * values)
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    variance = (square - mean.square()).clamp(min=0)
    return mean, variance, sums[-1]


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias; gradients pass the statistics too.

    ``values`` is the number in a channel: an int on a single rank, else a tensor.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        values: Tensor | int,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.values = values
        ctx.eps = eps
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        if x.is_contiguous(memory_format=torch.channels_last):
            grad = grad.contiguous(memory_format=torch.channels_last)
        else:
            grad = grad.contiguous()
        scale = (variance + ctx.eps).rsqrt()
        # grad_x = weight * scale * (grad - of_bias - (x - mean) * scale * of_weight); of_bias and
        # of_weight are the means of grad and of grad * (x - mean) * scale, here on this rank.
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, scale, True, ctx.eps, [True, True, True]
        )
        if isinstance(ctx.values, Tensor):  # those over all ranks in their place
            sums = torch.cat((grad_weight, grad_bias))
            here = sums / (x.numel() // x.shape[1])
            everywhere = sum_over_ranks(sums) / ctx.values.to(sums.dtype)
            of_weight, of_bias = (weight * scale * (here - everywhere).view(2, -1)).unbind()
            grad_x += nn.functional.batch_norm(x, mean, variance, of_weight, of_bias, eps=ctx.eps)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def convert_batch_norm(model: Darknet, options: TrainSection, world: World, images: int) -> None:
    """Prepare batch norm for ``train.fused_norm`` or ``train.sync_bn``, before ``wrap_ddp``."""
    if fuses_norm(options, world, model, images):
        from models.fused_norm import normalise_and_activate  # needs Triton

        exchange = sum_over_ranks if options.sync_bn and world.world_size > 1 else None
        for layer in model.modules():
            if isinstance(layer, Convolution):
                layer.fused_norm = partial(normalise_and_activate, sum_over_ranks=exchange)
    elif options.sync_bn:
        convert_sync_batchnorm(model, world)


def convert_sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Change batch norm to statistics over all ranks; names and state dict are kept.

    On CUDA this is torch's. On a CPU it is ReducedBatchNorm2d, for a single rank as well: the sums
    of torch's kernel are in float32 there, and would train another model (docs/results/).
    """
    if world.device.type == "cuda":
        if world.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model
    if type(model) is nn.BatchNorm2d:
        return ReducedBatchNorm2d(model, world.world_size)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, world))
    return model
