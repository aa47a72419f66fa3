"""The losses by the name that ``loss=`` selects; plugins add their own."""

from collections.abc import Callable

from models.darknet_loss import DarknetLoss
from models.loss import HeadLoss, YoloLoss, YoloxLoss

LOSSES: dict[str, Callable[..., HeadLoss]] = {"yolov3": YoloLoss, "yolox": YoloxLoss, "darknet": DarknetLoss}
