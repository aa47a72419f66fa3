"""A network of two layers, its state, and epochs of the real loop on noise, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Decay, OptimConfig, Optimizer
from data import Batch
from data.progress import Progress
from models.loss import LossParts
from train_utils.checkpoint import CheckpointWriter
from train_utils.distributed import StopRequest, World
from train_utils.engine import EpochResult, ForwardPass, NonFiniteGuard, train_one_epoch
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.train_state import TrainState

WORLD = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
CONFIG = OptimConfig(
    name=Optimizer.sgd,
    lr=0.01,
    final_lr_ratio=0.05,
    decay=Decay.cosine,
    flat_fraction=0.0,
    momentum=0.937,
    weight_decay=5e-4,
    warmup_epochs=3,
    clip_norm=None,
    ema_decay=0.9999,
)


class MeanLoss:
    """A mean over the images, whose shares are their sums, as in a detection loss."""

    def count_positives(self, targets: Tensor) -> Tensor:
        return targets.new_zeros(0)

    def sums(self, raw_maps: Iterable[Tensor], *_: Any) -> tuple[LossParts, Tensor]:
        maps = torch.stack(list(raw_maps))
        value = maps.square().mean() * len(maps)
        return LossParts(value, *[value.detach()] * (len(LossParts._fields) - 1)), maps.new_full((), len(maps))


mean_loss = MeanLoss()


def batches(size: int, count: int) -> list[Batch]:
    images = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return [
        Batch(images[start : start + size], torch.zeros(0, 6), torch.arange(start, start + size))
        for start in range(0, count, size)
    ]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.LeakyReLU(0.1), nn.Conv2d(8, 4, 3))


def network_with_norm() -> nn.Module:
    """A network with buffers and all three groups of parameters."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    return layers.to(memory_format=torch.channels_last)


def new_state(model: nn.Module, schedule: Schedule, loss_scale: float | None = None) -> TrainState:
    """A training before its first step; ``loss_scale`` is float16's, as on a GPU."""
    options = asdict(schedule.config) | {"decay": schedule.config.decay.value, "name": str(schedule.config.name)}
    return TrainState(
        model=model,
        average=WeightAverage(model, schedule.ema_decay),
        schedule=schedule,
        optimizer=make_optimizer(model, schedule.config),
        scaler=torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, enabled=loss_scale is not None),
        description={"network": {}, "names": [], "data": {}, "config": {"optim": options}},
    )


def tensors(state: TrainState) -> list[Tensor]:
    """All that a step changes: weights and buffers, their average, and the optimiser's means."""
    momentum = [tensor for values in state.optimizer.state.values() for tensor in values.values()]
    return [*state.model.state_dict().values(), *state.average.module.state_dict().values(), *momentum]


def train_epoch(
    state: TrainState,
    loader: Iterable[Any],
    accumulate: int = 1,
    loss: Any = mean_loss,
    *,
    world: World = WORLD,
    to_input: Any = None,
    autocast_dtype: torch.dtype | None = None,
    limit: int = 0,
    log_line: Any = print,
) -> EpochResult:
    """One epoch of the real loop; ``limit`` and ``log_line`` go to NonFiniteGuard."""
    to_input = to_input or (lambda batch: batch.images.to(next(state.model.parameters()).dtype).div_(255))
    return train_one_epoch(
        ForwardPass(state.model, loss, to_input, autocast_dtype, world),
        state,
        loader,
        guard=NonFiniteGuard(state.model, limit, log_line),
        stop=StopRequest(),
        writer=CheckpointWriter(Path(), print),
        log_step=lambda step, metrics: None,
        progress=Progress(0, "train", enabled=False),
        accumulate=accumulate,
    )
