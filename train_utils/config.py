"""Options of the training: loop, optimiser and logger; which library scores.

YAML holds every value; fields have no defaults. Imports no torch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from train_utils.errors import TrainError

AUTO = "auto"  # of train.device_batch_size
BACKENDS = {  # of evaluate.backend, the fastest first, with their modules
    "hotcoco": "hotcoco",
    "faster-coco-eval": "faster_coco_eval",
    "pycocotools": "pycocotools",
}


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


class Decay(StrEnum):
    """How the rate falls from ``lr`` to ``lr * final_lr_ratio`` after burn-in."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class OptimConfig:
    """Settings of the optimiser, its schedule and the weight average (keys ``optim.*``)."""

    lr: float  # after burn-in, for a loss averaged over the global batch
    final_lr_ratio: float  # rate of the last step / lr
    decay: Decay
    momentum: float
    weight_decay: float  # on convolution weights only
    burn_in_epochs: float  # burn-in lasts this many epochs,
    burn_in_min_steps: int  # but at least this many steps,
    burn_in_max_fraction: float  # and at most this fraction of the training
    burn_in_bias_lr: float  # biases fall from here to lr; all other weights rise from 0
    burn_in_momentum: float
    clip_norm: float | None  # largest gradient norm; null: no clipping
    ema_decay: float
    ema_ramp_steps: float  # the average's decay is ema_decay * (1 - exp(-steps / this))
    ema_max_fraction: float  # and the ramp is at most this fraction of the training

    def __post_init__(self) -> None:
        for key in ("lr", "ema_ramp_steps"):
            if not getattr(self, key) > 0:
                raise ValueError(f"optim.{key} must be above 0, got {getattr(self, key)}")
        for key in ("weight_decay", "burn_in_epochs", "burn_in_min_steps", "burn_in_bias_lr"):
            if getattr(self, key) < 0:
                raise ValueError(f"optim.{key} must be 0 or more, got {getattr(self, key)}")
        for key in ("momentum", "burn_in_momentum", "burn_in_max_fraction", "final_lr_ratio", "ema_decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"optim.{key} must lie in 0..1, got {getattr(self, key)}")
        if not 0 < self.ema_max_fraction <= 1:
            raise ValueError(f"optim.ema_max_fraction must be above 0 and at most 1, got {self.ema_max_fraction}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim.clip_norm must be above 0, or null for no clipping, got {self.clip_norm}")


@dataclass
class LoggerConfig:
    """What a run shows and draws (keys ``logger.*``)."""

    lines_per_epoch: int  # progress lines where the output is no terminal
    pictures: bool  # draw the first training batch, the curves and detections into the run folder


def choose_backend(name: str) -> str:
    """The library for ``evaluate.backend=<name>``; ``auto`` means the fastest installed one.

    Raises TrainError if the name is unknown or the library is not installed.
    """
    if name == "auto":
        return next(known for known in BACKENDS if is_installed(known))
    if name not in BACKENDS:
        raise TrainError(f"evaluate.backend must be auto, {' or '.join(BACKENDS)}, got {name}")
    if not is_installed(name):
        raise TrainError(
            f"evaluate.backend={name} is not installed. fix: uv sync --extra eval, or evaluate.backend=auto"
        )
    return name


def is_installed(backend: str) -> bool:
    """Whether the module of a key of BACKENDS can be imported."""
    return importlib.util.find_spec(BACKENDS[backend]) is not None
