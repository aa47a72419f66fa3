"""Options of the network (keys ``model.*``), its losses (``loss.*``) and its export.

YAML holds every value; fields have no defaults. Imports no torch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from models.published import BACKBONE, BACKBONE_LAYERS, Published, find_published

MAX_SCALE_X_Y = 100  # cells
AUTO = "auto"  # of model.anchors, loss.classification, loss.balance and loss.class_weights

IouKind = StrEnum("IouKind", ["iou", "giou", "diou", "ciou"])
NotNegative = Annotated[float, ">= 0"]


class Balance(StrEnum):
    """How much each of the n positives of a head weighs in its box and class terms.

    m: the mean number of positives over the heads (docs/develop/decisions.md).
    """

    auto = "auto"  # equal, or damped where the training images hold few large objects
    equal = "equal"  # 1 / n, as published: the only object of a head weighs as much as all of another
    damped = "damped"  # 1 / max(n, m): a head with few objects weighs less than the others
    pooled = "pooled"  # 1 / m: all objects weigh the same, and all cells in the objectness


class PositivesBy(StrEnum):
    """Which anchors of cells learn a box; all but shape rank them (models/assignment.py)."""

    auto = "auto"  # shape; overlap where their number is given; cost for few large objects
    shape = "shape"  # all of its cell whose shapes match, as published
    overlap = "overlap"  # of the predicted box
    alignment = "alignment"  # score * overlap^6, task-aligned (Feng et al. 2021)
    cost = "cost"  # of class and box; the number of positives follows from the overlaps (SimOTA)


# What auto means in loss.*, unless the training set asks for more: the published recipe for COCO.
PUBLISHED_LOSS: dict[str, Any] = {
    "classification": 37.4,
    "balance": Balance.equal,
    "positives_by": PositivesBy.shape,
    "positives": None,
}


@dataclass
class ModelConfig:
    """Which network (keys ``model.*``)."""

    cfg: str  # a name of models/zoo, or the path of a Darknet .cfg
    width: Annotated[float, "> 0 and <= 8"]  # factor on the filters of each convolution except the heads'
    scale_x_y: Annotated[float | None, ">= 1 and <= 100"]  # how far box centres reach, for all [yolo] sections: 1 to
    # the edges of their cell, 2 half a cell past them; null: as in a checkpoint, or the .cfg
    anchors: Any  # pairs [width, height] in pixels, for all [yolo] sections; null: as with scale_x_y; auto: fitted to
    # the training set at train.image_size when a training starts, if those of the .cfg miss 30 % of
    # its boxes
    weights: str | None  # to start from: coco or backbone (published, see scripts.get_weights), Darknet .weights (whole
    # or cut), what ckpt= of eval.py takes, a .pt state dict. Heads for other classes are left out
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
class LossConfig(LossSection):
    """Weights and options of the YOLOv3-SPP loss (keys ``loss.*``)."""

    box: NotNegative  # weight of the box term
    objectness: NotNegative  # weight of the objectness term
    classification: Any  # weight of the class term at 80 classes; scaled by classes / 80. auto: 37.4, and 200 where the
    # training images hold few large objects, as told when a training starts
    iou: IouKind  # overlap measure of the box term
    anchor_iou: Annotated[float, ">= 0 and < 1"]  # a box matches an anchor if the IoU of their shapes is higher
    positives: Annotated[int | None, ">= 1"]  # how many anchors of cells learn each box, among those whose
    # model.scale_x_y reaches its centre; null with positives_by=shape
    balance: Balance  # equal: all heads weigh the same, as published; damped: heads with few objects
    # less; pooled: all objects and all cells the same; auto: equal, and damped where the training
    # images hold few large objects, as told when a training starts
    positives_by: PositivesBy  # which anchors learn a box: shape: all of its cell that match by anchor_iou; the others
    # rank them by their predictions: overlap of the box; alignment: score * overlap^6
    # (task-aligned); cost: class and box, and as many as the overlaps of these positives add up to
    # (SimOTA). auto: overlap with positives, else shape, or cost where the training images hold few
    # large objects, as told when a training starts
    class_weights: Any  # factors on the class term of the boxes of each class; auto: by the root of how rare it is in
    # the training set, 1 on average over the boxes; null: 1

    def __post_init__(self) -> None:
        if self.classification != AUTO and not (type(self.classification) in (int, float) and self.classification >= 0):
            raise ValueError(f"loss.classification must be 0 or more, or {AUTO}, got {self.classification}")
        if self.positives is None and self.ranked_by != PositivesBy.shape:
            raise ValueError(f"loss.positives_by={self.positives_by} needs a number. fix: loss.positives=10")
        if self.positives is not None and self.ranked_by == PositivesBy.shape:
            raise ValueError("loss.positives_by=shape knows no number. fix: loss.positives=null")
        weights = self.class_weights
        if weights not in (None, AUTO) and not _are_above_zero(weights):
            raise ValueError(f"loss.class_weights must be numbers above 0, {AUTO} or null, got {weights}")

    @property
    def ranked_by(self) -> PositivesBy:
        """``positives_by``, where auto does not depend on a set."""
        if self.positives_by != PositivesBy.auto:
            return self.positives_by
        return PositivesBy.shape if self.positives is None else PositivesBy.overlap
