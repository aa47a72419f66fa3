"""Settings of the data set (keys ``data.*``).

Fields carry no defaults: YAML holds every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from data.index.classes import NAME_FILES, read_names


class DataFormat(StrEnum):
    """How the annotations are stored; ``shapes`` is a COCO set that this project draws on first use."""

    coco = "coco"
    voc = "voc"
    yolo = "yolo"
    shapes = "shapes"


class OnError(StrEnum):
    """What to do about a bad image or box; each names what it acts on.

    ``clip`` cuts training boxes that reach out of their image, and stops at anything else. ``stop`` stops at those,
    too. ``skip`` cuts what can be cut and leaves the rest out. pycocotools scores the boxes of a validation set as they
    stand, without area or outside their image; so do ``clip`` and ``skip``, while ``stop`` refuses them.
    """

    clip = "clip"
    stop = "stop"
    skip = "skip"


class OnBadFile(StrEnum):
    """What predict.py does about a file that cannot be read: ``stop`` names it, ``skip`` leaves it out and says so."""

    stop = "stop"
    skip = "skip"


class Exif(StrEnum):
    """Whether images are turned upright as their EXIF tag says: see data/images/orientation.py."""

    apply = "apply"
    ignore = "ignore"


class Resize(StrEnum):
    """How an image becomes network input: ``letterbox`` keeps its aspect and pads, ``stretch`` fills a square."""

    letterbox = "letterbox"
    stretch = "stretch"


class ImageCache(StrEnum):
    """Where decoded images are kept: one copy for all processes of a node, in memory or in a file in data.index_dir.

    The file stays, and serves the next run as long as the images are the same.
    """

    none = "none"
    ram = "ram"
    disk = "disk"


@dataclass
class SplitConfig:
    """One part of a data set. Relative paths start at ``data.root``.

    Of voc and yolo a part may have several sources: a list of paths, and one folder for all or one for each.
    """

    annotations: Any  # coco: the instances json; voc: a list of image names, such as ImageSets/Main/train.txt, or a
    # folder of xml files; yolo: a list of image paths or a folder of images; null: what data.root says
    images: Any  # coco: the folder that file_name starts from; voc: the folder of JPEGImages and Annotations, or of the
    # images themselves; yolo: the folder that relative paths of a list start from

    def pairs(self) -> list[tuple[str, str]]:
        """The sources: annotations and images of each. Raises ``ValueError`` where the two do not fit."""
        annotations, images = (_texts(getattr(self, key), key) for key in ("annotations", "images"))
        if len(images) == 1:
            images = images * len(annotations)
        if len(images) != len(annotations):
            raise ValueError(f"images holds {len(images)} folders for {len(annotations)} annotations: one, or as many")
        return list(zip(annotations, images, strict=True))


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
    root: str  # folder of the data set; yolo: also its data.yaml or obj.data
    train: SplitConfig
    val: SplitConfig
    split: float | None  # share of the training images that make up the validation set instead of val; null: none,
    split_seed: int  # chosen by a hash of this and their file names
    names: Any  # the classes, in order, or a file that lists them, which is replaced by its list here; null: all that
    # the json (by id) or the data.yaml lists
    shapes: ShapesConfig | None
    single_class: bool  # every object is of one class, "object"
    outlines: bool  # read the polygons around objects, which augment.copy_paste needs; coco only
    exif: Exif
    on_error: OnError
    workers: int  # processes that load images for one rank; 0: the training process itself
    cache: ImageCache
    index_dir: str  # folder for the indices made from the annotations

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"data.workers must be 0 or more, got {self.workers}")
        if self.format == DataFormat.shapes and self.shapes is None:
            raise ValueError("data.format=shapes needs data.shapes: the number of images, their size and a seed")
        if self.split is not None and not 0 < self.split < 1:
            raise ValueError(f"data.split must lie between 0 and 1, as 0.1 for a tenth, or be null, got {self.split}")
        for split in ("train", "val") if self.split is None else ("train",):
            self._check_split(split)
        if self.outlines and self.format not in (DataFormat.coco, DataFormat.shapes):
            raise ValueError(f"data.outlines=true needs annotations with masks, which format={self.format} has not")
        if self.format == DataFormat.voc and self.names is None:
            raise ValueError("data.format=voc needs data.names: its files hold no list of the classes")
        if isinstance(self.names, str):
            self.names, _ = read_names(self._names_file(self.names))
        if self.names is not None:
            if not isinstance(self.names, list) or not self.names:
                raise ValueError("data.names must hold at least one class, or be null")
            odd = [name for name in self.names if isinstance(name, bool) or not isinstance(name, str | int | float)]
            if odd:
                raise ValueError(f"data.names holds {odd[0]!r}. fix: make it a text, in quotes")
            self.names = [str(name) for name in self.names]
            if len(set(self.names)) < len(self.names):
                twice = next(name for name in self.names if self.names.count(name) > 1)
                raise ValueError(f"data.names lists {twice!r} twice")

    def _names_file(self, name: str) -> Path:
        """The file of ``data.names``: from the data set's folder on, or from the current one."""
        root = Path(self.root)
        tried = [folder / name for folder in (root if root.is_dir() else root.parent, Path())]
        found = next((path for path in tried if path.is_file()), None)
        if found is None:
            raise ValueError(f"data.names={name}: there is no {tried[0]}, nor {tried[1]}. fix: a list, or {NAME_FILES}")
        return found

    def _check_split(self, split: str) -> None:
        part: SplitConfig = getattr(self, split)
        if part.annotations is None and self.format == DataFormat.yolo:
            return
        try:
            pairs = part.pairs()
        except ValueError as error:
            raise ValueError(f"data.{split}.{error}") from error
        if len(pairs) > 1 and self.format not in (DataFormat.voc, DataFormat.yolo):
            raise ValueError(
                f"data.{split}.annotations lists {len(pairs)} files: format={self.format} reads one. fix: merge them"
            )


def _texts(value: Any, key: str) -> list[str]:
    """A text, or a list of texts, as a list."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        raise ValueError(f"{key} must be a path or a list of paths, got {value!r}")
    return values
