"""Batch norm and activation in one pass, in Triton, for channels_last maps on CUDA.

A map in channels_last memory is a matrix with a row for each position and a column for each
channel. Four kernels go over it, and one, between the first two, over its channels:

    _statistics       count, sum and sum of squares of each channel
    _follow           mean and variance of these, and the running statistics
    _normalise        y = activation(weight * x_hat + bias), x_hat = (x - mean) / sqrt(var + eps)
    _sum_gradients    with g = dy * the activation's derivative: the sums of g and of g * x_hat
    _propagate        dx = weight / sqrt(var + eps) * (g - mean(g) - x_hat * mean(g * x_hat))

(Ioffe & Szegedy 2015). Backward keeps x and computes the rest anew. Ranks exchange the sums between
kernels. A program takes one block of channels and every so many-th block of positions; their sums
are added in float64 and in one order, so that the bits of a run repeat.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels take pointers and sizes one by one

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 4096  # values that a program has in registers at once
MOST_CHANNELS = 64  # of a tile: 128 bytes of bfloat16 in a row
PROGRAMS = 1056  # at most; eight for each of an H100's processors
WARPS = 4  # of a program, so 32 values for each thread; with 8 a step on an H100 takes 2 % longer

IDENTITY = 1.0
# As the kernels take them: a name, or the slope of a leaky ReLU.
ACTIVATIONS: dict[Any, str | float] = {nn.SiLU: "silu", nn.Mish: "mish", nn.ReLU: 0.0, nn.Identity: IDENTITY}

Exchange = Callable[[Tensor], Tensor]


def normalise_and_activate(
    x: Tensor, norm: nn.BatchNorm2d, activation: Callable[[Tensor], Tensor], sum_over_ranks: Exchange | None = None
) -> Tensor:
    """Training's ``activation(norm(x))``; updates running statistics as nn.BatchNorm2d does.

    x: (batch, channels, rows, columns) of any float dtype on CUDA; the result has its dtype, in
    channels_last. Leaky and plain ReLU, SiLU, Mish and Identity are part of the pass, others follow
    it. With ``sum_over_ranks``, which sums float64 tensors without autograd, statistics and
    gradients are those of SyncBatchNorm. Raises ValueError for a single value in each channel.
    """
    if sum_over_ranks is None and x.numel() == x.shape[1]:
        raise ValueError(f"batch norm needs more than one value for each channel, got {tuple(x.shape)}")
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    kind = ACTIVATIONS.get(type(activation))
    if isinstance(activation, nn.LeakyReLU):
        kind = activation.negative_slope
    over_ranks = sum_over_ranks or (lambda sums: sums)
    y: Tensor = _NormActivation.apply(x, norm.weight, norm.bias, norm, IDENTITY if kind is None else kind, over_ranks)
    return activation(y) if kind is None else y


class _NormActivation(torch.autograd.Function):
    """Launches the kernels; ``moments``: 1 / count, mean and 1 / sqrt(var + eps)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, kind: str | float, over_ranks: Exchange
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        grid = _Grid(x)
        partial = x.new_empty(grid.programs, 3, grid.channels, dtype=torch.float64)
        grid.launch(_statistics, x, weight, partial)
        totals = over_ranks(partial.sum(0))
        moments = weight.new_empty(3, grid.channels)
        of_norm = {"momentum": norm.momentum, "eps": norm.eps, "wide": grid.wide}
        _follow[1, grid.blocks](totals, moments, norm.running_mean, norm.running_var, grid.channels, **of_norm)
        y = torch.empty_like(x)
        grid.launch(_normalise, x, weight, bias, moments, y, activation=kind)
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.kind, ctx.over_ranks = kind, over_ranks
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        tensors = *ctx.saved_tensors, grad.contiguous(memory_format=torch.channels_last)
        grid = _Grid(x)
        partial = x.new_empty(grid.programs, 2, grid.channels, dtype=torch.float64)
        grid.launch(_sum_gradients, *tensors, partial, activation=ctx.kind)
        sums = partial.sum(0)
        grad_x = torch.empty_like(x)
        grid.launch(_propagate, *tensors, ctx.over_ranks(sums), grad_x, activation=ctx.kind)
        grad_bias, grad_weight = sums.to(weight.dtype)  # of this rank, as DDP expects
        return grad_x, grad_weight, grad_bias, None, None, None


