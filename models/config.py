"""Options of the network (``model.*``), published weights, options of losses. Imports no torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import yaml
from msgspec import Meta

from models.cfg import ZOO, ZOO_FOLDER, ModelError

MAX_SCALE_X_Y = 100  # cells
MIN_ANCHOR, MAX_ANCHOR = 0.01, 1_000_000  # pixels
MIN_DECOUPLED_SCALE = 3  # scale_x_y from which boxes may be centred a whole cell away, as loss=yolox needs it
AUTO = "auto"  # a value of model.anchors and of loss

IouKind = StrEnum("IouKind", "iou giou diou ciou")
NotNegative = Annotated[float, Meta(ge=0)]
Overlap = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]

COCO = "coco"  # a value of model.weights
BACKBONE = "backbone"  # a value of model.weights and of model.freeze
COCO_NAMES = ZOO_FOLDER / "coco.names"
# Darknet keeps VOC's words; COCO's own annotations have these.
COCO_SYNONYMS = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
LICENCE = (
    "Darknet's authors put theirs in the public domain; those of YOLOX and timm have the Apache licence.\n"
    "The pictures of COCO and ImageNet that they learnt from have licences of their own."
)


class Published(NamedTuple):
    """A file of weights: of a whole network, trained on COCO, or of a backbone."""

    networks: list[str]  # of the zoo
    alias: str  # the value of model.weights that stands for it
    url: str
    size: int | None = None  # in bytes; None: not published
    sha1: str | None = None  # None: not published
    sha256: str | None = None  # its first digits

    @property
    def file_name(self) -> str:
        """Its name where it is published, and in the cache."""
        return self.url.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Its name in scripts.get_weights."""
        return self.file_name.removesuffix(".weights")


PUBLISHED = [Published(**entry) for entry in yaml.safe_load((ZOO_FOLDER / "published.yaml").read_text())]
ALIASES = frozenset(entry.alias for entry in PUBLISHED)


def find_published(weights: str, network: str, width: float) -> Published | None:
    """The file that ``model.weights`` stands for; None if it is not an alias.

    Raises ModelError if none is published for ``model.cfg`` and ``model.width``.
    """
    if weights not in ALIASES:
        return None
    for entry in PUBLISHED:
        if weights == entry.alias and network in entry.networks and width == 1:
            return entry
    zoo = sorted({name for entry in PUBLISHED if entry.alias == weights for name in entry.networks})
    published = f"is published for {', '.join(zoo)} with model.width=1"
    given = f"model.cfg={network} and model.width={width:g}"
    raise ModelError(f"model.weights={weights} {published}, not for {given}", "model.weights=<file>")


class PositivesBy(StrEnum):
    """What ranks the anchors of cells that may learn a box (models/assignment.py)."""

    cost = "cost"  # of class and box; the overlaps set the number of positives (SimOTA)
    alignment = "alignment"  # score * overlap^6 (task-aligned, Feng et al. 2021)


def about(meaning: str) -> Any:
    """A field of an option without a default, as in data/config.py; --help shows the meaning."""
    return field(metadata={"about": " ".join(meaning.split())})


