"""The state that training changes, saved to checkpoints and restored from them."""

import platform
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from conf import CheckpointError, first_line
from conf.cli.run_files import checked_config
from conf.options import changed_values
from conf.schema import TrainConfig, TrainSection
from data.progress import counted
from models.loss import LossParts
from train_utils import distributed, numerics, optim
from train_utils.checkpoint import State
from train_utils.coco_eval import ABSENT, Evaluation
from train_utils.distributed import World

LOSS_NAMES = ("loss", *(f"loss_{field}" for field in LossParts._fields[1:]))
COUNTERS = "epoch step seen best best_epoch evaluated_epoch loss_steps".split()  # saved as they are


@dataclass
class TrainState:
    """The objects and counters that training changes, and a ``description`` of the rest."""

    model: torch.nn.Module  # the plain model, never a DDP wrapper
    average: optim.WeightAverage
    schedule: optim.Schedule
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    description: State
    epoch: int = 0  # epochs finished
    step: int = 0  # optimiser steps made
    seen: int = 0  # images trained on, including those of the initial weights: Darknet's count
    best: float = ABSENT  # best AP so far
    best_epoch: int = 0
    evaluated_epoch: int = 0  # the last evaluated one, on rank 0
    best_metrics: dict[str, float] = field(default_factory=dict)  # on rank 0
    loss_steps: int = 0  # steps of the current epoch in loss_sums, which are this rank's

    @classmethod
    def create(cls, model: torch.nn.Module, config: TrainConfig, steps_per_epoch: int, description: State) -> Self:
        """The state before the first step; ``model`` is on its device."""
        schedule = optim.Schedule(config.optim, steps_per_epoch, steps_per_epoch * config.train.epochs)
        device = next(model.parameters()).device
        precision = numerics.autocast_dtype(config.train.precision, device)
        average = optim.WeightAverage(model, schedule.ema_decay)
        optimizer = optim.make_optimizer(model, config.optim)
        # Low at first: only after its passes is a step divided by its positives.
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**11, enabled=precision is torch.float16)
        seen = int(getattr(model, "seen", 0))
        return cls(model, average, schedule, optimizer, scaler, description, seen=seen)

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        self.loss_sums = torch.zeros(len(LOSS_NAMES), dtype=torch.float64, device=device)

    def stop_reason(self, options: TrainSection, world: World) -> str | None:
        """Why training ends here; None if it goes on. All ranks ask together and get one answer."""
        if self.epoch >= options.epochs:
            return f"{counted(options.epochs, 'epoch')} done (train.epochs)"
        waited = self.epoch - self.best_epoch if self.evaluated_epoch == self.epoch else 0
        # Only rank 0 has metrics.
        if distributed.any_rank(world.is_main and 0 < options.patience <= waited):
            return f"no better AP in {counted(options.patience, 'epoch')} (train.patience)"
        return None

    def record(self, evaluation: Evaluation | None) -> bool:
        """Record metrics, if any; return whether AP is the best. Without boxes the latest are."""
        if evaluation is None:
            return False
        self.evaluated_epoch, score = self.epoch, evaluation.metrics["AP"]
        if score <= self.best != ABSENT:
            return False
        self.best = score
        self.best_epoch = self.epoch
        self.best_metrics = dict(evaluation.metrics)
        return True

    def best_sentence(self) -> str:
        """The best AP so far and its epoch, or why there is none."""
        if self.best_epoch == 0:
            return "not evaluated yet"
        if self.best == ABSENT:
            return f"no AP, since the validation set has no boxes; best.pt is of epoch {self.best_epoch}"
        return f"best AP {self.best:.4f} after epoch {self.best_epoch}"

    @property
    def lr(self) -> float:
        """The learning rate of the convolution weights, at the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters, in the order of the optimiser."""
        parameters = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        return parameters

    def update(self, gradient_norm: Tensor, losses: Tensor) -> None:
        """Make an optimiser step, which the caller counts, and add ``losses`` to the epoch's."""
        limit = self.schedule.config.clip_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, gradient_norm)
        self.optimizer.step()  # scaler.step() would ask the device again whether all is finite
        self.scaler.update()
        self.average.update()
        self.loss_sums += losses
        self.loss_steps += 1

    def mean_losses(self, world: World) -> dict[str, float]:
        """Means over the epoch's steps and all ranks, which call this together, by name, or NaN."""
        means = distributed.sum_over_ranks(self.loss_sums) / (self.loss_steps * world.world_size)
        return dict(zip(LOSS_NAMES, means.tolist(), strict=True))

    @property
    def steps_of_epoch(self) -> int:
        """Steps made in the current epoch."""
        return self.step - self.epoch * self.schedule.steps_per_epoch

    def end_epoch(self) -> None:
        """Count a finished epoch."""
        self.epoch += 1
        self.loss_sums.zero_()
        self.loss_steps = 0

    def to_plain(self) -> State | None:
        """Gather the state as plain data on rank 0; None on the others. All ranks call this."""
        of_cuda = torch.empty(0, dtype=torch.uint8)
        if torch.cuda.is_initialized():
            of_cuda = torch.cuda.get_rng_state()
        generators = distributed.gather_arrays(torch.get_rng_state().numpy())
        on_cuda = distributed.gather_arrays(of_cuda.numpy())
        sums = distributed.gather_arrays(self.loss_sums.cpu().numpy())
        if generators is None or on_cuda is None or sums is None:
            return None
        return {
            **self.description,
            **dict(zip(COUNTERS, attrgetter(*COUNTERS)(self), strict=True)),
            "metrics": dict(self.best_metrics),
            "model": self.model.state_dict(),
            "ema": self.average.module.state_dict(),
            "ema_updates": self.average.updates,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "loss_sums": torch.from_numpy(np.stack(sums)),
            "rng": list(map(torch.tensor, generators)),
            "cuda_rng": list(map(torch.tensor, on_cuda)),  # empty where CUDA is not in use
            "world_size": len(generators),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        }

    def resume(self, state: State, folder: Path, world: World) -> str:
        """Take a checkpoint's content; return what changed. CheckpointError if it does not fit."""
        for key in ("names", "data"):
            if repr(state[key]) != repr(self.description[key]):  # a forged value may not compare
                raise CheckpointError(
                    f"resume={folder}: the training set would change ({state[key]} -> {self.description[key]})",
                    f"data.root=<where its data lie>, or start a new run with model.weights={folder}",
                )
        try:
            self._restore(state, world)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise CheckpointError(
                f"resume={folder}: its checkpoint does not fit this training ({reason})",
                f"start a new run with model.weights={folder}",
            ) from error
        lines = [f"resumed {folder} after epoch {self.epoch}, step {self.step}; {self.best_sentence()}"]
        before, now = state.get("val"), self.description.get("val")
        if before is not None and repr(before) != repr(now):  # an older version kept none
            lines.append(f"the validation set is another one ({before} -> {now}): the best epoch is chosen anew")
            self.best = ABSENT
            self.best_epoch = self.evaluated_epoch = 0
            self.best_metrics = {}
        of_run = checked_config(state["config"], "the checkpoint")
        changed = changed_values(of_run, self.description["config"])
        lines += [f"changed: {key}: {change}" for key, change in changed.items()]
        if "train.epochs" in changed:
            lines.append("learning rate and mosaics follow the schedule of the new train.epochs from here on")
        return "\n".join(lines)

    def _restore(self, state: State, world: World) -> None:
        """Take the values of a checkpoint; those of another training raise many kinds of errors."""
        self.model.load_state_dict(state["model"])
        self.average.load(state["ema"], state["ema_updates"])
        optim.restore_optimizer(self.optimizer, state["optimizer"])
        scaler = state["scaler"]
        if scaler:  # empty if the precision was another one
            now = self.scaler.state_dict()
            self.scaler.load_state_dict({key: type(value)(scaler[key]) for key, value in now.items()})
        for name in COUNTERS:
            setattr(self, name, state[name])
        steps = self.schedule.steps_per_epoch
        if not 0 <= self.steps_of_epoch <= steps:
            raise ValueError(f"step {self.step} is not in epoch {self.epoch + 1} of {steps} steps each")
        if self.step > 0:  # an epoch without steps left reports, and saves, the rates of its last one
            self.schedule.apply(self.optimizer, self.step - 1)
        self.best_metrics = dict(state["metrics"])
        same_ranks, sums = state["world_size"] == world.world_size, state["loss_sums"]
        self.loss_sums.copy_(sums[world.rank] if same_ranks else sums.mean(0))
        rank = world.rank if same_ranks else 0  # generators of ranks differ only by what plugins drew
        torch.set_rng_state(state["rng"][rank])
        if torch.cuda.is_initialized() and len(state["cuda_rng"][rank]):
            torch.cuda.set_rng_state(state["cuda_rng"][rank])
