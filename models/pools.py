"""Layers that change the size of a map (pooling, upsampling, reordering), and dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MaxPool(nn.Module):
    """Max pooling with Darknet's padding: `padding` rows in all, padding // 2 of them before.

    The input's rows and columns must be multiples of the stride (rows, columns); the network checks
    that. Then the windows reach only `size - stride - padding // 2` past the far edge, and no
    padding is added beyond. So 2x2/2 pooling, the most frequent case, needs no copy.
    """

    def __init__(self, size: int, stride: tuple[int, int], padding: int) -> None:
        super().__init__()
        self.size = size
        self.stride = stride
        self.before = padding // 2
        self.after = tuple(max(0, size - step - self.before) for step in stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.after == (self.before, self.before) and 2 * self.before <= self.size:
            return F.max_pool2d(x, self.size, self.stride, self.before)
        return F.max_pool2d(self.padded(x, float("-inf")), self.size, self.stride)

    def padded(self, x: Tensor, value: float) -> Tensor:
        """Pad x with `value` as far as the windows reach."""
        return F.pad(x, (self.before, self.after[1], self.before, self.after[0]), value=value)


class LocalAvgPool(MaxPool):
    """Mean over each of MaxPool's windows, counting only pixels inside the map."""

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.ones_like(x[:1, :1])
        # Both are means over whole windows, so their quotient is the mean over the pixels inside.
        means, shares = (F.avg_pool2d(self.padded(part, 0.0), self.size, self.stride) for part in (x, inside))
        return means / shares


class ChannelMaxPool(nn.Module):
    """For each k below out_channels, the largest of the channels k, k + out_channels, ..."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(1, (-1, self.out_channels))
        return split.amax(1)


class Upsample(nn.Module):
    """Every pixel repeated `stride` times in both directions, times `scale`."""

    def __init__(self, stride: int, scale: float) -> None:
        super().__init__()
        self.stride = stride
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        enlarged: Tensor = F.interpolate(x, scale_factor=self.stride, mode="nearest")
        return enlarged if self.scale == 1 else enlarged * self.scale


class SumPool(nn.Module):
    """Sum over stride x stride blocks, times `scale`: Darknet's upsampling by a negative stride."""

    def __init__(self, stride: int, scale: float) -> None:
        super().__init__()
        self.stride = stride
        self.factor = scale * stride * stride

    def forward(self, x: Tensor) -> Tensor:
        means: Tensor = F.avg_pool2d(x, self.stride)
        return means * self.factor


class Reorg(nn.Module):
    """[reorg3d]: each stride x stride block becomes one pixel with stride^2 times the channels.

    Output channel (dy * stride + dx) * channels + c holds pixel (dy, dx) of the block in channel c.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        # (batch, channels, rows, dy, columns, dx)
        blocks: Tensor = x.unflatten(3, (-1, self.stride)).unflatten(2, (-1, self.stride))
        return blocks.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


class ScrambledReorg(Reorg):
    """[reorg] of YOLOv2: sizes as in Reorg, values in the order of Darknet's index arithmetic.

    It reads the map as if it had 1 / stride^2 of its channels and `stride` times its rows and
    columns.
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, rows, columns = x.shape
        step = self.stride
        taken = x.reshape(batch, channels // step**2, rows, step, columns, step).permute(0, 3, 5, 1, 2, 4)
        return taken.reshape(batch, channels * step**2, rows // step, columns // step)


class Blur(nn.Module):
    """Low-pass filter with a stride (Zhang 2019): a 3x3 binomial window, or a 2x2 mean."""

    kernel: Tensor

    def __init__(self, size: int, stride: tuple[int, int]) -> None:
        super().__init__()
        weights = torch.tensor([1.0, 2.0, 1.0]) if size == 3 else torch.ones(2)
        kernel = weights[:, None] * weights
        self.register_buffer("kernel", (kernel / kernel.sum())[None, None], persistent=False)
        self.stride = stride
        self.padding = 1 if size == 3 else 0

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        kernels = self.kernel.to(x.dtype).expand(channels, -1, -1, -1)
        return F.conv2d(x, kernels, None, self.stride, self.padding, groups=channels)


class Dropout(nn.Module):
    """Zero values (block_size None) or blocks of pixels with `probability`, in training only.

    The rest is scaled up to keep the mean.
    """

    def __init__(self, probability: float, block_size: int | None) -> None:
        super().__init__()
        self.probability = probability
        self.block_size = block_size

    def forward(self, x: Tensor) -> Tensor:
        if self.block_size is None:
            return F.dropout(x, self.probability, self.training)
        from torchvision.ops import drop_block2d  # an import as long as torch's

        # A block is odd and no larger than the map.
        size = min(self.block_size, *x.shape[2:])
        dropped: Tensor = drop_block2d(x, self.probability, size - 1 + size % 2, training=self.training)
        return dropped
