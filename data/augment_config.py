"""Settings of the augmentation (keys ``augment.*``).

Fields carry no defaults: YAML holds every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Colour(StrEnum):
    """Where the colours of training images are changed: ``cpu`` as a sample is made, ``device`` before the network."""

    cpu = "cpu"
    device = "device"


@dataclass
class AugmentConfig:
    """Random changes to training images (keys ``augment.*``); all zero is a plain letterboxed image."""

    mosaic: float  # probability that several images are put together into one
    mosaic_nine: float  # share of the mosaics that are made of nine images; the others are made of four
    mixup: float  # probability that a sample is blended with another one
    mixup_beta: float  # the first one's share is drawn from a beta distribution with both parameters so
    copy_paste: float  # probability that objects of another image are copied in; needs data.outlines=true
    close_mosaic_epochs: int  # the last epochs do without mosaics, mixtures and copied objects,
    close_mosaic_max_fraction: float  # but never more than this share of the training
    tile_pool: int  # the other images of a mosaic come from this many neighbours in the epoch's order; 0: from all
    degrees: float  # rotation, drawn from -degrees..degrees
    translate: float  # shift, drawn from -translate..translate times the side of the image
    scale: float  # zoom, drawn from 1 - scale..1 + scale
    shear: float  # degrees, drawn from -shear..shear along each axis
    perspective: float  # tilt, drawn from -perspective..perspective along each axis: by how much a side recedes
    flip_horizontal: float  # probability
    flip_vertical: float  # probability
    hsv_hue: float  # gain of the hue, drawn from 1 - hsv_hue..1 + hsv_hue
    hsv_saturation: float  # the same of the saturation
    hsv_value: float  # the same of the value
    colour: Colour  # where hue, saturation and value are changed
    min_visible: float  # a box is kept where more than this share of it stays in the picture

    def __post_init__(self) -> None:
        shares = (
            "mosaic",
            "mosaic_nine",
            "mixup",
            "copy_paste",
            "close_mosaic_max_fraction",
            "flip_horizontal",
            "flip_vertical",
        )
        for key in (*shares, "hsv_hue", "hsv_saturation", "hsv_value"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"augment.{key} must lie in 0..1, got {getattr(self, key)}")
        for key, limit in (("scale", 1), ("translate", 1), ("shear", 90), ("min_visible", 1), ("perspective", 0.2)):
            if not 0 <= getattr(self, key) < limit:
                raise ValueError(f"augment.{key} must be at least 0 and below {limit}, got {getattr(self, key)}")
        if not 0 <= self.degrees <= 180:
            raise ValueError(f"augment.degrees must lie in 0..180, got {self.degrees}")
        for key in ("close_mosaic_epochs", "tile_pool"):
            if getattr(self, key) < 0:
                raise ValueError(f"augment.{key} must be 0 or more, got {getattr(self, key)}")
        if not self.mixup_beta > 0:
            raise ValueError(f"augment.mixup_beta must be above 0, got {self.mixup_beta}")
        # The horizon of a tilted plane must stay outside of the sample.
        if self.perspective * (1 + 2 * self.translate) > 0.5 * (1 - self.scale):
            largest = 0.5 * (1 - self.scale) / (1 + 2 * self.translate)
            raise ValueError(
                f"augment.perspective must be at most {largest:.3g} with this scale and translate, "
                f"got {self.perspective}"
            )

    def plain_epochs(self, epochs: int) -> int:
        """How many of the last of ``epochs`` do without mosaics and mixtures."""
        return min(self.close_mosaic_epochs, int(self.close_mosaic_max_fraction * epochs))
