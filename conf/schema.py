"""Types of the whole configuration: the root of each entry point, and the sections that belong to
no other part.

Fields carry no defaults: YAML holds every value, once, so an absent key fails by its full name. A
part's own section stands beside its consumer (data/config.py, models/loss/yolo.py,
train_utils/optim.py) and is only put together here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from data.augment_config import AugmentConfig
from data.config import DataConfig, Resize
from models.config import DarknetLossConfig, LossConfig, LossSection, ModelConfig
from train_utils.config import Device, LoggerConfig, OptimConfig, TrainSection, choose_backend


@dataclass
class EvaluateConfig:
    """How a model is scored (keys ``evaluate.*``)."""

    image_size: int | None  # longest side in pixels; null: as trained
    batch_size: int  # images in one forward pass of one process; figures do not depend on it
    resize: Resize  # letterbox: keep the aspect and pad; stretch: fill the square, as Darknet does
    rect: bool  # letterbox each image into its own rectangle; false, or resize=stretch: into the square
    rect_pad: float  # grey around that rectangle, in strides of the network over both sides together
    upscale: bool  # the letterbox enlarges images that are smaller
    confidence: float  # detections at or below this score are dropped
    nms_iou: float
    merge_nms: bool  # a box that stays becomes the mean of those that it suppresses and itself, weighted by score
    max_detections: int  # kept for each image
    multi_label: bool  # one box may be reported with several classes
    clip: bool  # cut boxes at the edges of their image
    round_boxes: bool  # corners to whole pixels of the image
    backend: str  # library that scores, a name in scores/coco_backends.py; auto: the fastest installed
    every: int  # epochs between evaluations in training; 0: only after the last

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"evaluate.image_size must be 1 or more, or null, got {self.image_size}")
        for key in ("batch_size", "max_detections"):
            if getattr(self, key) < 1:
                raise ValueError(f"evaluate.{key} must be 1 or more, got {getattr(self, key)}")
        for key in ("confidence", "nms_iou"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"evaluate.{key} must lie in 0..1, got {getattr(self, key)}")
        if not 0 <= self.rect_pad <= 8:
            raise ValueError(f"evaluate.rect_pad must lie in 0..8 strides, got {self.rect_pad}")
        choose_backend(self.backend)  # here, since the end of an epoch is late to learn that a library is absent
        if self.every < 0:
            raise ValueError(f"evaluate.every must be 0 or more epochs, got {self.every}")

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether to evaluate after ``epoch`` (from 1): always after the last of the ``epochs``."""
        return epoch == epochs or (self.every > 0 and epoch % self.every == 0)


@dataclass
class TrainConfig:
    """Everything that train.py reads."""

    name: str  # first folder below runs/
    run_dir: str | None  # null: runs/<name>/<date_time>, or under SLURM runs/<name>/slurm-<job id>[-<number>]
    resume: str | None  # run folder to continue; auto: of run_dir, this SLURM or torchrun job, or the name's newest
    resume_force: bool  # continue even where other options or data make it another training
    dry_run: bool  # say what each process found out: its place, device, data and share of a step; then end
    debug: bool  # show tracebacks of user errors too
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig
    loss: LossSection  # one of CHOICES["loss"]
    optim: OptimConfig
    train: TrainSection
    evaluate: EvaluateConfig
    logger: LoggerConfig

    def __post_init__(self) -> None:
        if self.resume is not None and self.run_dir is not None:
            raise ValueError("resume continues in its own folder: leave run_dir out")
        if self.augment.copy_paste > 0 and not self.data.outlines:
            raise ValueError("augment.copy_paste needs the outlines of objects. fix: data.outlines=true")


# Sections whose keys follow from a choice: the class of each choice, by the `name` that its YAML
# gives.
CHOICES: dict[str, dict[str, type]] = {"loss": {"yolov3": LossConfig, "darknet": DarknetLossConfig}}


class EvalTask(StrEnum):
    """What eval.py measures: ``score`` by COCO's figures, ``speed`` in ms an image."""

    score = "score"
    speed = "speed"


@dataclass
class EvalConfig:
    """Everything that eval.py reads; ``data`` and ``model`` come from the checkpoint where they are
    not given.
    """

    ckpt: str | None  # a checkpoint file, or a run folder (its best.pt)
    detections: str | None  # a COCO results file of any system, to be scored instead of a network
    task: EvalTask
    out: str | None  # folder for figures and detections as JSON, and a picture of the curves; null: print only
    device: Device
    timeout_seconds: float
    debug: bool
    data: DataConfig
    model: ModelConfig | None
    evaluate: EvaluateConfig
