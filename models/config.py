"""Options of the network (keys ``model.*``), its losses (``loss.*``) and its export.

YAML holds every value; fields have no defaults. Imports no torch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from models.published import BACKBONE, BACKBONE_LAYERS, Published, find_published

MAX_SCALE_X_Y = 100  # cells
FAR = 3  # scale_x_y from which the heads' cells reach others: by one cell and more, as loss=yolox needs it
AUTO = "auto"  # of model.anchors

IouKind = StrEnum("IouKind", ["iou", "giou", "diou", "ciou"])
NotNegative = Annotated[float, ">= 0"]


class PositivesBy(StrEnum):
    """What ranks the anchors of cells that may learn a box (models/assignment.py)."""

    cost = "cost"  # of class and box; the number of positives follows from the overlaps (SimOTA)
    alignment = "alignment"  # score * overlap^6 (task-aligned, Feng et al. 2021)


@dataclass
class ModelConfig:
    """Which network (keys ``model.*``)."""

    cfg: str  # a name of models/zoo, or the path of a Darknet .cfg
    width: Annotated[float, "> 0 and <= 8"]  # factor on the filters of each convolution except the heads'
    anchors: Any  # pairs [width, height] in pixels, for all [yolo] sections; null: as in a checkpoint, or the .cfg;
    # auto: fitted to the training set at train.image_size when a training starts, if those of the
    # .cfg miss 30 % of its boxes
    box_bins: int | None  # of decoupled heads: bins of a distribution for each side of a box (DFL); 0: boxes as Darknet
    # has them; null: 16 in the networks of the zoo, else as in the .cfg
    weights: str | None  # to start from: coco, backbone or timm:<name> (see scripts.get_weights list), Darknet .weights
    # (whole or cut), what ckpt= of eval.py takes, a .pt state dict. Heads for other classes are
    # left out
    freeze: Any  # number of layers, from the first, that keep their initial weights and statistics; backbone: those
    # below the heads and what is only theirs, for networks of the zoo

    def __post_init__(self) -> None:
        if self.anchors not in (None, AUTO) and not _are_sizes(self.anchors):
            raise ValueError(
                f"model.anchors must be pairs [width, height] of pixels above 0, {AUTO} or null, got {self.anchors}"
            )
        if self.frozen_layers() < 0:
            raise ValueError(f"model.freeze must be 0 or more, got {self.freeze}")
        self.published()

    def frozen_layers(self) -> int:
        """``freeze`` as a number; ValueError if it is none and no word for one here."""
        if self.freeze == BACKBONE and self.cfg in BACKBONE_LAYERS:
            return BACKBONE_LAYERS[self.cfg]
        if type(self.freeze) is not int:
            choices = f"{BACKBONE}, which is known for {', '.join(BACKBONE_LAYERS)}"
            raise ValueError(f"model.freeze must be a number of layers or {choices}, got {self.freeze} for {self.cfg}")
        return self.freeze

    def published(self) -> Published | None:
        """The file that ``weights`` is a word for, if it is one; ModelError if there is none."""
        return None if self.weights is None else find_published(self.weights, self.cfg, self.width)


def _are_sizes(pairs: Any) -> bool:
    return isinstance(pairs, list) and all(_are_above_zero(pair) and len(pair) == 2 for pair in pairs)


def _are_above_zero(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)


@dataclass
class LossSection:
    """The option common to all losses: the name that selects one. Darknet's is set by the .cfg."""

    name: str  # follows from loss=<choice>


@dataclass
class AutoLoss(LossSection):
    """Weights and options of the loss that suits the heads (keys ``loss.*``).

    It is yolox where scale_x_y lets centres lie in other cells, as in the decoupled networks, and
    yolov3 elsewhere. null: the value of conf/loss/yolox.yaml or yolov3.yaml.
    """

    box: NotNegative | None  # weight of the box term
    objectness: NotNegative | None  # weight of the objectness term
    classification: NotNegative | None  # weight of the class term; with yolov3 that at 80 classes, scaled by
    # classes / 80
    iou: IouKind | None  # overlap measure of the box term
    anchor_iou: Annotated[float, ">= 0 and < 1"] | None  # yolov3: a box matches an anchor if the IoU of their shapes is
    # higher
    dfl: NotNegative | None  # yolox: weight, relative to box, of the distribution focal loss (model.box_bins)
    l1: NotNegative | None  # yolox: weight, relative to box, of the L1 distance of boxes in the epochs without mosaics
    positives: Annotated[int, ">= 1"] | None  # yolox: at most so many cells learn each box, of those that reach its
    # centre
    positives_by: PositivesBy | None  # yolox: what ranks them: cost, of class and box, and their number is the sum of
    # the largest overlaps (SimOTA); alignment, score * overlap^6 (task-aligned)


@dataclass
class WeightedLoss(LossSection):
    """The options common to losses of boxes, objectness and classes (keys ``loss.*``)."""

    box: NotNegative  # weight of the box term
    objectness: NotNegative  # weight of the objectness term
    classification: NotNegative  # weight of the class term; with loss=yolov3 that at 80 classes, scaled by classes / 80
    iou: IouKind  # overlap measure of the box term


@dataclass
class LossConfig(WeightedLoss):
    """Options of the YOLOv3-SPP loss."""

    anchor_iou: Annotated[float, ">= 0 and < 1"]  # a box matches an anchor if the IoU of their shapes is higher


@dataclass
class YoloxLossConfig(WeightedLoss):
    """Options of the YOLOX loss."""

    dfl: NotNegative  # weight, relative to box, of the distribution focal loss (model.box_bins)
    l1: NotNegative  # weight, relative to box, of the L1 distance of boxes in the epochs without mosaics
    positives: Annotated[int, ">= 1"]  # at most so many cells learn each box, of those that reach its centre
    positives_by: PositivesBy  # what ranks them: cost, of class and box, and their number is the sum of the largest
    # overlaps (SimOTA); alignment, score * overlap^6 (task-aligned)