class _Grid:
    """How a map is cut into tiles, and shared by programs."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.positions = x.numel() // self.channels
        self.wide = min(MOST_CHANNELS, triton.next_power_of_2(self.channels))
        self.high = TILE // self.wide
        self.blocks = triton.cdiv(self.channels, self.wide)  # each with as many programs:
        self.programs = max(1, min(PROGRAMS // self.blocks, triton.cdiv(self.positions, self.high)))

    def launch(self, kernel: Any, *tensors: Tensor | None, **constants: object) -> None:
        tile = {"high": self.high, "wide": self.wide, "num_warps": WARPS}
        kernel[self.programs, self.blocks](*tensors, self.positions, self.channels, **tile, **constants)


@triton.jit
def _statistics(x, weight, partial, positions, channels, high: tl.constexpr, wide: tl.constexpr):
    """``partial`` (programs, 3, channels): count, sum and sum of squares."""
    # Sums in float32 lose digits: each place of the tile keeps mean and deviations (Welford 1962).
    dtype: tl.constexpr = weight.dtype.element_ty
    count = tl.zeros((high, 1), dtype)
    mean = tl.zeros((high, wide), dtype)
    deviations = tl.zeros((high, wide), dtype)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        value = tl.load(x + at, mask=inside, other=0).to(dtype)
        count += (start + tl.arange(0, high)[:, None] < positions).to(dtype)
        difference = tl.where(inside, value - mean, 0)
        mean += difference * (1 / tl.maximum(count, 1))
        deviations += difference * (value - mean)
    count = count.to(tl.float64)
    mean = mean.to(tl.float64)
    found = partial + tl.program_id(0) * 3 * channels
    _store_row(found, tl.sum(count + tl.zeros((high, wide), tl.float64), 0), channels, wide)
    _store_row(found + channels, tl.sum(count * mean, 0), channels, wide)
    _store_row(found + 2 * channels, tl.sum(deviations.to(tl.float64) + count * mean * mean, 0), channels, wide)


@triton.jit
def _follow(sums, moments, run_mean, run_var, channels, momentum: tl.constexpr, eps: tl.constexpr, wide: tl.constexpr):
    """``moments`` and running statistics from ``sums`` (3, channels), over programs and ranks."""
    count = _load_row(sums, channels, wide)
    mean = _load_row(sums + channels, channels, wide) / count
    variance = tl.maximum(_load_row(sums + 2 * channels, channels, wide) / count - mean * mean, 0)
    _store_row(moments, 1 / count, channels, wide)
    _store_row(moments + channels, mean, channels, wide)
    _store_row(moments + 2 * channels, 1 / tl.sqrt(variance + eps), channels, wide)
    old_mean = _load_row(run_mean, channels, wide)
    old_var = _load_row(run_var, channels, wide)
    unbiased = variance * (count / tl.maximum(count - 1, 1))
    _store_row(run_mean, old_mean + momentum * (mean - old_mean), channels, wide)
    _store_row(run_var, old_var + momentum * (unbiased - old_var), channels, wide)


@triton.jit
def _normalise(
    x, weight, bias, moments, y, positions, channels,
    activation: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    factor, shift, mean, scale = _load_channels(weight, bias, moments, channels, wide)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        x_hat = _x_hat(x, at, inside, mean, scale)
        tl.store(y + at, _activated(x_hat * factor + shift, activation), mask=inside)


@triton.jit
def _sum_gradients(
    x, weight, bias, moments, grad, partial, positions, channels,
    activation: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """``partial`` (programs, 2, channels): the sums of g and of g * x_hat."""
    factor, shift, mean, scale = _load_channels(weight, bias, moments, channels, wide)
    sums = tl.zeros((high, wide), scale.dtype)
    products = tl.zeros((high, wide), scale.dtype)
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        x_hat = _x_hat(x, at, inside, mean, scale)
        g = _g(grad, at, inside, x_hat * factor + shift, activation)
        sums += g
        products += g * x_hat
    found = partial + tl.program_id(0) * 2 * channels
    _store_row(found, tl.sum(sums.to(tl.float64), 0), channels, wide)
    _store_row(found + channels, tl.sum(products.to(tl.float64), 0), channels, wide)


@triton.jit
def _propagate(
    x, weight, bias, moments, grad, sums, grad_x, positions, channels,
    activation: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """``grad_x`` from ``sums`` (2, channels), over programs and ranks."""
    factor, shift, mean, scale = _load_channels(weight, bias, moments, channels, wide)
    share = _load_row(moments, channels, wide)
    mean_g = _load_row(sums, channels, wide).to(share.dtype) * share
    mean_product = _load_row(sums + channels, channels, wide).to(share.dtype) * share
    for start in range(tl.program_id(0) * high, positions, tl.num_programs(0) * high):
        at, inside = _tile(start, positions, channels, high, wide)
        x_hat = _x_hat(x, at, inside, mean, scale)
        g = _g(grad, at, inside, x_hat * factor + shift, activation)
        tl.store(grad_x + at, factor * scale * (g - mean_g - x_hat * mean_product), mask=inside)


@triton.jit
def _tile(start, positions, channels, high: tl.constexpr, wide: tl.constexpr):
    """Offsets of a tile, in 64 bits as maps may have 2^31 values, and which of them exist."""
    rows = start + tl.arange(0, high)[:, None]
    columns = tl.program_id(1) * wide + tl.arange(0, wide)[None, :]
    return rows.to(tl.int64) * channels + columns, (rows < positions) & (columns < channels)


@triton.jit
def _load_row(values, channels, wide: tl.constexpr):
    """The values of this program's channels; 1 for those that do not exist."""
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    return tl.load(values + columns, mask=columns < channels, other=1)


