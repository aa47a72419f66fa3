"""Batch norm and activation in one pass, in Triton, for channels_last maps on CUDA.

A map (batch, channels, rows, columns) in channels_last memory is a matrix with a row for each
position and a column for each channel. Four kernels go over it:

    statistics        count, sum and sum of squares of each channel
    normalise         z = weight * x_hat + bias with x_hat = (x - mean) / sqrt(variance + eps);
                      y = activation(z), and the running statistics
    sum_gradients     with g = dy * activation'(z): the sums of g and of g * x_hat
    propagate         dx = weight / sqrt(variance + eps) * (g - mean(g) - x_hat * mean(g * x_hat))

(Ioffe & Szegedy 2015). Backward keeps x alone and computes z again. The sums are exchanged between
the kernels, so over several ranks this is SyncBatchNorm. A program of a kernel takes one block of
channels and every so many-th block of positions. The sums of programs are added in float64, in one
order, so the bits of a run repeat. Import this file only where Triton is installed.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels take pointers and sizes one by one

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 4096  # values that a program has in registers at once
MOST_CHANNELS = 64  # of a tile: 128 bytes of bfloat16 in a row
PROGRAMS = 1056  # at most; eight for each of an H100's processors
WARPS = 8  # of a program, so 16 values for each thread

Exchange = Callable[[Tensor], Tensor]


class Settings(NamedTuple):
    """What a pass needs besides tensors with gradients."""

    norm: nn.BatchNorm2d
    kind: str  # of activation: "leaky", "silu" or "mish"
    slope: float  # of leaky below 0; linear is 1, ReLU 0
    sum_over_ranks: Exchange | None


def normalise_and_activate(
    x: Tensor, norm: nn.BatchNorm2d, activation: Callable[[Tensor], Tensor], sum_over_ranks: Exchange | None = None
) -> Tensor:
    """Training's ``activation(norm(x))``; updates running statistics as nn.BatchNorm2d does.

    x: (batch, channels, rows, columns) of any float dtype on CUDA; the result has its dtype, in
    channels_last. Parameters and statistics are float32 or float64, in which all is computed.
    Leaky and plain ReLU, SiLU, Mish and Identity are part of the pass, other activations follow it.
    With ``sum_over_ranks``, which sums float64 tensors without autograd, statistics and gradients
    are those of SyncBatchNorm: of all ranks' values, whose numbers may differ. Raises ValueError
    for a single value in each channel.
    """
    if sum_over_ranks is None and x.numel() == x.shape[1]:
        raise ValueError(f"batch norm needs more than one value for each channel, got {tuple(x.shape)}")
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    kind, slope, then = "leaky", 1.0, None
    if isinstance(activation, nn.SiLU | nn.Mish):
        kind = type(activation).__name__.lower()
    elif isinstance(activation, nn.LeakyReLU | nn.ReLU):
        slope = getattr(activation, "negative_slope", 0.0)
    elif not isinstance(activation, nn.Identity):
        then = activation
    y: Tensor = _NormActivation.apply(x, norm.weight, norm.bias, Settings(norm, kind, slope, sum_over_ranks))
    return y if then is None else then(y)


class _NormActivation(torch.autograd.Function):
    """Launches the four kernels. ``totals`` (3, channels): count, sum and sum of squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, settings: Settings) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        norm, grid = settings.norm, _Grid(x)
        partial = x.new_empty(grid.programs, 3, x.shape[1], dtype=torch.float64)
        grid.launch(_statistics, x, weight, partial)
        totals, y = _over_ranks(partial.sum(0), settings), torch.empty_like(x)
        grid.launch(
            _normalise, x, y, weight, bias, totals, norm.running_mean, norm.running_var,
            momentum=norm.momentum, eps=norm.eps, kind=settings.kind, slope=settings.slope,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, totals)
        ctx.settings = settings
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, totals = ctx.saved_tensors
        settings, grid = ctx.settings, _Grid(x)
        tensors = x, grad.contiguous(memory_format=torch.channels_last), weight, bias, totals
        of_activation = {"eps": settings.norm.eps, "kind": settings.kind, "slope": settings.slope}
        partial = x.new_empty(grid.programs, 2, x.shape[1], dtype=torch.float64)
        grid.launch(_sum_gradients, *tensors, partial, **of_activation)
        sums, grad_x = partial.sum(0), torch.empty_like(x)
        grid.launch(_propagate, *tensors, _over_ranks(sums, settings), grad_x, **of_activation)
        grad_bias, grad_weight = sums.to(weight.dtype)  # of this rank, as DDP expects
        return grad_x, grad_weight, grad_bias, None


