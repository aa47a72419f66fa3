"""Types of the configurations of the tools in scripts/ (see conf/schema.py, which holds those of
the programs).
"""

from __future__ import annotations

from dataclasses import dataclass

from data.augment_config import AugmentConfig
from data.config import DataConfig
from models.config import ModelConfig


@dataclass
class CheckDataConfig:
    """Everything that scripts/check_data.py reads."""

    image_size: int  # side in pixels that the network will be trained at
    min_iou: float  # recall counts boxes that overlap an anchor by more, as loss.anchor_iou
    threads: int | None  # that decode images; null: one for each core
    pictures: int  # images of each sheet; 0: draw nothing
    seed: int  # of the images on the sheets
    out: str | None  # folder for the report; null: runs/check_data/<name>_<date_time>
    debug: bool
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size must be 1 or more, got {self.image_size}")
        if not 0 <= self.min_iou < 1:
            raise ValueError(f"min_iou must be 0 or more and below 1, got {self.min_iou}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be 1 or more, or null, got {self.threads}")
        for key in ("pictures", "seed"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must be 0 or more, got {getattr(self, key)}")


@dataclass
class ConvertConfig:
    """Everything that scripts/convert_weights.py reads; the direction follows from ``weights`` or
    ``ckpt``.
    """

    weights: str | None  # Darknet .weights, or a .pt state dict of another system, for the network of ``model``
    ckpt: str | None  # a checkpoint file, or a run folder (its best.pt)
    out: str  # from weights: a .pt checkpoint; from ckpt, or with up_to_layer: Darknet .weights
    names: str | None  # class names of weights: a text file, one a line, or a COCO json; null: numbers
    image_size: int | None  # side in pixels that the checkpoint is used with; null: that of the .cfg
    up_to_layer: int | None  # write layers 0 .. up_to_layer - 1 only, counted as Darknet's partial command does
    seen: int | None  # images trained on, for the header of the .weights file; null: as it was
    cfg: str | None  # write the .cfg that fits the .weights file, too
    debug: bool
    model: ModelConfig  # the network of ``weights``; a checkpoint holds its own

    def __post_init__(self) -> None:
        for key, least in (("image_size", 1), ("up_to_layer", 1), ("seen", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} must be {least} or more, or null, got {value}")


@dataclass
class ConvertDataConfig:
    """Everything that scripts/convert_data.py reads."""

    csv: str  # one row for each box, with a header that data/formats/csv_boxes.py knows
    images: str | None  # folder of the images; null: that of the CSV file
    out: str  # the COCO json
    names: str | None  # file that gives the order of the classes, or their names; null: sorted
    corners_in_bbox: bool  # a column bbox holds x1, y1, x2, y2; false: x, y, width, height
    empty: bool  # images of the folder that no row names are part of the set, too
    debug: bool


@dataclass
class CfgInfoConfig:
    """Everything that scripts/cfg_info.py reads."""

    num_classes: int | None  # null: that of the .cfg
    image_size: int | None  # side in pixels; null: height and width of the .cfg
    debug: bool
    model: ModelConfig

    def __post_init__(self) -> None:
        for key in ("num_classes", "image_size"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} must be 1 or more, or null, got {getattr(self, key)}")


@dataclass
class AnchorsConfig:
    """Everything that scripts/anchors.py reads."""

    image_size: int  # side in pixels that the network will be trained at
    rounds: int  # of random refinement after k-means
    sample: int  # boxes that the search looks at, drawn at random; the figures are for all
    min_iou: float  # recall counts boxes that overlap an anchor by more, as loss.anchor_iou
    seed: int
    out: str | None  # a .yaml for the group model, and a picture beside it; null: print only
    debug: bool
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        for key in ("image_size", "sample"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be 1 or more, got {getattr(self, key)}")
        if self.rounds < 0:
            raise ValueError(f"rounds must be 0 or more, got {self.rounds}")
        if not 0 <= self.min_iou < 1:
            raise ValueError(f"min_iou must be 0 or more and below 1, got {self.min_iou}")
        if self.out is not None and not self.out.endswith(".yaml"):
            raise ValueError(f"out must end in .yaml, got {self.out}")


@dataclass
class ArchiveConfig:
    """A file to fetch and unpack."""

    url: str
    md5: str


@dataclass
class PublicSetConfig:
    """A public data set: where it goes, and its archives in order."""

    root: str
    archives: list[ArchiveConfig]


@dataclass
class GetDataConfig:
    """Everything that scripts/get_data.py reads."""

    name: str  # one of sets
    root: str | None  # folder that the archives are unpacked into; null: that of the set
    keep_archives: bool
    attempts: int  # in a row without a new byte
    timeout_seconds: float  # without a byte
    debug: bool
    sets: dict[str, PublicSetConfig]

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be 1 or more, got {self.attempts}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, got {self.timeout_seconds}")
