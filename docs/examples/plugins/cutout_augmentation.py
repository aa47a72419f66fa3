"""An augmentation: cutout (DeVries and Taylor 2017), grey squares at random places.

``python train.py plugins=[cutout_augmentation.py] plugin.cutout.probability=0.3``
"""

from dataclasses import dataclass

import numpy as np

from data.batches.changed import Sample
from plugins import augmentation


@dataclass
class Cutout:
    """Where and how often."""

    probability: float = 0.5  # that a sample gets a square
    side: float = 0.2  # of the square, as a share of the shorter side of the sample

    def __post_init__(self) -> None:
        if not (0 <= self.probability <= 1 and 0 < self.side <= 1):
            raise ValueError("probability and side must lie in 0..1")


@augmentation("cutout", Cutout)
def cutout(sample: Sample, generator: np.random.Generator, options: Cutout) -> Sample:
    """Hide a square; boxes that it covers whole are left out."""
    height, width = sample.image.shape[:2]
    side = round(options.side * min(height, width))
    top, left = (int(generator.integers(length - side + 1)) for length in (height, width))
    if generator.random() >= options.probability:
        return sample
    sample.image[top : top + side, left : left + side] = 114
    low, high = sample.boxes_xyxy[:, :2], sample.boxes_xyxy[:, 2:]
    hidden = (low >= (left, top)).all(axis=1) & (high <= (left + side, top + side)).all(axis=1)
    return Sample(sample.image, sample.boxes_xyxy[~hidden], sample.classes[~hidden])