def _over_ranks(sums: Tensor, settings: Settings) -> Tensor:
    return sums if settings.sum_over_ranks is None else settings.sum_over_ranks(sums)


class _Grid:
    """How a map is cut into tiles, and shared by programs."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.positions = x.numel() // self.channels
        self.wide = min(MOST_CHANNELS, triton.next_power_of_2(self.channels))
        self.high = TILE // self.wide
        self.blocks = triton.cdiv(self.channels, self.wide)
        most = max(1, PROGRAMS // self.blocks)
        self.programs = min(most, max(1, triton.cdiv(self.positions, self.high)))  # for each block of channels

    def launch(self, kernel: Any, *tensors: Tensor | None, **constants: object) -> None:
        grid = self.programs, self.blocks
        kernel[grid](
            *tensors, self.positions, self.channels, high=self.high, wide=self.wide, num_warps=WARPS, **constants
        )


@triton.jit
def _statistics(
    x: tl.tensor, weight: tl.tensor, partial: tl.tensor, positions: int, channels: int,
    high: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """``partial`` (programs, 3, channels): count, sum and sum of squares.

    Each place of the tile keeps the mean and the squared deviations of what passed it, since sums
    in float32 lose digits (Welford 1962).
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    count, mean = tl.zeros((high, 1), dtype), tl.zeros((high, wide), dtype)
    deviations = tl.zeros((high, wide), dtype)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        value = tl.load(x + at, mask=inside, other=0).to(dtype)
        count += (start + tl.arange(0, high)[:, None] < positions).to(dtype)
        difference = tl.where(inside, value - mean, 0)
        mean += difference * (1 / tl.maximum(count, 1))
        deviations += difference * (value - mean)
    count, mean = count.to(tl.float64), mean.to(tl.float64)
    found = partial + tl.program_id(0) * 3 * channels
    _store_row(found, tl.sum(count + tl.zeros((high, wide), tl.float64), 0), channels, wide)
    _store_row(found + channels, tl.sum(count * mean, 0), channels, wide)
    _store_row(found + 2 * channels, tl.sum(deviations.to(tl.float64) + count * mean * mean, 0), channels, wide)


