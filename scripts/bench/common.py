"""What benchmarks share: sizes, options from conf/ without Hydra, a training step, batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from enum import EnumType
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
import yaml
from torch import Tensor

from data import Batch
from models import Darknet, LossConfig, YoloLoss, zoo_cfg
from train_utils.checkpoint import CheckpointWriter
from train_utils.compiled import compile_step
from train_utils.config import OptimConfig
from train_utils.distributed import World, init_distributed_mode, wrap_ddp
from train_utils.engine import EpochResult, ForwardPass, Loss, NonFiniteGuard, train_one_epoch
from train_utils.numerics import allow_tf32, autocast_dtype, keep_freed_memory
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.progress import Progress
from train_utils.stop import StopRequest
from train_utils.train_state import TrainState

CONF = Path(__file__).resolve().parents[2] / "conf"
CLASSES, BOXES = 80, 20  # of the network, and of an image: COCO has 7, a mosaic up to four times as many
STEPS = 100_000  # of the whole training: a measurement lies at the start of the burn-in
Item = TypeVar("Item")
Step = Callable[[Sequence[Batch]], EpochResult]  # a step on each batch


@dataclass(frozen=True)
class Settings:
    """What is measured, and how long."""

    device: torch.device
    tiny: bool
    model: str  # in the zoo
    width: float
    side: int  # of images, in pixels
    batches: tuple[int, int]  # images in a step
    steps: int  # counted ones, after as many that warm up
    drawn: int  # images on disk for the loader
    workers: int  # of the loader
    matrix: int  # side of the matrices whose product shows the peak


def settings_of(tiny: bool) -> Settings:
    """The sizes for a data-centre GPU, or tiny ones."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if tiny:
        return Settings(device, True, "yolov3-tiny", 0.25, 64, (2, 4), 1, 12, 1, 128)
    if device.type == "cpu":
        raise SystemExit("torch sees no GPU here. fix: a machine with one, or --tiny")
    return Settings(device, False, "yolov3-spp", 1.0, 640, (16, 64), 12, 256, 15, 8192)


def options(kind: type[Item], file: str, **changes: Any) -> Item:
    """The options of a YAML file below conf/, with some changed."""
    values = yaml.safe_load((CONF / file).read_text(encoding="utf-8"))
    values.pop("defaults", None)
    return _filled(kind, values | changes)


def _filled(kind: type[Item], values: dict[str, Any]) -> Item:
    hints = get_type_hints(kind)
    return kind(**{name: _converted(hints[name], value) for name, value in values.items()})


def _converted(hint: Any, value: Any) -> Any:
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, EnumType) or (isinstance(value, dict) and is_dataclass(kind)):
            return kind(value) if isinstance(kind, EnumType) else _filled(kind, value)  # type: ignore[arg-type]
    return value


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(run: Callable[[Item], object], items: Sequence[Item], settings: Settings) -> float:
    """Mean seconds of ``run`` on items in turn, after a warm-up."""
    for _ in range(2):  # the second time counts
        started, count = time.perf_counter(), settings.steps * len(items)
        for item in islice(cycle(items), count):
            run(item)
        wait_for(settings.device)
    return (time.perf_counter() - started) / count


def new_network(settings: Settings) -> Darknet:
    """The measured network, with the same random weights each time."""
    torch.manual_seed(0)
    network = Darknet(zoo_cfg(settings.model), CLASSES, settings.width)
    network.init_head_biases()
    return network


def new_loss(network: Darknet) -> YoloLoss:
    """The loss of the default training."""
    return YoloLoss(network.heads, options(LossConfig, "loss/yolov3.yaml"))


def new_step(
    settings: Settings, precision: str = "bfloat16", deterministic: bool = False, mode: str = "", sizes: int = 1
) -> Step:
    """The steps of a training that begins, as train.py makes them on one device."""
    keep_freed_memory()
    world = init_distributed_mode(settings.device.type, 600)
    allow_tf32(False)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic
    network = new_network(settings).to(settings.device).to(memory_format=torch.channels_last).train()
    return step_of(network, world, autocast_dtype(precision, settings.device), mode, sizes)


def step_of(network: Darknet, world: World, dtype: torch.dtype | None, mode: str = "", sizes: int = 1) -> Step:
    """Steps of a network on its device; ``dtype`` is autocast's, and ``mode`` of train.compile."""
    schedule = Schedule(options(OptimConfig, "optim/sgd.yaml"), STEPS // 100, STEPS)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    state = TrainState(network, WeightAverage(network, schedule), make_optimizer(network, schedule.config), scaler, {})
    state.loss_sums = state.loss_sums.to(world.device)
    loss: Loss = new_loss(network)
    to_input: Callable[[Any], Tensor] = Batch.network_input
    if mode:
        loss, to_input = compile_step(network, loss, to_input, mode, sizes)
    return partial(
        train_one_epoch,
        ForwardPass(wrap_ddp(network, world), loss, to_input, dtype, world),
        state=state,
        guard=NonFiniteGuard(network, 50, print),
        stop=StopRequest(),
        writer=CheckpointWriter(Path(), print),
        log_step=lambda step, figures: None,
        progress=Progress(0, "", enabled=False),
        accumulate=1,
    )


def make_step(step: Step, batch: Batch) -> None:
    """Make a whole step on one batch."""
    step([batch])


def synthetic(settings: Settings, images: int, side: int = 0, seed: int = 0) -> Batch:
    """A batch of noise that lies on the device already, with boxes and colour gains."""
    side, count = side or settings.side, images * BOXES
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    sizes = uniform(count, 2) * 0.4 + 0.02
    centres = sizes / 2 + uniform(count, 2) * (1 - sizes)
    numbers = torch.stack((torch.arange(count) % images, (uniform(count) * CLASSES).floor()), dim=1)
    batch = Batch(
        images=torch.randint(256, (images, side, side, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2),
        targets=torch.cat((numbers, centres * side, sizes * side), dim=1).float(),
        indices=torch.arange(images),
        letterboxes=torch.empty((0, 4), dtype=torch.float64),
        gains=uniform(images, 3) * 0.6 + 0.7,
    )
    return batch.to(settings.device)
