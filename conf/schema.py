"""Types of the whole configuration: the root of each entry point, and the sections that belong to no other part.

Fields carry no defaults: YAML holds every value, once, so an absent key fails by its full name. A part's own section
stands beside its consumer (data/config.py, models/loss.py, train_utils/optim.py) and is only put together here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from data import AugmentConfig, DataConfig
from models import LossConfig
from train_utils.optim import OptimConfig


class Device(StrEnum):
    """Where to compute: ``auto`` is CUDA where there is a GPU, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Number format of the forward pass in training; weights, loss and evaluation stay float32.

    ``auto`` is bfloat16 where the hardware multiplies it natively, else float32.
    """

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class ModelConfig:
    """Which network (keys ``model.*``)."""

    cfg: str  # a name of models/zoo, or the path of a Darknet .cfg
    width: float  # factor on the filters of every convolution but the heads'
    weights: str | None  # initial weights: Darknet .weights (whole or backbone) or a checkpoint of this project
    fresh_heads: bool  # leave the convolutions before [yolo] at random: for weights of another class count
    bn_eps: float
    bn_momentum: float
    freeze: int  # this many first layers keep their initial weights and statistics

    def __post_init__(self) -> None:
        if not 0 < self.width <= 8:
            raise ValueError(f"model.width must be above 0 and at most 8, got {self.width}")
        if not self.bn_eps > 0:
            raise ValueError(f"model.bn_eps must be above 0, got {self.bn_eps}")
        if not 0 < self.bn_momentum <= 1:
            raise ValueError(f"model.bn_momentum must be above 0 and at most 1, got {self.bn_momentum}")
        if self.freeze < 0:
            raise ValueError(f"model.freeze must be 0 or more, got {self.freeze}")


@dataclass
class TrainSection:
    """The training loop (keys ``train.*``)."""

    epochs: int
    batch_size: int  # images in one optimiser step, over all processes
    device_batch_size: int | None  # images in one forward pass of one process; null: the most that divide the step
    max_device_batch_size: int  # evenly, up to this many; what is left of a step is accumulated
    image_size: int  # side in pixels of the square that training images fill
    multi_scale: list[float]  # [low, high]: each step's size is drawn from image_size times this range
    seed: int
    device: Device
    precision: Precision
    channels_last: bool
    sync_bn: bool  # batch-norm statistics over all processes
    cudnn_benchmark: bool
    deterministic: bool
    best_only: bool  # write checkpoints/best.pt only, not last.pt in every epoch
    timeout_seconds: float  # how long a process waits for the others before it gives up

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "max_device_batch_size", "image_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key} must be 1 or more, got {getattr(self, key)}")
        if self.device_batch_size is not None and self.device_batch_size < 1:
            raise ValueError(
                f"train.device_batch_size must be 1 or more, or null to derive it, got {self.device_batch_size}"
            )
        if len(self.multi_scale) != 2 or not 0 < self.multi_scale[0] <= self.multi_scale[1]:
            raise ValueError(f"train.multi_scale must be [low, high] with 0 < low <= high, got {self.multi_scale}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"train.seed must lie in 0..2**63-1, got {self.seed}")
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError("train.deterministic=true needs train.cudnn_benchmark=false: a benchmark picks by speed")
        if not self.timeout_seconds > 0:
            raise ValueError(f"train.timeout_seconds must be above 0, got {self.timeout_seconds}")


@dataclass
class EvaluateConfig:
    """How a model is scored (keys ``evaluate.*``)."""

    image_size: int | None  # longest side in pixels; null: as trained
    batch_size: int  # images in one forward pass of one process; figures do not depend on it
    rect: bool  # pad each image to its own rectangle instead of a square
    confidence: float  # detections at or below this score are dropped
    nms_iou: float
    max_detections: int  # kept for each image
    multi_label: bool  # one box may be reported with several classes
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
        if self.every < 0:
            raise ValueError(f"evaluate.every must be 0 or more epochs, got {self.every}")


@dataclass
class LoggerConfig:
    """What a run shows and draws (keys ``logger.*``)."""

    lines_per_epoch: int  # progress lines where the output is no terminal
    pictures: bool  # draw the first training batch, the curves and detections into the run folder


@dataclass
class TrainConfig:
    """Everything that train.py reads."""

    name: str  # first folder below runs/
    run_dir: str | None  # null: runs/<name>/<date_time>, or runs/<name>/slurm-<job id> under SLURM
    resume: str | None  # run folder to continue
    debug: bool  # show tracebacks of user errors too
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig
    loss: LossConfig
    optim: OptimConfig
    train: TrainSection
    evaluate: EvaluateConfig
    logger: LoggerConfig

    def __post_init__(self) -> None:
        if self.resume is not None and self.run_dir is not None:
            raise ValueError("resume continues in its own folder: leave run_dir out")


@dataclass
class EvalConfig:
    """Everything that eval.py reads; ``data`` and ``model`` come from the checkpoint where they are not given."""

    ckpt: str | None  # a checkpoint file, or a run folder (its best.pt)
    out: str | None  # folder for the figures as JSON; null: print only
    device: Device
    timeout_seconds: float
    debug: bool
    data: DataConfig
    model: ModelConfig
    evaluate: EvaluateConfig
