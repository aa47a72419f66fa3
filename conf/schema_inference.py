"""Types of the options of predict.py, scripts/demo.py and export.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from conf.schema import PluggedConfig, check_least, check_shares
from data.config import Exif, OnBadFile, Resize
from models.config import OPSETS, ModelConfig
from train_utils.config import Device, EvalPrecision


@dataclass
class DetectConfig(PluggedConfig):
    """A detector, ``ckpt`` or ``model`` with its weights and ``names``, and what it reports."""

    ckpt: str | None  # a checkpoint file, a run folder (its best.pt), or an .onnx file of export.py
    model: ModelConfig | None
    names: str | None  # class names for Darknet weights: a text file with one per line, or a COCO json
    exif: Exif  # apply: turn images upright by their EXIF tag; ignore: read them as stored
    image_size: int | None  # longest side in pixels; null: that of the checkpoint or of the .cfg
    resize: Resize  # as evaluate.resize
    rect: bool  # as evaluate.rect
    confidence: float  # drop detections with this score or less
    nms_iou: float  # a box suppresses those of its class that overlap it by more than this IoU
    merge_nms: bool  # as evaluate.merge_nms
    max_detections: int  # per image
    multi_label: bool  # report a box once for each class above confidence
    device: Device  # auto: CUDA if there is a GPU
    precision: EvalPrecision  # of the forward pass, as evaluate.precision
    workers: int  # threads that read

    def __post_init__(self) -> None:
        if self.ckpt is not None and self.model is not None:
            raise ValueError("ckpt and model exclude one another: a checkpoint holds its network. fix: leave one out")
        if self.ckpt is not None and self.names is not None:
            raise ValueError("ckpt and names exclude one another: a checkpoint knows its classes. fix: leave one out")
        check_least(self, 1, "image_size", "max_detections", "workers")
        check_shares(self, "confidence", "nms_iou")


@dataclass
class PredictConfig(DetectConfig):
    """Everything that predict.py reads: ``ckpt``, or ``model`` with its weights and ``names``."""

    on_error: OnBadFile  # stop at a file that cannot be read, or skip it with a warning
    batch_size: int | None  # images in one forward pass; results do not depend on it; null: 8 on a GPU, else 1

    source: str  # an image, a video, a folder, a quoted pattern, or a .txt that lists images and videos;
    # a camera by its number (0) or a stream (rtsp://..., http://...)
    out: str | None  # folder for the results; null: runs/predict/<date_time>
    draw: bool  # write copies of the images and videos with boxes
    save_json: bool  # write detections.json (COCO results) and images.json
    save_txt: bool  # write labels/*.txt of images (YOLO)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "batch_size")


@dataclass
class DemoConfig(DetectConfig):
    """Everything that scripts/demo.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    host: str  # the address to listen on; 0.0.0.0: also for other machines, with no password
    port: int | None  # null: the first free one from 7860


class ExportFormat(StrEnum):
    """The file that export.py writes: ONNX, or an archive of torch.export."""

    onnx = "onnx"
    torch = "torch"


SUFFIXES = {".onnx": ExportFormat.onnx, ".pt2": ExportFormat.torch}


@dataclass
class ExportConfig(PluggedConfig):
    """Everything that export.py reads: ``ckpt``, or ``model`` with its weights."""

    ckpt: str | None  # a checkpoint file, or a run folder (its best.pt)
    model: ModelConfig | None  # with model.weights, instead of ckpt
    names: str | None  # class names for Darknet weights: a text file with one per line
    format: ExportFormat  # onnx, or torch: the network as a .pt2 of torch.export
    out: str | None  # the file to write; null: beside the weights, as <name>.onnx or <name>.pt2
    image_size: Any  # side in pixels or [height, width]; null: as evaluated, or as in the .cfg
    batch_size: int  # images in one call of the exported network
    dynamic_batch: bool  # accept any batch size
    dynamic_size: bool  # accept any multiples of the network's stride as height and width
    opset: int  # version of the ONNX operators
    nms: bool  # output detections instead of all boxes and scores
    confidence: float  # with nms: drop detections with this score or less
    nms_iou: float  # a box suppresses those of its class that overlap it by more than this IoU
    max_detections: int  # per image, with nms
    candidates: int  # boxes per image, the best-scored, that enter suppression
    tolerance: float  # largest allowed difference to the network: of scores, and of corners as a share of the image

    def __post_init__(self) -> None:
        if self.ckpt is not None and (self.model is not None or self.names is not None):
            raise ValueError("ckpt excludes model and names: a checkpoint holds its own. fix: leave them out")
        sides = self.image_size if isinstance(self.image_size, list) else [self.image_size] * 2
        known = self.image_size is None or (len(sides) == 2 and all(type(side) is int and side > 0 for side in sides))
        if not known:
            raise ValueError(f"image_size must be a number of pixels, [height, width] or null, got {self.image_size}")
        if self.opset not in OPSETS:
            raise ValueError(f"opset must lie in {OPSETS[0]}..{OPSETS[-1]}, which are tested, got {self.opset}")
        check_least(self, 1, "batch_size", "max_detections")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be above 0, got {self.tolerance}")
        if self.candidates < self.max_detections:
            raise ValueError(f"candidates={self.candidates} must not be below max_detections={self.max_detections}")
        check_shares(self, "confidence", "nms_iou")
