"""Options of the augmentation (keys ``augment.*``). YAML holds every value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Colour(StrEnum):
    """Where colour changes run: per sample on the ``cpu``, or per batch on the ``device``.

    ``auto``, which the training resolves, is the device if that is a GPU.
    """

    auto = "auto"
    cpu = "cpu"
    device = "device"


@dataclass
class AugmentConfig:
    """Random changes to training images (keys ``augment.*``); all zero: a plain letterbox."""

    mosaic: float  # probability that a sample is a mosaic of four or nine images
    mosaic_nine: float  # share of the mosaics, 0..1, made of nine images; the others have four
    mixup: float  # probability that a sample is blended with a second one
    close_mosaic_epochs: int  # number of final epochs without mosaic and mixup, at most a quarter of all epochs
    tile_pool: int  # mosaics draw their other images from a block of this many neighbours in the
    # epoch's order, which saves decoding; 0: from all images
    degrees: float  # rotation in degrees, drawn from -degrees..degrees
    translate: float  # shift in input sides, drawn from -translate..translate along each axis
    scale: float  # zoom factor, drawn from 1 - scale..1 + scale
    shear: float  # shear in degrees, drawn from -shear..shear along each axis
    perspective: float  # tilt, drawn from -perspective..perspective along each axis: the relative
    # change of depth across the input
    flip_horizontal: float  # probability of a left-right flip
    flip_vertical: float  # probability of an upside-down flip
    hsv_hue: float  # gain on the hue, drawn from 1 - hsv_hue..1 + hsv_hue
    hsv_saturation: float  # gain on the saturation, drawn from
    # 1 - hsv_saturation..1 + hsv_saturation
    hsv_value: float  # gain on the value (brightness), drawn from 1 - hsv_value..1 + hsv_value
    colour: Colour  # where the HSV gains are applied: per sample on the cpu, or per batch on the
    # device; auto: on the device if it is a GPU; a resumed run stays with what it had
    min_visible: float  # keep a box if more than this share of its area, 0..1, stays visible

    def __post_init__(self) -> None:
        shares = (
            "mosaic",
            "mosaic_nine",
            "mixup",
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
        # The horizon of a tilted plane must stay outside the sample.
        if self.perspective * (1 + 2 * self.translate) > 0.5 * (1 - self.scale):
            largest = 0.5 * (1 - self.scale) / (1 + 2 * self.translate)
            raise ValueError(
                f"augment.perspective must be at most {largest:.3g} with this scale and translate, "
                f"got {self.perspective}"
            )

    def plain_epochs(self, epochs: int) -> int:
        """Return how many final epochs, out of ``epochs``, go without mosaics and mixup."""
        return min(self.close_mosaic_epochs, int(0.25 * epochs))
