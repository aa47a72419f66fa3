"""Types of all options of train.py and eval.py.

Fields have no defaults: YAML holds every value once, so a missing key fails by its full name. Each
package has its own sections (data/config.py, models/config.py, train_utils/config.py); this file
puts them together. None of these imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from data.augment_config import AugmentConfig
from data.config import DataConfig, Resize
from models.config import LossConfig, LossSection, ModelConfig
from train_utils.config import Backend, Device, EvalPrecision, LoggerConfig, OptimConfig, TrainSection


def check_least(options: Any, least: int, *keys: str, section: str = "") -> None:
    """Raise ValueError for the first option below ``least``; null passes."""
    for key in keys:
        value = getattr(options, key)
        if value is not None and value < least:
            null = ", or null" if any(field.name == key and "None" in field.type for field in fields(options)) else ""
            raise ValueError(f"{section}{key} must be {least} or more{null}, got {value}")


def check_shares(options: Any, *keys: str, section: str = "") -> None:
    """Raise ValueError for the first option outside 0..1."""
    for key in keys:
        if not 0 <= getattr(options, key) <= 1:
            raise ValueError(f"{section}{key} must lie in 0..1, got {getattr(options, key)}")


def _check_devices(devices: Any) -> None:
    if devices not in (None, "auto") and not (type(devices) is int and devices >= 1):
        raise ValueError(
            f"devices must be a number of processes, or auto for one on each GPU, got {devices}; which GPUs, the "
            "environment variable CUDA_VISIBLE_DEVICES chooses"
        )


@dataclass
class EvaluateConfig:
    """How a model is scored (keys ``evaluate.*``)."""

    image_size: int | None  # longest side in pixels; null: as trained
    batch_size: int  # images in one forward pass of one rank; the scores do not depend on it
    precision: EvalPrecision  # of the forward pass: float32 on GPUs, too; the others are faster there and round more
    resize: Resize  # letterbox: keep the aspect ratio and pad; stretch: fill the square, as Darknet does
    rect: bool  # letterbox each image into its own rectangle; false, or resize=stretch: into a square
    rect_pad: float  # grey border of that rectangle, both sides together, in strides of the network
    upscale: bool  # letterbox enlarges smaller images
    confidence: float  # drop detections with this score or less
    nms_iou: float  # a box suppresses those of its class that overlap it by more than this IoU
    merge_nms: bool  # replace each kept box by the mean of itself and those it suppresses, weighted by score
    max_detections: int  # per image
    multi_label: bool  # report a box once for each class above confidence
    clip: bool  # cut boxes at the image edges
    round_boxes: bool  # round corners to whole pixels of the image
    backend: Backend  # scores by hotcoco, or by its slower reference, pycocotools, with the same figures
    every: int  # epochs between evaluations in training; 0: only after the last epoch

    def __post_init__(self) -> None:
        check_least(self, 1, "image_size", "batch_size", "max_detections", section="evaluate.")
        check_least(self, 0, "every", section="evaluate.")
        check_shares(self, "confidence", "nms_iou", section="evaluate.")
        if not 0 <= self.rect_pad <= 8:
            raise ValueError(f"evaluate.rect_pad must lie in 0..8 strides, got {self.rect_pad}")

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether to evaluate after ``epoch`` (from 1): always after the last of the ``epochs``."""
        return epoch == epochs or (self.every > 0 and epoch % self.every == 0)


@dataclass
class PluggedConfig:
    """Options of all programs that plugins can extend."""

    debug: bool  # show tracebacks of user errors, too
    plugins: list[str]  # Python files that add losses, layers, augmentations and more: see docs/develop/extending.md


@dataclass
class TrainConfig(PluggedConfig):
    """Everything that train.py reads."""

    name: str  # folder below runs/
    run_dir: str | None  # null: runs/<name>/<date_time>, under SLURM runs/<name>/slurm-<job id>[-<number>]
    resume: str | None  # run folder to continue; auto: run_dir, else this job's (SLURM, torchrun), else the newest
    extend: int | None  # epochs more for the finished run that resume names
    devices: Any  # start processes, one for each GPU: a number, or auto (all); null: this one alone
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig
    loss: LossSection  # one of CHOICES["loss"]
    optim: OptimConfig
    train: TrainSection
    evaluate: EvaluateConfig
    logger: LoggerConfig

    def __post_init__(self) -> None:
        _check_devices(self.devices)
        if self.resume is not None and self.run_dir is not None:
            raise ValueError("resume continues in its own folder: leave run_dir out")
        if self.extend is not None and (self.extend < 1 or self.resume is None):
            raise ValueError(
                f"extend={self.extend} must be 1 or more epochs for a finished run. fix: resume=<its folder>"
            )
        self.data.check_two_sets()
        if self.augment.mosaic_nine > 0 and self.augment.mosaic == 0:
            raise ValueError(
                "augment.mosaic_nine is a share of the mosaics, but augment.mosaic=0. fix: a larger augment.mosaic"
            )


# Sections whose keys depend on a choice: the class of each choice by the `name` in its YAML.
CHOICES: dict[str, dict[str, type]] = {"loss": {"yolov3": LossConfig, "darknet": LossSection}}


class EvalTask(StrEnum):
    """What eval.py measures: ``score``, COCO's figures; ``speed``, ms per image."""

    score = "score"
    speed = "speed"


@dataclass
class EvalConfig(PluggedConfig):
    """Everything that eval.py reads; the checkpoint fills in ``data`` and ``model``."""

    ckpt: str | None  # a checkpoint file, a run folder (its best.pt), or an .onnx file of export.py
    detections: str | None  # a COCO results file of any system, scored instead of a network
    task: EvalTask  # score: COCO's figures; speed: ms per image
    out: str | None  # folder for scores and detections as JSON, and for plots; null: print only, or
    # runs/eval/<date_time> with plots
    plots: bool  # draw precision and recall, confusions and the first images into the folder plots of out
    device: Device  # auto: CUDA if there is a GPU
    devices: Any  # as of train.py
    timeout_seconds: float  # as train.timeout_seconds
    data: DataConfig
    model: ModelConfig | None
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        _check_devices(self.devices)
