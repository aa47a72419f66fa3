"""What training changes, gathered so that it can be written to a checkpoint and taken up again."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from train_utils.checkpoint import load_last, save_checkpoint
from train_utils.distributed import World, gather_arrays
from train_utils.errors import CheckpointError
from train_utils.optim import WeightAverage


@dataclass
class RunState:
    """The objects that training changes, and its counters.

    ``description`` is what never changes: the network's cfg and shape, class names, resolved configuration. With it a
    checkpoint needs nothing beside it.
    """

    model: nn.Module  # the plain model, never a DDP wrapper
    average: WeightAverage
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    description: dict[str, Any]
    epoch: int = 0  # epochs finished
    step: int = 0  # optimiser steps made
    seen: int = 0  # images trained on, those of the initial weights included: Darknet's count
    best: float = -1.0  # best AP so far
    best_epoch: int = 0
    best_figures: dict[str, float] = field(default_factory=dict)  # on the first process

    def record(self, figures: dict[str, float]) -> bool:
        """Take the figures of an evaluation; whether its AP is the best so far."""
        if not figures or figures["AP"] <= self.best:
            return False
        self.best, self.best_epoch, self.best_figures = figures["AP"], self.epoch, dict(figures)
        return True

    def to_plain(self) -> dict[str, Any] | None:
        """The state as plain data on the first process, None on the others, which all take part in collecting it."""
        generators = gather_arrays(torch.get_rng_state().numpy())
        if generators is None:
            return None
        return {
            **self.description,
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "figures": dict(self.best_figures),
            "model": self.model.state_dict(),
            "ema": self.average.module.state_dict(),
            "ema_updates": self.average.updates,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": {"epoch": self.epoch, "micro_batch": 0},
            "rng": [torch.from_numpy(np.array(state)) for state in generators],
            "world_size": len(generators),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        }

    def save(self, folder: Path, is_best: bool, best_only: bool) -> None:
        """Write ``checkpoints/last.pt`` and, after the best epoch, ``checkpoints/best.pt`` below ``folder``.

        ``last.pt`` keeps its predecessor beside it: a torn disk loses one epoch, not the run.
        """
        state = self.to_plain()
        if state is None:
            return
        if is_best:
            save_checkpoint(folder / "checkpoints" / "best.pt", state)
        if not best_only:
            save_checkpoint(folder / "checkpoints" / "last.pt", state, keep_previous=True)

    def resume(self, folder: Path, world: World) -> str:
        """Take up the last checkpoint of a run folder; says in one sentence from where.

        Raises CheckpointError when there is none or when it belongs to another network.
        """
        state, message = load_last(folder)
        if "optimizer" not in state:
            raise CheckpointError(
                f"resume={folder}: its checkpoint holds converted weights and no training that could go on."
                " fix: start a new run with model.weights=<the .pt file>"
            )
        seen = images_seen(state)
        state["network"].pop("seen", None)
        for key in ("network", "names"):
            if state[key] != self.description[key]:
                raise CheckpointError(
                    f"resume={folder}: its {key} differs from the one configured now. fix: resume with the options of "
                    f"{folder / 'config.yaml'}, or start a new run with model.weights={folder / 'checkpoints/best.pt'}"
                )
        self.model.load_state_dict(state["model"])
        self.average.load(state["ema"], state["ema_updates"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step, self.seen = state["epoch"], state["step"], seen
        self.best, self.best_epoch, self.best_figures = state["best"], state["best_epoch"], dict(state["figures"])
        if state["world_size"] == world.world_size:
            torch.set_rng_state(state["rng"][world.rank])
        lines = [f"resumed {folder} after epoch {self.epoch}, step {self.step}, best AP {self.best:.4f}"]
        changed = changed_values(state["config"], self.description["config"])
        return "\n".join([*([message] if message else []), *lines, *(f"changed: {line}" for line in changed)])


def images_seen(state: Mapping[str, Any]) -> int:
    """How many images the network of a checkpoint was trained on, those of its initial weights included."""
    return int(state.get("seen", state["network"].get("seen", 0)))  # older checkpoints have it there


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Full keys whose values differ between two configurations, as ``key: old -> new``; the run's own folder aside."""
    lines = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_values(old, new, f"{prefix}{key}.")
        elif old != new and f"{prefix}{key}" not in ("run_dir", "resume"):
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines
