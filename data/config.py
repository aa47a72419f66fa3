"""Options of the data set (keys ``data.*``). YAML holds every value; fields have no defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from data.set_files import NAME_FILES, class_names, read_names

AUTO = "auto"  # of data.workers


class DataFormat(StrEnum):
    """How the annotations are stored; ``shapes`` is a COCO set drawn on first use."""

    coco = "coco"
    voc = "voc"
    yolo = "yolo"
    shapes = "shapes"


# Of plugins, by name: called with the annotations and the folder of the images, they return a COCO
# dictionary with "images", "annotations" and "categories".
FORMATS: dict[str, Callable[[Path, Path], Mapping[str, Any]]] = {}


class OnError(StrEnum):
    """What to do about a bad image or box; each choice names the files it acts on.

    ``clip`` clips training boxes that extend beyond their image and stops at any other fault.
    ``stop`` stops at those boxes as well. ``skip`` clips such boxes and leaves out everything
    else that is bad. pycocotools scores validation boxes as annotated, even those without area or
    outside their image. ``clip`` and ``skip`` do the same; ``stop`` refuses them.
    """

    clip = "clip"
    stop = "stop"
    skip = "skip"


class OnBadFile(StrEnum):
    """What predict.py does with an unreadable file: ``stop`` there, or warn and ``skip`` it."""

    stop = "stop"
    skip = "skip"


class Exif(StrEnum):
    """Whether EXIF tags turn images upright; see data/headers.py."""

    apply = "apply"
    ignore = "ignore"


class Resize(StrEnum):
    """How an image becomes network input.

    ``letterbox`` keeps the aspect ratio and pads; ``stretch`` fills a square.
    """

    letterbox = "letterbox"
    stretch = "stretch"


class ImageCache(StrEnum):
    """Where decoded images are cached: one copy per node, in memory or in ``data.index_dir``.

    The file on disk outlives the run. The next run uses it if the images have not changed.
    """

    none = "none"
    ram = "ram"
    disk = "disk"


@dataclass
class SplitConfig:
    """One split of a data set. Relative paths start at ``data.root``.

    In voc and yolo, annotations may be a list of paths; images is then one folder, or one for each.
    """

    annotations: Any  # coco: the instances json; voc: a file of image names, such as
    # ImageSets/Main/train.txt, or a folder of xml files; yolo: a file of image paths, a folder of
    # images, or null for the split that data.root lists
    images: Any  # coco: the folder that file_name is relative to; voc: the folder that holds
    # JPEGImages and Annotations, or the folder of the images; yolo: the folder that listed paths
    # are relative to

    def pairs(self) -> list[tuple[str, str]]:
        """Pair annotations and images. Raises ``ValueError`` if their numbers do not match."""
        annotations, images = (_texts(getattr(self, key), key) for key in ("annotations", "images"))
        if len(images) == 1:
            images = images * len(annotations)
        if len(images) != len(annotations):
            raise ValueError(
                f"images holds {len(images)} folders for {len(annotations)} annotations. fix: one, or as many"
            )
        return list(zip(annotations, images, strict=True))


@dataclass
class ShapesConfig:
    """The drawn data set (keys ``data.shapes.*``)."""

    train_images: int  # number of training images
    val_images: int  # number of validation images
    image_size: int  # average square root of an image's area, in pixels

    def __post_init__(self) -> None:
        for key in ("train_images", "val_images"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.shapes.{key} must be 1 or more, got {getattr(self, key)}")
        if not 64 <= self.image_size <= 4096:
            raise ValueError(f"data.shapes.image_size must lie in 64..4096 pixels, got {self.image_size}")


@dataclass
class DataConfig:
    """A data set and how it is read (keys ``data.*``)."""

    name: str  # name of the data set, used in messages and as the default folder below runs/
    format: DataFormat | str  # annotation format; shapes: a COCO set drawn on first use; text: of a plugin
    root: str  # folder of the data set; yolo: or its data.yaml or obj.data
    train: SplitConfig
    val: SplitConfig
    split: float | None  # share of the training images, 0..1, held out for validation in place of
    # data.val, by a hash of their file names; null: use data.val
    names: Any  # class names in order, or a file that lists them; null: all classes of the json
    # (by id) or of the data.yaml
    shapes: ShapesConfig | None
    single_class: bool  # treat every object as the one class "object"
    exif: Exif  # apply: turn images upright by their EXIF tag, unless their annotated sizes are
    # those of the stored pixels; ignore: read all images as stored
    on_error: OnError  # clip: clip training boxes at the image edge, stop at other faults; stop:
    # stop at any bad image or box; skip: clip boxes and leave out what is bad
    workers: Any  # image-loading processes per rank; 0: load in the training process; auto: by the
    # cores of the rank
    cache: ImageCache  # cache decoded images, one copy per node: in memory (ram) or in a file in
    # data.index_dir that later runs reuse (disk)
    index_dir: str  # folder of the indices built from annotations, and of data.cache=disk

    @property
    def is_drawn(self) -> bool:
        """Whether the project draws the set itself."""
        return self.format == DataFormat.shapes

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):  # a folder below runs/ has it
            raise ValueError(f"data.name must be a name without /, got {self.name!r}. fix: another data.name")
        self._check_format()
        if self.workers != AUTO and not (type(self.workers) is int and self.workers >= 0):
            raise ValueError(f"data.workers must be 0 or more, or {AUTO}, got {self.workers}")
        if self.split is not None and not 0 < self.split < 1:
            raise ValueError(f"data.split must lie between 0 and 1, or be null, got {self.split}")
        for split in ("train", "val") if self.split is None else ("train",):
            self._check_split(split)
        if self.format == DataFormat.voc and self.names is None:
            raise ValueError("data.format=voc needs data.names: VOC files do not list the classes")
        if isinstance(self.names, str):
            self.names, _ = read_names(self._names_file(self.names))
        if self.names is not None:
            self.names = class_names(self.names, "data.names")

    def line(self) -> str:
        """What is read, in a few words for a log."""
        return f"data: {self.name}, {self.format} of {self.root}"

    def check_two_sets(self) -> None:
        """Raise ``ValueError`` if training and validation read the same annotations."""
        if self.split is None and self.train == self.val and self.train.annotations is not None:
            raise ValueError(
                f"data={self.name} has no validation images of its own: data.train and data.val are the same. fix: "
                "data.split=0.1 holds out a tenth, or name them by data.val.annotations and data.val.images"
            )

    def _check_format(self) -> None:
        if self.format in DataFormat.__members__:
            self.format = DataFormat(self.format)
        elif self.format not in FORMATS:
            choices = ", ".join((*DataFormat, *FORMATS))
            raise ValueError(f"data.format must be {choices}, or that of one of plugins=, got {self.format}")
        if self.is_drawn and self.shapes is None:
            needs = "data.shapes: the number of images and their size"
            raise ValueError(f"data.format={self.format} needs {needs}")

    def _names_file(self, name: str) -> Path:
        """Find the file of ``data.names``, relative to the data set's or the current folder."""
        root = Path(self.root)
        candidates = [folder / name for folder in (root if root.is_dir() else root.parent, Path())]
        existing = next((path for path in candidates if path.is_file()), None)
        if existing is None:
            raise ValueError(
                f"data.names={name}: found neither {candidates[0]} nor {candidates[1]}. fix: a list, or {NAME_FILES}"
            )
        return existing

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
    """Return a string, or a list of strings, as a list."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        raise ValueError(f"{key} must be a path or a list of paths, got {value!r}")
    return values


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

    def __post_init__(self) -> None:
        shares = ("mosaic", "mosaic_nine", "mixup", "flip_horizontal", "flip_vertical")
        for key in (*shares, "hsv_hue", "hsv_saturation", "hsv_value"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"augment.{key} must lie in 0..1, got {getattr(self, key)}")
        for key, limit in (("scale", 1), ("translate", 1), ("shear", 90), ("perspective", 0.2)):
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
