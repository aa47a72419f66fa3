"""Options of the data set (keys ``data.*``). YAML holds every value; fields have no defaults."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from data import remote
from data.errors import DataError, as_started, from_here
from data.layouts import class_names, find_set_file, read_names

# What scripts/get_data.py fetches into these folders, the roots of data=coco and data=voc.
FETCHED = {"datasets/coco": "coco2017 (19 GB)", "datasets/VOCdevkit": "voc2007 and then voc2012 (3 GB)"}

DataFormat = StrEnum("DataFormat", "coco voc yolo shapes")  # shapes: a COCO set drawn on first use
# Readers of plugins, by name: called with the annotations and the folder of the images, they return
# a COCO dictionary with "images", "annotations" and "categories".
FORMATS: dict[str, Callable[[Path, Path], Mapping[str, Any]]] = {}
# clip and skip score validation boxes as annotated, as pycocotools does; stop refuses boxes without
# area or outside their image.
OnError = StrEnum("OnError", "clip stop skip")
OnBadFile = StrEnum("OnBadFile", "stop skip")  # of predict.py
Exif = StrEnum("Exif", "apply ignore")
Resize = StrEnum("Resize", "letterbox stretch")
ImageCache = StrEnum("ImageCache", "none ram disk")
Colour = StrEnum("Colour", "auto cpu device")

_TRAIN_OR_VAL = re.compile(r"(?<![a-z])(trainval|train(ing)?|val(id(ation)?)?)(?![a-z])", re.IGNORECASE)

Pair = tuple[Path, remote.Place]  # annotations, and where their images are

# Limits that conf/compose.py checks, in the words in which it reports them.
Share = Annotated[float, Meta(ge=0, le=1)]
Below1 = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]


def about(meaning: str) -> Any:
    """A field of an option without a default; ``--help`` shows the meaning."""
    return field(metadata={"about": " ".join(meaning.split())})


def must_fit(batch_size: int, micro_batch_size: int, world_size: int) -> None:
    """Raise DataError unless ``world_size`` ranks can share batches of these sizes."""
    if batch_size % world_size:
        fix = f"train.batch_size={-(-batch_size // world_size) * world_size}"
        raise DataError(f"train.batch_size={batch_size} is not a multiple of {world_size} ranks", fix)
    if batch_size % micro_batch_size or micro_batch_size % world_size:
        fitting = (size for size in range(world_size, batch_size + 1, world_size) if batch_size % size == 0)
        nearest = min(fitting, key=lambda size: abs(size - micro_batch_size))
        wanted = f"divide train.batch_size={batch_size} and be a multiple of the ranks ({world_size})"
        raise DataError(f"train.micro_batch_size={micro_batch_size} must {wanted}", f"train.micro_batch_size={nearest}")


@dataclass
class SplitConfig:
    """One split of a data set. Relative paths start at ``data.root``.

    In voc and yolo, annotations may be a list of paths; images is then one folder, or one for each.
    """

    annotations: Any = about("""coco: the instances json; voc: a file of image names, such as
        ImageSets/Main/train.txt, or a folder of xml files; yolo: a file of image paths, a folder of images,
        or null for the split that data.root lists""")
    images: Any = about("""coco: the folder that file_name is relative to, an address (s3://bucket/folder) or
        tar files ("shards/*.tar", s3://bucket/train-*.tar); voc: the folder that holds JPEGImages and
        Annotations, or the folder of the images; yolo: the folder that listed paths are relative to, or an
        address for a file of image paths""")

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """Annotations and the folders of their images. Raises ``ValueError`` with ``key``."""
        lists = []
        for name, value in (("annotations", self.annotations), ("images", self.images)):
            lists.append(value if isinstance(value, list) else [value])
            if set(map(type, lists[-1])) != {str}:
                raise ValueError(f"{key}.{name} must be a path or a list of paths, got {value!r}")
        annotations, images = lists
        for place in images:
            remote.check_address(place, f"{key}.images")
        if len(images) not in (1, len(annotations)):
            count = f"{len(images)} folders for {len(annotations)} annotations"
            raise DataError(f"{key}.images holds {count}", "one, or as many")
        return list(zip(annotations, images * (len(annotations) // len(images)), strict=True))


@dataclass
class ShapesConfig:
    """The drawn data set (keys ``data.shapes.*``)."""

    train_images: Count = about("number of training images")
    val_images: Count = about("number of validation images")
    image_size: Annotated[int, Meta(ge=64, le=4096)] = about("average square root of an image's area, in pixels")


@dataclass(kw_only=True)
class DataConfig:
    """A data set and how it is read (keys ``data.*``)."""

    name: str = about("name of the data set, used in messages and as the default folder below runs/")
    format: DataFormat | str = about("annotation format; shapes: a COCO set drawn on first use; text: of a plugin")
    root: str = about("folder of the data set; yolo: or its data.yaml or obj.data")
    train: SplitConfig
    val: SplitConfig
    split: Annotated[float | None, Meta(gt=0, lt=1)] = about("""share of the training images held out for
        validation in place of data.val, by a hash of their file names; null: use data.val""")
    names: Any = about("""class names in order, or a file that lists them; null: all classes of the json (by
        id) or of the data.yaml""")
    classes: Any = about("train and score only these, by name or by number in the set, as in [person,3]; null: all")
    shapes: ShapesConfig | None
    single_class: bool = about('treat every object as the one class "object"')
    exif: Exif = about("""apply: turn images upright by their EXIF tag, unless their annotated sizes are those
        of the stored pixels; ignore: read all images as stored""")
    on_error: OnError = about("""clip: clip training boxes at the image edge, stop at other faults; stop: stop
        at any bad image or box; skip: clip boxes and leave out what is bad, but stop at more than 1 % of
        unreadable images (20 in a small set, or in a row), and at a folder that is gone""")
    workers: Any = about("""image-loading processes per rank; 0: load in the training process; auto: by the
        cores of the rank""")
    cache: ImageCache = about("""cache decoded images, one copy per node: in memory (ram) or in a file in
        data.index_dir that later runs reuse (disk)""")
    cache_gb: Annotated[float, Meta(gt=0)] = about("""of images at an address data.cache=disk keeps the files
        as they are, up to this many gigabytes of each split""")
    index_dir: str = about("folder of the indices built from annotations, and of data.cache=disk")

    def __post_init__(self) -> None:
        steers = {"Cc", "Zl", "Zp"}.intersection(map(unicodedata.category, self.name))  # a terminal
        if "/" in self.name or self.name in ("", ".", "..") or steers:  # it names a folder
            says = f"a name without / and control characters, got {self.name!r}"
            raise DataError(f"data.name must be {says}", "another data.name")
        if self.format in DataFormat.__members__:
            self.format = DataFormat(self.format)
        elif self.format not in FORMATS:
            choices = ", ".join((*DataFormat, *FORMATS))
            raise ValueError(f"data.format must be {choices}, or that of one of plugins=, got {self.format}")
        if self.workers != "auto" and not (type(self.workers) is int and 0 <= self.workers <= 1024):
            raise ValueError(f"data.workers must be >= 0 and <= 1024, or auto, got {self.workers}")
        if self.format == DataFormat.shapes and self.shapes is None:
            raise ValueError(f"data.format={self.format} needs data.shapes: the number of images and their size")
        if self.format == DataFormat.voc and self.names is None:
            raise ValueError("data.format=voc needs data.names: VOC files do not list the classes")
        for split in ("train", "val") if self.split is None else ("train",):
            paths: SplitConfig = getattr(self, split)
            if paths.annotations is None and self.format == DataFormat.yolo:
                continue
            count = len(paths.pairs(f"data.{split}"))
            if count > 1 and self.format not in (DataFormat.voc, DataFormat.yolo):
                says = f"{count} files: format={self.format} reads one"
                raise DataError(f"data.{split}.annotations lists {says}", "merge them")
        if isinstance(self.names, str):
            folder = Path(self.root) if Path(self.root).is_dir() else Path(self.root).parent
            beside = folder / self.names
            self.names, _ = read_names(beside if beside.is_file() else Path(self.names))
        if self.names is not None:
            self.names = class_names(self.names, "data.names")

    def places(self, split: str, root: Path) -> tuple[str, list[Pair]]:
        """The split to read, and its annotations with the folders of their images below ``root``.

        ``split`` is ``train``, ``val`` or ``test``; ``data.split`` takes the first two from
        ``train``. Raises ``DataError`` if a place is missing.
        """
        folder = root.parent if root.is_file() else root
        if split == "test" and self.val.annotations is not None:
            return split, self._places_of_tests(folder)
        split = "train" if self.split is not None and split != "test" else split
        paths: SplitConfig = self.val if split == "test" else getattr(self, split)
        if paths.annotations is None:  # format=yolo, by __post_init__
            if paths.images != ".":
                problem = f"data.{split}.images has no effect on YOLO"
                raise DataError(problem, f"data.{split}.annotations={paths.images}")
            set_file = root if root.is_file() else find_set_file(root)
            if set_file is None:
                fix = "data.root=<such a file>, or data.train.annotations=<a folder of images, or a list of them>"
                raise DataError(f"data.root: there is no data.yaml or obj.data in {root}", fix)
            return split, [(set_file, folder)]
        pairs = []
        for annotations, images in paths.pairs(f"data.{split}"):
            path, place_of_images = folder / annotations, remote.place(folder, images)
            for place, name in ((path, "annotations"), (place_of_images, "images")):
                key = f"data.{split}.{name}"
                if isinstance(place, Path) and not place.exists():
                    raise DataError(f"{key}: there is no {place}", self._fix_missing(split, key, folder))
            if self.format in (DataFormat.coco, DataFormat.shapes) and not path.is_file():
                raise DataError(f"data.{split}.annotations: {path} is not a file", "name the annotation file itself")
            pairs.append((path, place_of_images))
        return split, pairs

    def _places_of_tests(self, root: Path) -> list[Pair]:
        """What is called test where ``data.val``, or ``data.train``, has a name of val or train."""
        for part, key in ((self.val, "data.val"), (self.train, "data.train")):
            pairs = []
            for names, images in part.pairs(key) if part.annotations is not None else ():
                swapped = _TRAIN_OR_VAL.sub("test", names)
                folder = remote.place(root, _TRAIN_OR_VAL.sub("test", images))
                if isinstance(folder, Path) and not folder.exists():
                    folder = root / images
                if (root / swapped).exists() and (swapped != names or Path(names).stem == "test"):
                    pairs.append((root / swapped, folder))
            if pairs:
                return pairs
        fix = "name them by data.val.annotations and data.val.images, and leave split=test out"
        raise DataError(f"data={self.name} has no test images beside {self.val.annotations} of {root}", fix)

    def _fix_missing(self, split: str, key: str, root: Path) -> str:
        for folder, name in FETCHED.items():
            if root == Path(folder).absolute():
                quickstart = "python train.py experiment=quickstart, which draws its own images"
                return as_started(f"data=<your folder>, python -m scripts.get_data {name}, or {quickstart}")
        more = ", or data.split=0.1 to take a tenth of the training images" if split == "val" else ""
        return f"set data.root to the folder of the data set, or {key}{more}"

    def line(self) -> str:
        """Name the data in a line for the log."""
        split = f", data.split={self.split:g}" if self.split is not None else ""
        classes = f", data.classes={self.classes}" if self.classes is not None else ""
        return f"data: {self.name}, {self.format} of {from_here(self.root)}{split}{classes}"

    def check_two_sets(self) -> None:
        """Raise ``ValueError`` if training and validation read the same annotations."""
        if self.split is None and self.train == self.val and self.train.annotations is not None:
            same = "data.train and data.val are the same"
            fix = "data.split=0.1 holds out a tenth, or name them by data.val.annotations and data.val.images"
            raise DataError(f"data={self.name} has no validation images of its own: {same}", fix)


@dataclass
class AugmentConfig:
    """Random changes to training images (keys ``augment.*``); all zero: a plain letterbox."""

    mosaic: Share = about("probability that a sample is a mosaic of four images")
    mixup: Share = about("probability that a sample is blended with a second one")
    close_mosaic_epochs: Whole = about("""final epochs without mosaic and mixup, at most a quarter; with yolox
        L1 counts there""")
    tile_pool: Whole = about("""mosaics draw their other images from a block of this many neighbours in the
        epoch's order, which saves decoding; 0: from all images""")
    degrees: Annotated[float, Meta(ge=0, le=180)] = about("rotation in degrees, drawn from -degrees..degrees")
    translate: Below1 = about("shift in input sides, drawn from -translate..translate along each axis")
    scale: Below1 = about("zoom factor, drawn from 1 - scale..1 + scale")
    shear: Annotated[float, Meta(ge=0, lt=90)] = about("shear in degrees, drawn from -shear..shear along each axis")
    flip_horizontal: Share = about("probability of a left-right flip")
    flip_vertical: Share = about("probability of an upside-down flip")
    hsv_hue: Share = about("gain on the hue, drawn from 1 - hsv_hue..1 + hsv_hue")
    hsv_saturation: Share = about("gain on the saturation, drawn from 1 - hsv_saturation..1 + hsv_saturation")
    hsv_value: Share = about("gain on the value (brightness), drawn from 1 - hsv_value..1 + hsv_value")
    colour: Colour = about("""where the HSV gains are applied: per sample on the cpu, or per batch on the
        device; auto: on the device if it is a GPU; a resumed run keeps its choice""")

    def plain_epochs(self, epochs: int) -> int:
        """Return how many final epochs, out of ``epochs``, go without mosaics and mixup."""
        if not (self.mosaic or self.mixup):
            return epochs
        return min(self.close_mosaic_epochs, int(0.25 * epochs))
