"""Layers that change a map's size, against loops over Darknet's index arithmetic."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.pools import Blur, ChannelMaxPool, Dropout, LocalAvgPool, MaxPool, Reorg, ScrambledReorg, SumPool, Upsample

Array = npt.NDArray[np.float64]


def darknet_pool(
    x: Array, size: int, strides: tuple[int, int], padding: int, reduce: Callable[[Array], float]
) -> Array:
    """Pool as maxpool_layer.c: window i begins at i * stride - padding // 2, clipped to the map."""
    channels, rows, columns = x.shape
    out_rows, out_columns = ((n + padding - size) // s + 1 for n, s in zip((rows, columns), strides, strict=True))
    out = np.zeros((channels, out_rows, out_columns))
    for channel, row, column in np.ndindex(out.shape):
        top, left = row * strides[0] - padding // 2, column * strides[1] - padding // 2
        window = x[channel, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)]
        out[channel, row, column] = reduce(window)
    return out


POOLS = [
    *[(size, (stride, stride), size - 1) for size in range(2, 14) for stride in (1, 2) if stride <= size],
    *[(size, (stride, stride), size - 1) for size, stride in ((4, 4), (8, 8), (16, 16), (9, 3), (3, 4), (1, 2))],
    *[(8, (8, 4), 7), (8, (4, 8), 7), (2, (1, 2), 1), (2, (2, 1), 1), (5, (2, 4), 4)],
    *[(2, (2, 2), 0), (3, (2, 2), 1), (3, (3, 3), 0), (5, (4, 4), 1), (6, (4, 4), 2), (6, (4, 4), 3)],
]


@pytest.mark.parametrize(("size", "strides", "padding"), POOLS)
def test_pools_place_their_windows_as_darknet(size: int, strides: tuple[int, int], padding: int) -> None:
    sides = [(3 * strides[0], 2 * strides[1]), (strides[0], strides[1])]
    if strides == (1, 1):
        sides.append((7, 13))
    for rows, columns in sides:
        x = torch.randn(1, 2, rows, columns, dtype=torch.float64) - 2  # negative: padding by 0 would show
        for module, reduce in ((MaxPool, np.max), (LocalAvgPool, np.mean)):
            expected = darknet_pool(x[0].numpy(), size, strides, padding, reduce)
            out = module(size, strides, padding)(x)[0]
            assert out.shape == (2, rows // strides[0], columns // strides[1])
            torch.testing.assert_close(out, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


def test_pooling_over_channels() -> None:
    x = torch.randn(2, 6, 3, 4)
    out = ChannelMaxPool(2)(x)
    for channel in range(2):
        assert out[:, channel].equal(torch.stack([x[:, k] for k in range(channel, 6, 2)]).amax(0))


@pytest.mark.parametrize(("stride", "scale"), [(2, 1.0), (4, 1.0), (3, 0.25), (1, 2.0)])
def test_upsampling_repeats_pixels(stride: int, scale: float) -> None:
    x = torch.randn(1, 2, 3, 2)
    out = Upsample(stride, scale)(x)
    for row, column in np.ndindex(3 * stride, 2 * stride):
        torch.testing.assert_close(out[..., row, column], x[..., row // stride, column // stride] * scale)


def test_upsampling_by_a_negative_stride_adds_blocks() -> None:
    x = torch.randn(1, 2, 6, 9)
    out = SumPool(3, 0.5)(x)
    assert out.shape == (1, 2, 2, 3)
    for row, column in np.ndindex(2, 3):
        block = x[..., 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        torch.testing.assert_close(out[..., row, column], block.sum((2, 3)) * 0.5)


def reorg_cpu(x: Array, rows: int, columns: int, channels: int, stride: int) -> Array:
    """Darknet's reorg_cpu with forward=0, for the sizes that the caller passes."""
    flat, out = x.ravel(), np.zeros(x.size)
    few = channels // stride**2
    for k, j, i in np.ndindex(channels, rows, columns):
        offset, c2 = divmod(k, few)
        w2, h2 = i * stride + offset % stride, j * stride + offset // stride
        out[i + columns * (j + rows * k)] = flat[w2 + columns * stride * (h2 + rows * stride * c2)]
    return out


@pytest.mark.parametrize(("channels", "stride"), [(4, 2), (8, 2), (9, 3), (3, 1), (32, 4)])
def test_reorgs_order_values_as_darknet(channels: int, stride: int) -> None:
    rows, columns = 2 * stride, 3 * stride
    x = torch.randn(2, channels, rows, columns, dtype=torch.float64)
    shape = (2, channels * stride**2, 2, 3)
    # reorg_layer.c passes the sizes of the result, reorg_old_layer.c those of the input.
    proper = [reorg_cpu(image.numpy(), 2, 3, shape[1], stride) for image in x]
    old = [reorg_cpu(image.numpy(), rows, columns, channels, stride) for image in x]
    assert Reorg(stride)(x).equal(torch.from_numpy(np.stack(proper)).view(shape))
    assert ScrambledReorg(stride)(x).equal(torch.from_numpy(np.stack(old)).view(shape))


def blurred(x: Tensor, size: int, strides: tuple[int, int]) -> Tensor:
    """Loops over the windows of the filter: [1 2 1] x [1 2 1] / 16 in a rim of zeros, or means."""
    line = torch.tensor([1.0, 2.0, 1.0] if size == 3 else [1.0, 1.0], dtype=x.dtype)
    kernel = line[:, None] * line / line.sum() ** 2
    rim = 1 if size == 3 else 0
    padded = F.pad(x, (rim,) * 4)
    rows, columns = ((n + 2 * rim - size) // s + 1 for n, s in zip(x.shape[2:], strides, strict=True))
    out = x.new_zeros(*x.shape[:2], rows, columns)
    for row, column in np.ndindex(rows, columns):
        top, left = row * strides[0], column * strides[1]
        out[..., row, column] = (padded[..., top : top + size, left : left + size] * kernel).sum((2, 3))
    return out


@pytest.mark.parametrize(("size", "strides"), [(3, (2, 2)), (3, (1, 1)), (3, (2, 1)), (3, (4, 4)), (2, (2, 2))])
def test_blur(size: int, strides: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 8, 4)
    torch.testing.assert_close(Blur(size, strides)(x), blurred(x, size, strides))


def test_dropout_does_nothing_in_evaluation() -> None:
    x = torch.randn(2, 3, 8, 8)
    for block_size in (None, 7):
        assert Dropout(0.5, block_size).eval()(x).equal(x)


def test_dropout_keeps_the_mean_in_training() -> None:
    x = torch.ones(8, 16, 32, 32)
    out = Dropout(0.2, None).train()(x)
    assert set(out.unique().tolist()) == {0.0, 1.25}
    assert (out == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("side", [16, 6, 1])
def test_dropblock_zeroes_blocks_and_keeps_the_mean(side: int) -> None:
    x = torch.ones(64, 8, side, side)
    out = Dropout(0.2, 5).train()(x)
    assert (out == 0).any() and out.mean().item() == pytest.approx(1, abs=1e-3)
    if side == 16:  # zeros come in 5x5 blocks: each zero has a zero block around some centre
        zeros = (out == 0).float()
        centres = (F.avg_pool2d(zeros, 5, 1) == 1).float()
        assert F.max_pool2d(F.pad(centres, (4,) * 4), 5, 1).equal(zeros)