@dataclass
class ModelConfig:
    """Which network (keys ``model.*``)."""

    cfg: str = about("a name in models/zoo, or the path of a Darknet .cfg")
    width: Annotated[float, Meta(gt=0, le=8)] = about("""factor for the filters of all convolutions but those
        of the heads""")
    anchors: Any = about("""pairs [width, height] in pixels, for all [yolo] sections; null: those of the
        checkpoint or the .cfg; auto: fitted to the training set at train.image_size when a training starts,
        if those of the .cfg miss 30 % of its boxes""")
    box_bins: int | None = about("""bins of the distribution that a decoupled head predicts for each side of a
        box (DFL); 0: boxes as Darknet has them; null: 16 in networks of the zoo that have such heads, else as
        in the .cfg""")
    weights: str | None = about("""initial weights: coco, backbone or timm:<name> (see scripts.get_weights
        list), Darknet .weights (whole or cut), what ckpt= of eval.py takes, or a .pt state dict. Heads for
        other classes keep boxes, objectness and the classes of the same names, if the weights name theirs""")
    freeze: Any = about("""how many of the first layers keep their initial weights and statistics; backbone:
        those before the neck and the heads, in networks of the zoo""")

    def __post_init__(self) -> None:
        are_sizes = isinstance(self.anchors, list) and all(map(_is_size, self.anchors))
        if self.anchors not in (None, AUTO) and not are_sizes:
            kinds = f"pairs [width, height] in {MIN_ANCHOR}..{MAX_ANCHOR} pixels, {AUTO} or null"
            raise ValueError(f"model.anchors must be {kinds}, got {self.anchors}")
        if self.frozen_layers() < 0:
            raise ValueError(f"model.freeze must be 0 or more, got {self.freeze}")
        self.published()

    def frozen_layers(self) -> int:
        """``freeze`` as a number of layers. Raises ValueError for other words and types."""
        if self.freeze == BACKBONE and self.cfg in ZOO:
            return ZOO[self.cfg].backbone_layers
        if type(self.freeze) is not int:
            choices = f"a number of layers or {BACKBONE}, which is known for {', '.join(ZOO)}"
            raise ValueError(f"model.freeze must be {choices}, got {self.freeze} for {self.cfg}")
        return self.freeze

    def bins(self) -> int | None:
        """``box_bins`` for the [yolo] sections; None: as in the .cfg."""
        return ZOO[self.cfg].box_bins if self.box_bins is None and self.cfg in ZOO else self.box_bins

    def published(self) -> Published | None:
        """The published file that ``weights`` names, or None; see find_published."""
        return None if self.weights is None else find_published(self.weights, self.cfg, self.width)


def _is_size(pair: Any) -> bool:
    are_numbers = isinstance(pair, list) and {*map(type, pair)} <= {int, float}
    return are_numbers and len(pair) == 2 and min(pair) >= MIN_ANCHOR and max(pair) <= MAX_ANCHOR


@dataclass
class LossConfig:
    """The option of every loss; loss=darknet has its others in the .cfg."""

    name: str = about("follows from loss=<choice>")


@dataclass
class AutoLossConfig(LossConfig):
    """Weights and options of the loss that suits the heads (keys ``loss.*``).

    It is yolox where scale_x_y lets centres lie in other cells, as in the decoupled networks, else
    yolov3. null: the value of conf/loss/yolox.yaml or yolov3.yaml.
    """

    box: NotNegative | None = about("weight of the box term")
    objectness: NotNegative | None = about("weight of the objectness term")
    classification: NotNegative | None = about("""weight of the class term; with yolov3 that at 80 classes,
        scaled by classes / 80""")
    iou: IouKind | None = about("overlap measure of the box term")
    anchor_iou: Overlap | None = about("yolov3: a box matches an anchor if the IoU of their shapes is higher")
    dfl: NotNegative | None = about("yolox: weight, relative to box, of the distribution focal loss (model.box_bins)")
    l1: NotNegative | None = about("""yolox: weight, relative to box, of the L1 distance of boxes in the
        epochs without mosaics""")
    positives: Count | None = about("yolox: how many cells may learn each box, of those that reach its centre")
    positives_by: PositivesBy | None = about("""yolox: what ranks them: cost of class and box (SimOTA, where
        as many learn as the largest overlaps add up to), or alignment, score * overlap^6 (task-aligned)""")


@dataclass
class WeightedLoss(LossConfig):
    """The options of both losses of boxes, objectness and classes (keys ``loss.*``)."""

    box: NotNegative = about("weight of the box term")
    objectness: NotNegative = about("weight of the objectness term")
    classification: NotNegative = about("""weight of the class term; with loss=yolov3 that at 80 classes,
        scaled by classes / 80""")
    iou: IouKind = about("overlap measure of the box term")


@dataclass
class YoloLossConfig(WeightedLoss):
    """Options of the YOLOv3-SPP loss."""

    anchor_iou: Overlap = about("a box matches an anchor if the IoU of their shapes is higher")


@dataclass
class YoloxLossConfig(WeightedLoss):
    """Options of the YOLOX loss."""

    dfl: NotNegative = about("weight, relative to box, of the distribution focal loss (model.box_bins)")
    l1: NotNegative = about("weight, relative to box, of the L1 distance of boxes in the epochs without mosaics")
    positives: Count = about("how many cells may learn each box, of those that reach its centre")
    positives_by: PositivesBy = about("""what ranks them: cost of class and box (SimOTA, where as many learn
        as the largest overlaps add up to), or alignment, score * overlap^6 (task-aligned)""")
