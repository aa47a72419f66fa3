"""An augmentation: cutout (DeVries and Taylor 2017), grey squares at random places.

``python train.py plugins=[cutout_augmentation.py]``
"""

import numpy as np

from data.dataset import Sample
from plugins import AUGMENTATIONS

PROBABILITY = 0.5  # that a sample gets a square
SIDE = 0.2  # of the square, as a share of the shorter side of the sample


def cutout(sample: Sample, generator: np.random.Generator) -> Sample:
    """Hide a square; boxes that it covers whole are left out."""
    height, width = sample.image.shape[:2]
    side = round(SIDE * min(height, width))
    top, left = (int(generator.integers(length - side + 1)) for length in (height, width))
    if generator.random() >= PROBABILITY:
        return sample
    sample.image[top : top + side, left : left + side] = 114
    low, high = sample.boxes_xyxy[:, :2], sample.boxes_xyxy[:, 2:]
    hidden = (low >= (left, top)).all(axis=1) & (high <= (left + side, top + side)).all(axis=1)
    return Sample(sample.image, sample.boxes_xyxy[~hidden], sample.classes[~hidden])


AUGMENTATIONS["cutout"] = cutout
