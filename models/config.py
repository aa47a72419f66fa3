"""Options of the network (keys ``model.*``), its losses (``loss.*``) and its export.

YAML holds every value; fields have no defaults. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OPSETS = range(18, 26)  # each tried with onnxruntime; torch's exporter needs 18 or more


class IouKind(StrEnum):
    """Overlap measure of the box loss."""

    iou = "iou"
    giou = "giou"
    diou = "diou"
    ciou = "ciou"


class BoxLoss(StrEnum):
    """The values of iou_loss in a [yolo] section."""

    mse = "mse"
    iou = "iou"
    giou = "giou"
    diou = "diou"
    ciou = "ciou"


@dataclass
class ModelConfig:
    """Which network (keys ``model.*``)."""

    cfg: str  # a name of models/zoo, or the path of a Darknet .cfg
    width: float  # factor on the filters of every convolution but the heads'
    anchors: list[Any] | None  # pairs [width, height] in pixels for all [yolo] sections; null: those of the .cfg
    weights: str | None  # initial: Darknet .weights (whole or cut), a run folder, or .pt: a checkpoint, a state dict
    fresh_heads: bool  # leave the convolutions before [yolo] at random: for weights of another class count
    bn_eps: float
    bn_momentum: float
    freeze: int  # this many first layers keep their initial weights and statistics

    def __post_init__(self) -> None:
        if not 0 < self.width <= 8:
            raise ValueError(f"model.width must be above 0 and at most 8, got {self.width}")
        if self.anchors is not None and not all(map(_is_size, self.anchors)):
            raise ValueError(f"model.anchors must be pairs [width, height] of pixels above 0, got {self.anchors}")
        if not self.bn_eps > 0:
            raise ValueError(f"model.bn_eps must be above 0, got {self.bn_eps}")
        if not 0 < self.bn_momentum <= 1:
            raise ValueError(f"model.bn_momentum must be above 0 and at most 1, got {self.bn_momentum}")
        if self.freeze < 0:
            raise ValueError(f"model.freeze must be 0 or more, got {self.freeze}")


def _is_size(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(v) in (int, float) and v > 0 for v in pair)


@dataclass
class LossSection:
    """The option common to all losses: the name that selects one."""

    name: str


@dataclass
class LossConfig(LossSection):
    """Weights and options of YoloLoss.

    classification is the gain for 80 classes, scaled by classes / 80. A target matches an anchor if
    their shapes overlap by more than anchor_iou. *_positive_weight multiply the cross-entropy of
    positives. label_smoothing moves class targets from 0 and 1 by half its value. focal_gamma 0 is
    plain cross-entropy.
    """

    box: float
    objectness: float
    classification: float
    iou: IouKind
    anchor_iou: float
    objectness_positive_weight: float
    class_positive_weight: float
    focal_gamma: float
    label_smoothing: float

    def __post_init__(self) -> None:
        for key in ("box", "objectness", "classification", "focal_gamma"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"loss.{key} must be 0 or more, got {getattr(self, key)}")
        for key in ("objectness_positive_weight", "class_positive_weight"):
            if not getattr(self, key) > 0:
                raise ValueError(f"loss.{key} must be above 0, got {getattr(self, key)}")
        for key in ("anchor_iou", "label_smoothing"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"loss.{key} must be 0 or more and below 1, got {getattr(self, key)}")


@dataclass
class DarknetLossConfig(LossSection):
    """Overrides for every [yolo] section; None keeps its value. `iou` is Darknet's iou_loss."""

    iou: BoxLoss | None
    iou_normalizer: float | None
    cls_normalizer: float | None
    obj_normalizer: float | None
    ignore_thresh: float | None
    truth_thresh: float | None
    iou_thresh: float | None
    label_smooth_eps: float | None

    def __post_init__(self) -> None:
        for key, value in self.numbers().items():
            if value < 0:
                raise ValueError(f"loss.{key} must be 0 or more, or null for that of the .cfg, got {value}")

    def numbers(self) -> dict[str, float]:
        """The overrides that are numbers, without those that are None."""
        return {key: value for key, value in vars(self).items() if key not in ("name", "iou") and value is not None}
