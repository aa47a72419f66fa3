"""Draw decoded images where matrices map them, for a whole batch at once on its device.

It does what data/samples/tiles.py does with OpenCV: a later tile covers an earlier one, and each
pixel is interpolated linearly at its centre. Tiles have hard edges: a pixel whose centre lies on an
image shows that image alone, with the image's edge pixels repeated for the last half pixel.
Operators work element by element on fixed shapes. So a picture does not depend on its batch, and
the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.geometry import Size
from data.samples.letterbox import PAD_VALUE

PIXELS = 1 << 22  # drawn at once: with about 150 bytes of work space each


def resample(images: Sequence[Tensor], tiles: Tensor, maps: Tensor, size: Size) -> Tensor:
    """Draw P pictures of up to T tiles each; return uint8 (P, H, W, 3), H and W by ``size``.

    ``images`` are uint8 (3, h, w) on the device. ``tiles`` int64 (P, T) are positions among them,
    -1 for none. ``maps`` float32 (P, T, 3, 3) take a point (x, y, 1) of the picture to that of the
    image, up to a factor; pixel i of a row covers i..i + 1. What no tile covers is grey.
    """
    device = tiles.device
    shapes = np.array([tuple(image.shape[1:]) for image in images] or [(1, 1)], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(3 * shapes.prod(axis=1))[:-1]])
    table = torch.from_numpy(np.column_stack([shapes, starts])).to(device, non_blocking=True)  # (N, 3)
    memory = torch.cat([image.reshape(-1) for image in images] or [torch.zeros(3, dtype=torch.uint8, device=device)])
    drawn = torch.empty((len(tiles), *size, 3), dtype=torch.uint8, device=device)
    count = max(1, PIXELS // (size[0] * size[1]))
    for part in range(0, len(tiles), count):
        some = slice(part, part + count)
        _draw(drawn[some], memory, table, tiles[some], maps[some])
    return drawn


def _draw(drawn: Tensor, memory: Tensor, table: Tensor, tiles: Tensor, maps: Tensor) -> None:
    """Draw some of the pictures; ``table`` (N, 3) holds height, width and start in ``memory``."""
    count, rows, columns, _ = drawn.shape
    y = torch.arange(rows, device=drawn.device)[:, None] + 0.5
    x = torch.arange(columns, device=drawn.device) + 0.5
    found = torch.full((count, rows, columns), -1, device=drawn.device)  # the image that each pixel shows
    points = torch.zeros((2, count, rows, columns), device=drawn.device)
    for tile, matrix in zip(tiles.T, maps.permute(1, 2, 3, 0)[..., None, None], strict=True):
        across, down, depth = (row[0] * x + row[1] * y + row[2] for row in matrix)  # (P, H, W) each
        across, down = across / depth, down / depth
        height, width, _ = table[tile.clamp(min=0)].T[..., None, None]
        shown = (tile >= 0)[:, None, None] & (depth > 0)
        shown &= (across >= 0) & (across < width) & (down >= 0) & (down < height)
        found = torch.where(shown, tile[:, None, None], found)
        points = torch.where(shown, torch.stack((across, down)), points)
    height, width, start = table[found.clamp(min=0)].unbind(-1)
    left, right, to_right = _neighbours(points[0], width)
    top, bottom, to_bottom = _neighbours(points[1], height)
    corners = [start + row * width + column for row in (top, bottom) for column in (left, right)]
    area = height * width
    for channel in range(3):
        one, two, three, four = (memory[corner + channel * area].float() for corner in corners)
        above, below = one + (two - one) * to_right, three + (four - three) * to_right
        level = (above + (below - above) * to_bottom).round_()
        drawn[..., channel] = torch.where(found < 0, PAD_VALUE, level).to(torch.uint8)


def _neighbours(position: Tensor, side: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels that a position lies between, and how far it is from the first, 0..1."""
    last = side - 1
    first = torch.minimum((position - 0.5).clamp_(min=0), last)  # beyond the last half pixel its level is repeated
    whole = first.floor()
    low = whole.long()
    return low, torch.minimum(low + 1, last), first - whole
