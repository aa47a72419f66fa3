"""The image size of each training step."""

from __future__ import annotations

import math

import numpy as np

from data.errors import DataError


class MultiScale:
    """The image size of each optimiser step: a random multiple of ``stride`` in a range.

    The size depends on (seed, step) alone, so all ranks and a resumed run agree. Step 0 has the
    largest size, so memory runs out at once or never. ``low`` and ``high`` are factors on
    ``image_size``; 1 and 1 fix the size.
    """

    def __init__(self, image_size: int, low: float, high: float, stride: int, seed: int) -> None:
        if image_size % stride:
            below = max(image_size // stride * stride, stride)
            raise DataError(
                f"train.image_size={image_size} is not a multiple of the network's stride {stride}. "
                f"fix: train.image_size={below} or {image_size // stride * stride + stride}"
            )
        self.stride = stride
        self.seed = seed
        self.smallest = max(1, round(image_size * low / stride))  # in strides
        self.largest = max(1, round(image_size * high / stride))

    def size(self, step: int) -> tuple[int, int]:
        """Return height and width in pixels for an optimiser step, counted from 0 over the run."""
        if step == 0 or self.smallest == self.largest:
            side = self.largest
        else:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(step,))))
            side = int(generator.integers(self.smallest, self.largest + 1))
        return side * self.stride, side * self.stride

    def rectangle(self, image_size: int, height: float, width: float) -> tuple[int, int]:
        """Turn shares of the image size into height, width in pixels, multiples of the stride."""
        rows, columns = (math.ceil(share * image_size / self.stride - 1e-6) for share in (height, width))
        return rows * self.stride, columns * self.stride

    def most_pixels(self, height: float, width: float) -> int:
        """Return the area in pixels of such a rectangle at the largest image size."""
        rows, columns = self.rectangle(self.largest * self.stride, height, width)
        return rows * columns
