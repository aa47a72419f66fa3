"""Types of the whole configuration: the root of each entry point, and the sections that belong to
no other part.

Fields carry no defaults: YAML holds every value, once, so an absent key fails by its full name. A
part's own section stands beside its consumer (data/config.py, models/loss/yolo.py,
train_utils/optim.py) and is only put together here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from data import AugmentConfig, DataConfig, Resize
from models import DarknetLossConfig, LossConfig, LossSection
from train_utils.optim import OptimConfig
from train_utils.scores.coco_backends import choose_backend

AUTO = "auto"  # of train.device_batch_size


class Device(StrEnum):
    """Where to compute: ``auto`` is CUDA where there is a GPU, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Number format of the forward pass in training; weights, loss and evaluation stay float32.

    ``auto`` is bfloat16 where the hardware multiplies it natively, else float32. ``float64`` holds
    for weights, loss and evaluation too, to compare trainings to more digits.
    """

    auto = "auto"
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class OnNonFinite(StrEnum):
    """What to do when too many steps in a row had a loss or gradient that is not finite.

    ``rollback`` takes weights and optimiser from the last checkpoint and goes on with the next
    images, once in a row.
    """

    stop = "stop"
    rollback = "rollback"


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
class TrainSection:
    """The training loop (keys ``train.*``)."""

    epochs: int
    batch_size: int  # images in one optimiser step, over all processes
    device_batch_size: Any  # images in one forward pass of one process, a number that divides the step evenly; the rest
    # of a step is accumulated. null: the most up to max_device_batch_size; auto: the most that the
    # memory holds
    max_device_batch_size: int
    image_size: int  # side in pixels of the square that training images fill
    multi_scale: list[float]  # [low, high]: each step's size is drawn from image_size times this range, the first
    # step has the largest
    rect: bool  # the images of a step are of like aspect and fill a rectangle of it instead of a square
    repeat_threshold: float  # images of classes that fewer than this share of the images show come more often; 0: none
    seed: int
    device: Device
    precision: Precision
    channels_last: bool
    sync_bn: bool  # batch-norm statistics over all processes
    cudnn_benchmark: bool  # cuDNN times its algorithms; off by itself with deterministic, rect or multi_scale
    deterministic: bool  # the same bits again; on a CPU at any number of processes
    best_only: bool  # write checkpoints/best.pt only, not last.pt in every epoch
    save_every_steps: int  # write last.pt within an epoch, too: after so many steps each time; 0: no such rule
    save_every_minutes: float  # the same by the clock
    max_nonfinite_steps: int  # so many steps in a row may be skipped because loss or gradient is not finite,
    on_nonfinite: OnNonFinite  # what happens then
    patience: int  # stop after so many epochs without a better AP; 0: never
    timeout_seconds: float  # within which a process that waits for lost ones gives up, tells it and ends
    check_sync_every: int  # steps between comparisons of all processes' weights; 0: never

    def __post_init__(self) -> None:
        if self.check_sync_every < 0:
            raise ValueError(f"train.check_sync_every must be 0 or more steps, got {self.check_sync_every}")
        for key in ("epochs", "batch_size", "max_device_batch_size", "image_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key} must be 1 or more, got {getattr(self, key)}")
        images = self.device_batch_size
        if images not in (None, AUTO) and not (type(images) is int and images >= 1):
            raise ValueError(
                f"train.device_batch_size must be 1 or more, {AUTO} to find what the memory holds, or null to derive "
                f"it, got {images}"
            )
        for key in ("save_every_steps", "save_every_minutes", "max_nonfinite_steps", "patience"):
            if getattr(self, key) < 0:
                raise ValueError(f"train.{key} must be 0 or more, got {getattr(self, key)}")
        if len(self.multi_scale) != 2 or not 0 < self.multi_scale[0] <= self.multi_scale[1]:
            raise ValueError(f"train.multi_scale must be [low, high] with 0 < low <= high, got {self.multi_scale}")
        if not 0 <= self.repeat_threshold <= 1:
            raise ValueError(f"train.repeat_threshold must lie in 0..1, got {self.repeat_threshold}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"train.seed must lie in 0..2**63-1, got {self.seed}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"train.timeout_seconds must be above 0, got {self.timeout_seconds}")


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
class LoggerConfig:
    """What a run shows and draws (keys ``logger.*``)."""

    lines_per_epoch: int  # progress lines where the output is no terminal
    pictures: bool  # draw the first training batch, the curves and detections into the run folder


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
