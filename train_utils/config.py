"""Options of the training loop, the optimiser and the loggers; which library scores.

YAML holds every value; fields have no defaults. Imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from train_utils.errors import TrainError

AUTO = "auto"  # of optim.flat_fraction
SHORT_TRAINING = 2000  # steps (docs/develop/decisions.md)


class Device(StrEnum):
    """Where to compute: ``auto`` is CUDA if there is a GPU, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Number format of the forward pass in training; weights, loss and evaluation stay float32.

    ``auto`` is bfloat16 if the hardware multiplies it natively, else float32. ``float32`` is that
    of IEEE 754, on GPUs, too. ``tf32`` lets them round the factors of a product to 11 bits.
    ``float64`` is for comparisons of trainings: weights, loss and evaluation have it, too.
    """

    auto = "auto"
    float32 = "float32"
    tf32 = "tf32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


# Modes of torch.compile. Options are read by member name, which needs the hyphens.
Compile = StrEnum("Compile", ["off", "default", "reduce-overhead", "max-autotune-no-cudagraphs"])


class EvalPrecision(StrEnum):
    """Number format of the forward pass in evaluation; the same meanings as in Precision."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class TrainSection:
    """The training loop (keys ``train.*``)."""

    epochs: int  # passes over the training set
    batch_size: int  # images in one optimiser step, over all ranks
    micro_batch_size: int | None  # images in one forward pass, over all ranks; gradient accumulation completes the
    # batch. It must divide batch_size and be a multiple of the ranks. null: the whole batch
    image_size: int  # side of the square training images, in pixels
    multi_scale: list[float]  # [low, high]: range of image_size multiples from which each step draws its size; the
    # first step has the largest
    rect: bool  # group images of like aspect ratio and fill a rectangle instead of a square
    repeat_threshold: float  # repeat images of classes that fewer than this share of the images show; 0: none
    seed: int  # of the initial weights, the order of the images and their augmentation
    device: Device  # auto: CUDA if there is a GPU
    precision: Precision  # of the forward pass; auto: bfloat16 if the hardware has it, else float32. tf32: float32
    # with factors of 11 bits, on GPUs that have it
    compile: Compile  # by torch.compile, each image size once; reduce-overhead: into CUDA graphs, for small networks on
    # one GPU; max-autotune-no-cudagraphs tries more kernels, for minutes a size
    sync_bn: bool  # batch-norm statistics over all ranks
    deterministic: bool  # same bits in every run on as many ranks, by torch's deterministic algorithms
    save_every_steps: int  # also write last.pt within an epoch, after this many steps; 0: not by steps
    save_every_minutes: float  # also write last.pt within an epoch, after this many minutes; 0: not by time
    max_nonfinite_steps: int  # steps in a row that may be skipped because loss or gradient is not finite; one more ends
    # the training
    patience: int  # stop after this many epochs without a better AP; 0: never
    timeout_seconds: float  # the longest that a rank waits for the others in an exchange, and for a batch

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "image_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key} must be 1 or more, got {getattr(self, key)}")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"train.micro_batch_size must be 1 or more, or null, got {self.micro_batch_size}")
        for key in (
            "save_every_steps",
            "save_every_minutes",
            "max_nonfinite_steps",
            "patience",
        ):
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


class Optimizer(StrEnum):
    """SGD with Nesterov momentum, or AdamW (Loshchilov and Hutter 2019).

    Biases start at ten times ``lr`` with ``sgd``; ``darknet`` is the same without this.
    """

    sgd = "sgd"
    darknet = "darknet"
    adamw = "adamw"


OPTIMISERS: dict[str, Callable[..., Any]] = {}  # of plugins by name: groups and rate -> a torch optimiser


class Decay(StrEnum):
    """How the rate falls from ``lr`` to ``lr * final_lr_ratio`` after burn-in."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class OptimConfig:
    """Settings of the optimiser, its schedule and the weight average (keys ``optim.*``)."""

    name: Optimizer | str  # follows from optim=<choice>; text: that of a plugin
    lr: float  # learning rate after burn-in, for a loss averaged over the global batch
    final_lr_ratio: float  # learning rate of the last step / lr
    decay: Decay  # how the learning rate falls after burn-in
    flat_fraction: Any  # share of the training after which it begins to fall; auto: 0.5 in short ones, to 2000 steps
    momentum: float  # of SGD with Nesterov momentum; beta1 of AdamW
    weight_decay: float  # on convolution weights only; each step of AdamW takes lr times this share of them away
    burn_in_epochs: float  # length of the burn-in in epochs, at least 500 steps and at most a tenth of the training;
    # 0: none
    clip_norm: float | None  # largest gradient norm; null: no clipping
    ema_decay: float  # largest decay of the weight average in a step; 0: no average
    ema_window: float  # the average covers about this share of the steps made, until ema_decay limits it

    def flat_share(self, steps: int) -> float:
        """``flat_fraction`` as a number, in a training of so many steps."""
        if self.flat_fraction == AUTO:
            return 0.5 if steps <= SHORT_TRAINING else 0.0
        return float(self.flat_fraction)

    def __post_init__(self) -> None:
        if self.name not in (names := (*Optimizer, *OPTIMISERS)):
            raise ValueError(f"optim.name must be {' or '.join(names)}, or that of one of plugins=, got {self.name}")
        for key in ("lr", "ema_window"):
            if not getattr(self, key) > 0:
                raise ValueError(f"optim.{key} must be above 0, got {getattr(self, key)}")
        for key in ("weight_decay", "burn_in_epochs"):
            if getattr(self, key) < 0:
                raise ValueError(f"optim.{key} must be 0 or more, got {getattr(self, key)}")
        for key in ("momentum", "final_lr_ratio", "ema_decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"optim.{key} must lie in 0..1, got {getattr(self, key)}")
        flat = self.flat_fraction
        if flat != AUTO and not (type(flat) in (int, float) and 0 <= flat < 1):
            raise ValueError(f"optim.flat_fraction must be {AUTO} or lie in 0..1, below 1, got {flat}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim.clip_norm must be above 0, or null for no clipping, got {self.clip_norm}")


@dataclass
class LoggerConfig:
    """What a run shows, draws and logs, and to which services (keys ``logger.*``)."""

    pictures: bool  # draw the first training batch, the curves and detections into the run folder
    every_steps: int  # steps between two rows of steps.csv, and points of the services; 0: none
    tensorboard: bool  # write event files into tensorboard/ of the run folder
    wandb: bool  # log to Weights & Biases, in the project that has the run's name

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"logger.every_steps must be 0 or more, got {self.every_steps}")
        for name in self.services:
            if not is_installed(name):
                raise TrainError(f"logger={name} is not installed. fix: uv sync --extra {name}, or leave {name} out")

    @property
    def services(self) -> list[str]:
        """The chosen loggers besides CSV: names of modules, and of the extras that install them."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder ``wandb/`` that a run left here is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
