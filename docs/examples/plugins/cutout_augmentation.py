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
    top, left = generator.integers((height - side + 1, width - side + 1))
    if generator.random() >= PROBABILITY:
        return sample
    sample.image[top : top + side, left : left + side] = 114
    inside = sample.boxes_xyxy.clip((left, top) * 2, (left + side, top + side) * 2)
    seen = (inside != sample.boxes_xyxy).any(axis=1)
    return Sample(sample.image, sample.boxes_xyxy[seen], sample.classes[seen])


AUGMENTATIONS["cutout"] = cutout