@triton.jit
def _normalise(
    x: tl.tensor, y: tl.tensor, weight: tl.tensor, bias: tl.tensor, totals: tl.tensor, running_mean: tl.tensor,
    running_var: tl.tensor, positions: int, channels: int, momentum: tl.constexpr, eps: tl.constexpr,
    kind: tl.constexpr, slope: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """``y`` = activation(z); one program of each block of channels updates its statistics."""
    count, mean, variance = _moments(totals, channels, wide)
    if tl.program_id(0) == 0:
        before = _load_row(running_mean, channels, wide)
        _store_row(running_mean, before + momentum * (mean - before), channels, wide)
        before, unbiased = _load_row(running_var, channels, wide), variance * (count / tl.maximum(count - 1, 1))
        _store_row(running_var, before + momentum * (unbiased - before), channels, wide)
    dtype: tl.constexpr = weight.dtype.element_ty
    mean, scale = mean.to(dtype), (1 / tl.sqrt(variance + eps)).to(dtype) * _load_row(weight, channels, wide)
    shift = _load_row(bias, channels, wide)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        z = (tl.load(x + at, mask=inside, other=0).to(dtype) - mean) * scale + shift
        tl.store(y + at, _activated(z, kind, slope), mask=inside)


@triton.jit
def _sum_gradients(
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, bias: tl.tensor, totals: tl.tensor, partial: tl.tensor,
    positions: int, channels: int, eps: tl.constexpr, kind: tl.constexpr, slope: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """``partial`` (programs, 2, channels): the sums of g and of g * x_hat."""
    _, mean, variance = _moments(totals, channels, wide)
    dtype: tl.constexpr = weight.dtype.element_ty
    mean, scale = mean.to(dtype), (1 / tl.sqrt(variance + eps)).to(dtype)
    factor, shift = _load_row(weight, channels, wide), _load_row(bias, channels, wide)
    sums, products = tl.zeros((high, wide), dtype), tl.zeros((high, wide), dtype)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        x_hat = (tl.load(x + at, mask=inside, other=0).to(dtype) - mean) * scale
        g = tl.load(grad + at, mask=inside, other=0).to(dtype) * _derivative(x_hat * factor + shift, kind, slope)
        sums += g
        products += g * x_hat
    found = partial + tl.program_id(0) * 2 * channels
    _store_row(found, tl.sum(sums.to(tl.float64), 0), channels, wide)
    _store_row(found + channels, tl.sum(products.to(tl.float64), 0), channels, wide)


@triton.jit
def _propagate(
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, bias: tl.tensor, totals: tl.tensor, sums: tl.tensor,
    grad_x: tl.tensor, positions: int, channels: int, eps: tl.constexpr, kind: tl.constexpr, slope: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """``grad_x`` from ``sums`` (2, channels), those of all programs and ranks."""
    count, mean, variance = _moments(totals, channels, wide)
    dtype: tl.constexpr = weight.dtype.element_ty
    mean, scale = mean.to(dtype), (1 / tl.sqrt(variance + eps)).to(dtype)
    factor, shift = _load_row(weight, channels, wide), _load_row(bias, channels, wide)
    of_bias = (_load_row(sums, channels, wide) / count).to(dtype)
    of_weight = (_load_row(sums + channels, channels, wide) / count).to(dtype)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        x_hat = (tl.load(x + at, mask=inside, other=0).to(dtype) - mean) * scale
        g = tl.load(grad + at, mask=inside, other=0).to(dtype) * _derivative(x_hat * factor + shift, kind, slope)
        tl.store(grad_x + at, factor * scale * (g - of_bias - x_hat * of_weight), mask=inside)


@triton.jit
def _tile(start: int, positions: int, channels: int, high: tl.constexpr, wide: tl.constexpr) -> Any:
    """Offsets of a tile, in 64 bits as maps may have 2^31 values, and which of them exist."""
    rows = start + tl.arange(0, high)[:, None]
    columns = tl.program_id(1) * wide + tl.arange(0, wide)[None, :]
    return rows.to(tl.int64) * channels + columns, (rows < positions) & (columns < channels)


@triton.jit
def _load_row(values: tl.tensor, channels: int, wide: tl.constexpr) -> Any:
    """The values of this program's channels; 1 for those that do not exist."""
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    return tl.load(values + columns, mask=columns < channels, other=1)


@triton.jit
def _store_row(target: tl.tensor, values: tl.tensor, channels: int, wide: tl.constexpr) -> None:
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    tl.store(target + columns, values, mask=columns < channels)


@triton.jit
def _moments(totals: tl.tensor, channels: int, wide: tl.constexpr) -> Any:
    """Count, mean and biased variance of this program's channels, in float64."""
    count = _load_row(totals, channels, wide)
    mean = _load_row(totals + channels, channels, wide) / count
    square = _load_row(totals + 2 * channels, channels, wide) / count
    return count, mean, tl.maximum(square - mean * mean, 0)


@triton.jit
def _activated(z: tl.tensor, kind: tl.constexpr, slope: tl.constexpr) -> Any:
    """The activation of z; Mish is z * tanh(log(1 + e^z)) (Misra 2019)."""
    if kind == "silu":
        return z / (1 + tl.exp(-z))
    if kind == "mish":
        power = tl.exp(tl.minimum(z, 20))  # beyond 20 the quotient is 1
        part = power * (power + 2)
        return z * (part / (part + 2))
    return tl.where(z > 0, z, z * slope)


@triton.jit
def _derivative(z: tl.tensor, kind: tl.constexpr, slope: tl.constexpr) -> Any:
    """The derivative of _activated."""
    if kind == "silu":
        share = 1 / (1 + tl.exp(-z))
        return share * (1 + z * (1 - share))
    if kind == "mish":
        power = tl.exp(tl.minimum(z, 20))
        part = power * (power + 2)
        return part / (part + 2) + 4 * z * power * (1 + power) / ((part + 2) * (part + 2))
    return tl.where(z > 0, 1, z * 0 + slope)
