"""Batch normalisation with the statistics of the micro-batches of all processes, for devices without a kernel for it.

torch has nn.SyncBatchNorm on CUDA only. The formulas are those of Ioffe & Szegedy 2015 with sums over the images and
positions of all ranks. Each image is summed by itself, and sums over images add the sorted numbers: so all ranks hold
the same statistics to the last bit, whichever rank has which image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from train_utils.parallel.by_image import Images

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
    ``sums`` is set, the gradients of weight and bias go there and not to their ``.grad``. Of ``Images`` each is
    computed by itself.
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

    def forward(self, input: Any) -> Any:
        """Normalise (batch, channels, rows, columns); in training the running statistics move as in torch."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        maps = input.each if isinstance(input, Images) else (input,)
        statistics = global_statistics([part.detach() for part in maps], self.weight.detach(), self.stack_over_ranks)
        self._follow(statistics)
        normalised: tuple[Tensor, ...] = _Normalise.apply(self.weight, self.bias, statistics, self, *maps)
        if isinstance(input, Images):
            return Images(normalised, input.random_states)
        return normalised[0]

    @torch.no_grad()
    def _follow(self, statistics: Statistics) -> None:
        """Move the running statistics, of which the variance is the unbiased one."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        unbiased = statistics.variance * (statistics.elements / (statistics.elements - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            running.copy_(running.double().lerp(new, self.momentum))
        self.num_batches_tracked.add_(1)


def global_statistics(maps: Sequence[Tensor], like: Tensor, stack_over_ranks: Stack) -> Statistics:
    """Mean and variance over all ranks of ``maps``, the parts (images, channels, rows, columns) of a batch.

    Merged by the formula of Chan et al. 1979, which loses no digits where the mean is large. ``like``: a tensor
    (channels,) in the format of the parameters. Raises ValueError where all ranks together have one value a channel.
    """
    parts = torch.cat([_moments(part, like.dtype) for part in maps])
    means, squares, counts = stack_over_ranks(parts).flatten(0, 1).unbind(1)  # (images, channels) each
    total = float(counts[:, 0].sum())
    if total <= 1:
        shape = tuple(maps[0].shape)
        raise ValueError(f"batch norm needs more than one value for each channel over all ranks, got {shape}")
    mean = _sum_over_images(means * counts) / total
    return Statistics(mean, _sum_over_images(squares + counts * (means - mean).square()) / total, total)


def _moments(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each image and channel of x the mean, the squares around it and the number of positions: (images, 3, channels)
    in float64.

    Image by image in the format of the parameters, over images in float64: then the dealing of images to ranks has no
    say in the statistics.
    """
    per_image = x.numel() // (x.shape[0] * x.shape[1])
    means = x.sum(POSITIONS, dtype=dtype, keepdim=True) / per_image
    centred = x - means
    means = means.flatten(1).double()
    shifts = centred.sum(POSITIONS).double() / per_image  # what rounding left of the means
    squares = centred.square_().sum(POSITIONS).double() - per_image * shifts.square()
    return torch.stack((means + shifts, squares, torch.full_like(means, per_image)), dim=1)


def _sum_over_images(values: Tensor) -> Tensor:
    """Sum of (images, channels), rounded alike in whatever order the images come."""
    return values.sort(dim=0).values.sum(0)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias, with the gradient that also flows through the statistics."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, statistics: Statistics, layer: GlobalBatchNorm2d, *maps: Tensor
    ) -> tuple[Tensor, ...]:
        mean, variance = statistics.mean.to(weight.dtype), statistics.variance.to(weight.dtype)
        ctx.save_for_backward(weight, mean, (variance + layer.eps).rsqrt(), *maps)
        ctx.elements, ctx.layer = statistics.elements, layer
        normalise = nn.functional.batch_norm
        return tuple(normalise(x, mean, variance, weight, bias, training=False, eps=layer.eps) for x in maps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, scale, *maps = ctx.saved_tensors
        layer: GlobalBatchNorm2d = ctx.layer
        scale64 = scale.double()
        parts = torch.cat([_products(x, grad, mean, scale64) for x, grad in zip(maps, grads, strict=True)])
        grad_weight = grad_bias = None
        if layer.sums is not None:
            for parameter, gradient in zip((layer.weight, layer.bias), parts.unbind(1), strict=True):
                if parameter.requires_grad:
                    layer.sums.add(parameter, gradient)
        else:
            grad_weight, grad_bias = parts.sum(0).to(weight.dtype)
        of_weight, of_bias = map(_sum_over_images, layer.stack_over_ranks(parts).flatten(0, 1).unbind(1))
        of_weight, of_bias = of_weight / ctx.elements, of_bias / ctx.elements
        # d loss / dx = factor * (grad - of_bias - (x - mean) * scale * of_weight) as grad * a + x * b + c
        a = (weight * scale).double()
        b = -a * scale64 * of_weight
        c = -a * of_bias - b * mean.double()
        a, b, c = (vector.to(weight.dtype).view(1, -1, 1, 1) for vector in (a, b, c))
        grads_x = [
            torch.addcmul(c, x, b, out=torch.empty_like(x, dtype=weight.dtype)).addcmul_(grad, a).to(x.dtype)
            for x, grad in zip(maps, grads, strict=True)
        ]
        return grad_weight, grad_bias, None, None, *grads_x


def _products(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Of each image the gradients of weight and bias, (images, 2, channels) in float64."""
    centred = x - mean.view(1, -1, 1, 1)
    of_weight = centred.mul_(grad).sum(POSITIONS).double() * scale
    return torch.stack((of_weight, grad.sum(POSITIONS, dtype=mean.dtype).double()), dim=1)