@triton.jit
def _store_row(target, values, channels, wide: tl.constexpr):
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    tl.store(target + columns, values, mask=columns < channels)


@triton.jit
def _load_channels(weight, bias, moments, channels, wide: tl.constexpr):
    """Weight, bias, mean and 1 / sqrt(var + eps) of this program's channels."""
    mean = _load_row(moments + channels, channels, wide)
    scale = _load_row(moments + 2 * channels, channels, wide)
    return _load_row(weight, channels, wide), _load_row(bias, channels, wide), mean, scale


@triton.jit
def _x_hat(x, at, inside, mean, scale):
    return (tl.load(x + at, mask=inside, other=0).to(scale.dtype) - mean) * scale


@triton.jit
def _g(grad, at, inside, z, activation: tl.constexpr):
    """The gradient, times the derivative of _activated."""
    if activation == "silu":
        share = 1 / (1 + tl.exp(-z))
        slope = share * (1 + z * (1 - share))
    elif activation == "mish":
        power = tl.exp(tl.minimum(z, 20))
        part = power * (power + 2)
        slope = part / (part + 2) + 4 * z * power * (1 + power) / ((part + 2) * (part + 2))
    else:
        slope = tl.where(z > 0, 1, tl.full(z.shape, activation, z.dtype))
    return tl.load(grad + at, mask=inside, other=0).to(z.dtype) * slope


@triton.jit
def _activated(z, activation: tl.constexpr):
    """The activation of z; Mish is z * tanh(log(1 + e^z)) (Misra 2019)."""
    if activation == "silu":
        y = z / (1 + tl.exp(-z))
    elif activation == "mish":
        power = tl.exp(tl.minimum(z, 20))  # beyond 20 the quotient is 1
        part = power * (power + 2)
        y = z * (part / (part + 2))
    else:
        y = tl.where(z > 0, z, z * activation)
    return y
