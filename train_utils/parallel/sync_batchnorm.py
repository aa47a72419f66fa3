"""Batch norm with statistics over all ranks, on CPUs.

On CUDA reduced_batchnorm.py takes its place; torch's nn.SyncBatchNorm exists only there. The
formulas are those of Ioffe & Szegedy 2015, summed over the images and positions of all ranks. Each
image is summed alone, and sums over images add sorted values, so all ranks get the same bits,
whichever rank has which image.
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
    """Collects gradients outside of autograd; see image_sums.GradientSums."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradients of some images: (images, *parameter shape)."""


POSITIONS = (2, 3)  # of (batch, channels, rows, columns)
IN_CACHE = 2**18  # values of a map: 1 MiB in float32, half of the second cache of a core


class Statistics(NamedTuple):
    """Statistics of a map (batch, channels, rows, columns) over all ranks."""

    mean: Tensor  # (channels,) float64
    variance: Tensor  # (channels,) float64, biased
    elements: float | Tensor  # in each channel


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """What batch norms over all ranks share.

    Takes over the parameters, statistics, mode and state dict of ``norm``. In evaluation it is
    plain batch norm.
    """

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        if not (norm.affine and norm.track_running_stats and norm.momentum is not None):
            raise ValueError(f"this needs a batch norm with weights, running statistics and momentum, got {norm}")
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.training = norm.training

    @torch.no_grad()
    def _follow(self, statistics: Statistics) -> None:
        """Update the running statistics; the running variance is unbiased."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        unbiased = statistics.variance * (statistics.elements / (statistics.elements - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            running.copy_(running.double().lerp(new, self.momentum))
        self.num_batches_tracked.add_(1)


class GlobalBatchNorm2d(SyncedBatchNorm2d):
    """nn.BatchNorm2d with training statistics over all ranks.

    Ranks must have equally many images; image sizes may differ. Forward and backward each call
    ``stack_over_ranks`` once, so all ranks must run both in the same order. Input is float32,
    float64, or bfloat16 with float32 parameters; its memory format is kept. If ``sums`` is set, the
    gradients of weight and bias go there instead of ``.grad``. ``Images`` are computed one by one.
    """

    def __init__(self, norm: nn.BatchNorm2d, stack_over_ranks: Stack) -> None:
        super().__init__(norm)
        self.stack_over_ranks = stack_over_ranks
        self.sums: Sums | None = None

    def forward(self, input: Any) -> Any:
        """Normalise (batch, channels, rows, columns); update running statistics as torch does."""
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


def global_statistics(maps: Sequence[Tensor], like: Tensor, stack_over_ranks: Stack) -> Statistics:
    """Mean and variance over all ranks of ``maps``: parts (images, channels, rows, columns).

    Merges them by the formula of Chan et al. 1979, which loses no digits for large means. ``like``
    is a (channels,) tensor of the parameters' dtype. Raises ValueError if all ranks together have a
    single value in each channel.
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
    """Mean, squared deviations and position count per image and channel.

    Returns (images, 3, channels) in float64. Sums within an image use the parameters' dtype, so
    the statistics do not depend on how images are dealt to ranks.
    """
    per_image = x.numel() // (x.shape[0] * x.shape[1])
    sums = []
    for part in _parts(x):
        means = part.sum(POSITIONS, dtype=dtype) / per_image
        centred = part - _along_rows(means, part)
        sums.append(torch.stack((means, centred.sum(POSITIONS), centred.square_().sum(POSITIONS)), dim=1))
    means, shifts, squares = torch.cat(sums).double().unbind(1)  # (images, channels) each
    shifts = shifts / per_image  # rounding error of the means
    counts = torch.full_like(means, per_image)
    return torch.stack((means + shifts, squares - per_image * shifts.square(), counts), dim=1)


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """A map (images, channels, rows, columns) in parts of whole images that a cache holds."""
    parts: tuple[Tensor, ...] = x.split(max(1, IN_CACHE // x[0].numel()))
    return parts


def _along_rows(values: Tensor, like: Tensor) -> Tensor:
    """Values (n, channels) as (n, channels, 1, 1 or columns), which broadcast over ``like``, a map.

    In channels_last memory they are repeated along a row: torch then computes a row at a time, not
    the few channels of each pixel.
    """
    values = values[:, :, None, None]
    if not like.is_contiguous(memory_format=torch.channels_last):
        return values
    return values.expand(-1, -1, 1, like.shape[3]).contiguous(memory_format=torch.channels_last)


def _sum_over_images(values: Tensor) -> Tensor:
    """Sum (images, ...) over images with rounding that ignores their order."""
    return values.sort(dim=0).values.sum(0)


class _Normalise(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias; gradients pass the statistics too."""

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
        of_weight, of_bias = _sum_over_images(layer.stack_over_ranks(parts).flatten(0, 1)) / ctx.elements
        # d loss / dx = weight * scale * (grad - of_bias - (x - mean) * scale * of_weight)
        #             = grad * a + x * b + c
        a = (weight * scale).double()
        b = -a * scale64 * of_weight
        c = -a * of_bias - b * mean.double()
        factors = torch.stack((a, b, c)).to(weight.dtype)
        grads_x = [_combined(x, grad, factors) for x, grad in zip(maps, grads, strict=True)]
        return grad_weight, grad_bias, None, None, *grads_x


def _products(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Gradients of weight and bias per image: (images, 2, channels) in float64."""
    sums = []
    for part, of_part in zip(_parts(x), _parts(grad), strict=True):
        products = (part - _along_rows(mean[None], part)).mul_(of_part)
        sums.append(torch.stack((products.sum(POSITIONS), of_part.sum(POSITIONS, dtype=mean.dtype)), dim=1))
    gradients = torch.cat(sums).double()
    gradients[:, 0] *= scale
    return gradients


def _combined(x: Tensor, grad: Tensor, factors: Tensor) -> Tensor:
    """The map grad * a + x * b + c in the dtype of x, for the factors (3, channels) a, b and c."""
    a, b, c = _along_rows(factors, x).split(1)
    combined = torch.empty_like(x, dtype=factors.dtype)
    for out, part, of_part in zip(_parts(combined), _parts(x), _parts(grad), strict=True):
        torch.addcmul(c, part, b, out=out).addcmul_(of_part, a)
    return combined.to(x.dtype)
