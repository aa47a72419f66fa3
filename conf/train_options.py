"""Options of the training loop, the optimiser and the loggers.

YAML holds every value; fields have no defaults. Imports no torch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from conf import ConfigError
from conf.errors import TrainError, install_command
from data.config import Below1, Count, Share, Whole
from models.config import NotNegative

AUTO = "auto"  # of optim.flat_fraction and train.fused_norm
SHORT_TRAINING = 2000  # steps (docs/develop/decisions.md)

Device = StrEnum("Device", ["auto", "cpu", "cuda"])  # auto: CUDA if there is a GPU
# Of the forward pass in training; weights, loss and evaluation: float32, or float64 with float64.
Precision = StrEnum("Precision", ["auto", "float32", "tf32", "float64", "bfloat16", "float16"])
EvalPrecision = StrEnum("EvalPrecision", ["auto", "float32", "tf32", "bfloat16", "float16"])
Compile = StrEnum("Compile", ["auto", "off", "default", "reduce-overhead", "max-autotune-no-cudagraphs"])
# sgd: Nesterov momentum, biases start at ten times the rate; darknet: the same without this; adamw:
# Loshchilov and Hutter 2019.
Optimizer = StrEnum("Optimizer", ["sgd", "darknet", "adamw"])
OPTIMISERS: dict[str, Callable[..., Any]] = {}  # of plugins, by name: (parameter groups, rate) -> torch optimiser
Decay = StrEnum("Decay", ["cosine", "linear", "constant"])

# Limits that conf/compose.py checks, as it prints them.
Seed = Annotated[int, Meta(ge=0, le=4294967295)]
Positive = Annotated[float, Meta(gt=0)]
SIZE = "a number of pixels or [height, width]"
ImageSize = Annotated[Any, Meta(title=SIZE)]
OptionalSize = Annotated[Any, Meta(title=f"{SIZE}, or null")]
MAX_SIDE = 2**16  # pixels


def is_image_size(size: Any) -> bool:
    """Whether the value of an option is a side in pixels or [height, width]."""
    sides = size if isinstance(size, list) else [size] * 2
    return len(sides) == 2 and all(type(side) is int and 0 < side < MAX_SIDE for side in sides)


@dataclass
class TrainSection:
    """The training loop (keys ``train.*``)."""

    epochs: Count  # passes over the training set
    batch_size: Count  # images in one optimiser step, over all ranks
    micro_batch_size: Count | None  # images in one forward pass, over all ranks; gradient accumulation completes the
    # batch. It must divide batch_size and be a multiple of the ranks. null: the whole batch
    image_size: ImageSize  # side of the square training images in pixels, or [height, width]
    multi_scale: list[float]  # [low, high]: each step draws its image size from low to high times image_size; the
    # first step has the largest
    rect: bool  # group images of similar aspect ratio and fill a rectangle instead of a square
    repeat_threshold: Share  # repeat images of classes that fewer than this share of the images show; 0: none
    seed: Seed  # of the initial weights, the order of the images and their augmentation
    precision: Precision  # of the forward pass; auto: bfloat16 if all ranks have it, else float16 on GPUs with tensor
    # cores, else float32; a resumed run keeps its choice. tf32: float32 with factors of 11 bits, on
    # GPUs that have it
    compile: Any  # off, default: by torch.compile, each image size once; auto: on GPUs with Triton and a C++ compiler,
    # if all images have one size and the training is long enough to gain by it; reduce-overhead:
    # into CUDA graphs, for small networks on one GPU; max-autotune-no-cudagraphs tries more kernels
    sync_bn: bool  # batch-norm statistics over all ranks
    fused_norm: Any  # auto, true or false: batch norm and activation in one pass by kernels in Triton, on GPUs, with
    # train.compile off; auto: on one GPU, in half precision, for batches large enough to gain by it
    deterministic: bool  # same bits in every run on the same number of ranks, by torch's deterministic algorithms
    save_every_steps: Whole  # also write last.pt within an epoch, after this many steps; 0: not by steps
    save_every_minutes: NotNegative  # also write last.pt within an epoch, after this many minutes; 0: not by time
    patience: Whole  # stop after this many epochs without a better AP; 0: never
    timeout_seconds: Positive  # how long a rank waits for the others in an exchange, and for a batch

    def __post_init__(self) -> None:
        mode = "off" if self.compile is False else self.compile  # YAML reads off as false
        if mode not in tuple(Compile):
            raise ValueError(f"train.compile must be one of {', '.join(Compile)}, got {mode}")
        self.compile = Compile(mode)
        if len(self.multi_scale) != 2 or not 0 < self.multi_scale[0] <= self.multi_scale[1]:
            raise ValueError(f"train.multi_scale must be [low, high] with 0 < low <= high, got {self.multi_scale}")
        if self.rect and isinstance(self.image_size, list):
            raise ValueError("train.rect=true chooses height and width itself. fix: train.image_size=<longest side>")
        if type(self.fused_norm) is not bool and self.fused_norm != AUTO:
            raise ValueError(f"train.fused_norm must be {AUTO}, true or false, got {self.fused_norm}")


@dataclass
class OptimConfig:
    """Settings of the optimiser, its schedule and the weight average (keys ``optim.*``)."""

    name: Optimizer | str  # follows from optim=<choice>; text: that of a plugin
    lr: Positive  # learning rate after warm-up, for a loss averaged over the global batch
    final_lr_ratio: Share  # learning rate of the last step / lr
    decay: Decay  # how the learning rate falls after warm-up
    flat_fraction: Any  # share of the training after which it begins to fall; auto: 0.5 up to 2000 steps, else 0
    momentum: Below1  # of SGD (Nesterov); beta1 of AdamW
    weight_decay: NotNegative  # on convolution weights only; AdamW shrinks them by lr times this share in each step
    warmup_epochs: NotNegative  # length of the warm-up in epochs, at least 500 steps and at most a tenth of the
    # training; 0: none
    clip_norm: Positive | None  # largest gradient norm; null: no clipping
    ema_decay: Share  # largest decay of the weight average in a step; 0: no average. Before it limits the average,
    # that covers about 8 % of the steps made

    def flat_share(self, steps: int) -> float:
        """``flat_fraction`` as a number, for a training of ``steps``."""
        if self.flat_fraction == AUTO:
            return 0.5 if steps <= SHORT_TRAINING else 0.0
        return float(self.flat_fraction)

    def __post_init__(self) -> None:
        if self.name not in (names := (*Optimizer, *OPTIMISERS)):
            raise ValueError(f"optim.name must be {', '.join(names)}, or one that plugins= add, got {self.name}")
        flat = self.flat_fraction
        if flat != AUTO and not (type(flat) in (int, float) and 0 <= flat < 1):
            raise ValueError(f"optim.flat_fraction must be {AUTO} or lie in 0..1, below 1, got {flat}")


@dataclass
class LoggerConfig:
    """What a run draws and logs, and to which services (keys ``logger.*``)."""

    pictures: bool  # draw the first training batch, the curves and detections into the run folder
    every_steps: Whole  # steps between two rows of steps.csv and two points of the services; 0: none
    tensorboard: bool  # write event files into tensorboard/ of the run folder
    wandb: bool  # log to Weights & Biases, in the project that has the run's name

    def __post_init__(self) -> None:
        for name in self.services:
            if not is_installed(name):
                raise TrainError(f"logger={name} is not installed. fix: {install_command(name)}, or leave {name} out")

    @property
    def services(self) -> list[str]:
        """The chosen loggers besides CSV, by the names of their modules and extras."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]


def require(module: str, what: str) -> None:
    """Raise ConfigError, with the command that installs it, unless ``module`` is there."""
    if not is_installed(module):
        raise ConfigError(f"{what} needs {module}, which is not installed. fix: {install_command(module)}")


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder such as wandb/ that a run left does not count."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
