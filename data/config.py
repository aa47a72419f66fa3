"""Settings of the data set (keys ``data.*``) and of its augmentation (``augment.*``).

Fields carry no defaults: YAML holds every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DataFormat(StrEnum):
    """How the annotations are stored; ``shapes`` is a COCO set that this project draws on first use."""

    coco = "coco"
    voc = "voc"
    shapes = "shapes"


class OnError(StrEnum):
    """What to do about a bad image or box: ``stop`` names the first one, ``skip`` leaves them out and reports them."""

    stop = "stop"
    skip = "skip"


class ImageCache(StrEnum):
    """Where decoded images are kept; ``ram`` holds one copy for all processes of a node."""

    none = "none"
    ram = "ram"


@dataclass
class SplitConfig:
    """One part of a data set. Relative paths start at ``data.root``."""

    annotations: str  # coco: the instances json; voc: a list of image names, such as ImageSets/Main/train.txt
    images: str  # coco: the folder that file_name starts from; voc: the folder of JPEGImages and Annotations


@dataclass
class ShapesConfig:
    """The drawn data set (keys ``data.shapes.*``)."""

    train_images: int
    val_images: int
    image_size: int  # pixels: square root of an image's area, on average
    seed: int

    def __post_init__(self) -> None:
        for key in ("train_images", "val_images"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.shapes.{key} must be 1 or more, got {getattr(self, key)}")
        if not 64 <= self.image_size <= 4096:
            raise ValueError(f"data.shapes.image_size must lie in 64..4096 pixels, got {self.image_size}")
        if self.seed < 0:
            raise ValueError(f"data.shapes.seed must be 0 or more, got {self.seed}")


@dataclass
class DataConfig:
    """A data set and how it is read (keys ``data.*``)."""

    name: str
    format: DataFormat
    root: str
    train: SplitConfig
    val: SplitConfig
    names: list[str] | None  # the classes, in order; null: all categories of the json, in the order of their ids
    shapes: ShapesConfig | None
    single_class: bool  # every object is of one class, "object"
    on_error: OnError
    workers: int  # processes that load images for one rank; 0: the training process itself
    cache: ImageCache
    index_dir: str  # folder for the indices made from the annotations

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"data.workers must be 0 or more, got {self.workers}")
        if self.format == DataFormat.shapes and self.shapes is None:
            raise ValueError("data.format=shapes needs data.shapes: the number of images, their size and a seed")
        if self.format == DataFormat.voc and self.names is None:
            raise ValueError("data.format=voc needs data.names: its files hold no list of the classes")
        if self.names is not None:
            if not self.names:
                raise ValueError("data.names must hold at least one class, or be null")
            if len(set(self.names)) < len(self.names):
                twice = next(name for name in self.names if self.names.count(name) > 1)
                raise ValueError(f"data.names lists {twice!r} twice")


@dataclass
class AugmentConfig:
    """Random changes to training images (keys ``augment.*``); all zero is a plain letterboxed image."""

    mosaic: float  # probability that four images are put together into one
    close_mosaic_epochs: int  # the last epochs do without mosaic
    degrees: float  # rotation, drawn from -degrees..degrees
    translate: float  # shift, drawn from -translate..translate times the side of the image
    scale: float  # zoom, drawn from 1 - scale..1 + scale
    shear: float  # degrees, drawn from -shear..shear along each axis
    flip_horizontal: float  # probability
    flip_vertical: float  # probability
    hsv_hue: float  # gain of the hue, drawn from 1 - hsv_hue..1 + hsv_hue
    hsv_saturation: float  # the same of the saturation
    hsv_value: float  # the same of the value
    min_visible: float  # a box is kept where more than this share of it stays in the picture

    def __post_init__(self) -> None:
        for key in ("mosaic", "flip_horizontal", "flip_vertical", "hsv_hue", "hsv_saturation", "hsv_value"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"augment.{key} must lie in 0..1, got {getattr(self, key)}")
        for key, limit in (("scale", 1), ("translate", 1), ("shear", 90), ("min_visible", 1)):
            if not 0 <= getattr(self, key) < limit:
                raise ValueError(f"augment.{key} must be at least 0 and below {limit}, got {getattr(self, key)}")
        if not 0 <= self.degrees <= 180:
            raise ValueError(f"augment.degrees must lie in 0..180, got {self.degrees}")
        if self.close_mosaic_epochs < 0:
            raise ValueError(f"augment.close_mosaic_epochs must be 0 or more, got {self.close_mosaic_epochs}")
