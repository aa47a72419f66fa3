"""The views of an image: windows of it, each as network input in several sizes and mirrored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.config import Resize
from data.geometry import Image, Size
from data.samples.letterbox import Letterbox, resize_into
from data.view_config import Tta, ViewConfig

Window = tuple[int, int, int, int]  # left, top, right, bottom in pixels of an image


class View(NamedTuple):
    """A window of an image, and how the network gets it."""

    window: Window
    mirrored: bool = False
    image_size: int = 0  # longest side of the network input, without padding; ``draw`` takes that of its canvas

    @property
    def size(self) -> Size:
        """Height and width of the window."""
        left, top, right, bottom = self.window
        return bottom - top, right - left

    def draw(self, canvas: Image, image: Image, resize: Resize, upscale: bool) -> Letterbox:
        """Draw the window of ``image`` onto the canvas, and return where its pixels went."""
        left, top, right, bottom = self.window
        box = resize_into(canvas, image[top:bottom, left:right], resize, upscale)
        box = box._replace(pad_x=box.pad_x - left * box.ratio_x, pad_y=box.pad_y - top * box.ratio_y)
        if self.mirrored:
            canvas[:] = canvas[:, ::-1]
            box = box._replace(ratio_x=-box.ratio_x, pad_x=canvas.shape[1] - box.pad_x)
        return box


@dataclass(frozen=True)
class Looks:
    """Which views a detector takes of an image of any size."""

    image_sizes: tuple[int, ...]
    mirrored: tuple[bool, ...] = (False,)
    slices: int | None = None
    overlap: int = 0  # of neighbouring slices, in pixels
    whole: bool = True

    @classmethod
    def of(cls, config: ViewConfig, image_size: int, stride: int) -> Looks:
        """The views that ``config`` asks for, with sizes rounded to multiples of ``stride``."""
        sizes = {image_size}
        mirrored: tuple[bool, ...] = (False,)
        if config.tta != Tta.none:
            sizes = {max(stride, round(scale * image_size / stride) * stride) for scale in config.tta_scales}
            mirrored = (False, True)
        overlap = round(config.slice_overlap * (config.slices or 0))
        return cls(tuple(sorted(sizes)), mirrored, config.slices, overlap, config.slice_whole)

    @property
    def per_window(self) -> int:
        """The number of views of each window."""
        return len(self.image_sizes) * len(self.mirrored)

    def windows(self, size: Size) -> list[Window]:
        """The whole image, if wanted or no larger than a slice; slices in reading order."""
        return _windows(*size, self.slices, self.overlap, self.whole)

    def views(self, size: Size) -> list[View]:
        """All views of an image of ``size``: ``per_window`` for each of its windows, in order."""
        return [
            View(window, mirrored, image_size)
            for window in self.windows(size)
            for image_size in self.image_sizes
            for mirrored in self.mirrored
        ]

    def seen(self, size: Size) -> NDArray[np.float64]:
        """The windows (V, 4) of the views of an image, infinite where the image itself ends."""
        height, width = size
        windows = np.repeat(np.array(self.windows(size), dtype=np.float64), self.per_window, axis=0)
        ends = windows == (0, 0, width, height)
        return np.where(ends, [-np.inf, -np.inf, np.inf, np.inf], windows)


@lru_cache(maxsize=4096)
def _windows(height: int, width: int, slices: int | None, overlap: int, whole: bool) -> list[Window]:
    """See Looks.windows. Most images of a set share a few sizes."""
    if slices is None or max(height, width) <= slices:
        return [(0, 0, width, height)]
    rows, columns = (_spans(side, slices, overlap) for side in (height, width))
    tiles = [(left, top, right, bottom) for top, bottom in rows for left, right in columns]
    return [(0, 0, width, height), *tiles] if whole else tiles


def _spans(length: int, side: int, overlap: int) -> list[tuple[int, int]]:
    """Spans of ``side`` that cover 0..length evenly; neighbours share ``overlap`` or more."""
    if length <= side:
        return [(0, length)]
    gaps = -(-(length - side) // max(1, side - overlap))
    starts = [(length - side) * number // gaps for number in range(gaps + 1)]
    return [(start, start + side) for start in starts]
