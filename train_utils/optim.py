"""SGD or AdamW with three groups, the schedule as a function of the step, the weight average."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import OPTIMISERS, Decay, OptimConfig, Optimizer

WARMUP_MIN_STEPS = 500
WARMUP_MAX_SHARE = 0.1  # of the training's steps
WARMUP_MOMENTUM = 0.9  # at its first step
# What torch keeps for each parameter: all of these, or nothing yet.
STATE_KEYS = {torch.optim.SGD: {"momentum_buffer"}, torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}}
EMA_WINDOW = 0.08  # of the steps made; from .02 to .16 nothing changes (docs/develop/decisions.md)
Pair = tuple[list[Tensor], list[Tensor]]  # targets and sources of one dtype
FAST_BIASES = 10  # times lr, of biases at the start of warm-up with name=sgd: heads start fast


@dataclass(frozen=True)
class Schedule:
    """Every quantity that changes with the optimiser step, as a pure function of it, from 0."""

    config: OptimConfig
    steps_per_epoch: int
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        """Length of warm-up in optimiser steps; 0 if there is none."""
        if self.config.warmup_epochs == 0:
            return 0
        wanted = max(self.config.warmup_epochs * self.steps_per_epoch, WARMUP_MIN_STEPS)
        return min(round(wanted), round(WARMUP_MAX_SHARE * self.total_steps))

    def warmup(self, step: int) -> float:
        """Fraction of warm-up that is done after this step, 0..1."""
        return 1.0 if self.warmup_steps == 0 else min(1.0, (step + 1) / self.warmup_steps)

    def lr_factor(self, step: int) -> float:
        """Rate / ``optim.lr`` without warm-up: 1 at step 0, ``final_lr_ratio`` at the last step."""
        flat = self.config.flat_share(self.total_steps)
        done = step / max(1, self.total_steps - 1)
        progress = min(1.0, max(0.0, done - flat) / (1 - flat))
        low = self.config.final_lr_ratio
        left = {Decay.cosine: (1 + math.cos(math.pi * progress)) / 2, Decay.linear: 1 - progress}
        return low + (1 - low) * left[self.config.decay] if self.config.decay in left else 1.0

    def ema_decay(self, updates: int) -> float:
        """Decay of the weight average at update number ``updates``, counted from 1.

        A decay d averages over about 1 / (1 - d) steps: EMA_WINDOW times the steps made, plus 1,
        until ``ema_decay`` limits it (Karras et al. 2024, arXiv 2312.02696, section 3.1).
        """
        steps = EMA_WINDOW * updates
        return min(self.config.ema_decay, steps / (1 + steps))

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Overwrite rate, momentum and decay of ``make_optimizer``'s groups for this step.

        During warm-up rates and decay rise from 0, momentum or beta1 moves from 0.9, and the rate
        of biases falls from ``FAST_BIASES`` with plain SGD. What a checkpoint holds of other
        options is overwritten.
        """
        lr = self.config.lr
        done = self.warmup(step)
        share = done * self.lr_factor(step)
        momentum = (1 - done) * WARMUP_MOMENTUM + done * self.config.momentum
        of_biases = FAST_BIASES * lr if self.config.name == Optimizer.sgd else lr
        for group in optimizer.param_groups:
            group["lr"] = lr * share
            if group["name"] == "bias":
                group["lr"] = lr * ((1 - done) * of_biases / lr + share)
            if "betas" in group:
                group["betas"] = momentum, group["betas"][1]
            elif "momentum" in group:
                group["momentum"] = momentum
            if "nesterov" in group:
                group["nesterov"] = True  # torch's constructor would require a momentum above 0
            if group["name"] == "convolution":
                group["weight_decay"] = done * self.config.weight_decay


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser of ``config.name`` over the trainable parameters in three groups.

    In order: ``convolution`` (weights of two dimensions and more, the only ones that decay),
    ``norm`` (those of one, as of batch norm), ``bias``. ``Schedule.apply`` sets the rest each step.
    """
    groups: list[dict[str, Any]] = []
    for name in ("convolution", "norm", "bias"):
        groups.append({"params": [], "name": name, "weight_decay": 0.0})
    convolution, norm, bias = groups
    for name, parameter in model.named_parameters():
        group = convolution if parameter.ndim > 1 else norm
        if name.rpartition(".")[2] == "bias":
            group = bias
        if parameter.requires_grad:
            group["params"].append(parameter)
    if config.name == Optimizer.adamw:
        return torch.optim.AdamW(groups, lr=config.lr, fused=True)  # the plain one reads its count of steps
    make = OPTIMISERS.get(config.name, torch.optim.SGD)
    optimizer: torch.optim.Optimizer = make(groups, config.lr)
    return optimizer


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved state in the memory layout of the parameters, or raise many kinds of errors."""
    keys = STATE_KEYS.get(type(optimizer))
    if keys is not None:  # the schedule sets their groups; a plugin may keep state there
        saved = {**optimizer.state_dict(), "state": saved["state"]}
    optimizer.load_state_dict(saved)
    for parameter, values in optimizer.state.items():
        if keys is not None and values.keys() not in (keys, set()):
            raise ValueError(f"the optimiser keeps {', '.join(keys)}, the file has {', '.join(values)}")
        for key, value in values.items():
            if keys is not None and value.shape != (() if key == "step" else parameter.shape):
                raise ValueError(f"{key} of the optimiser has the shape {value.shape} in the file")
            if isinstance(value, Tensor) and value.shape == parameter.shape:  # files hold row-major tensors
                values[key] = torch.empty_like(parameter).copy_(value)


class WeightAverage:
    """Exponential moving average of the weights; batch-norm statistics are those of the last step.

    They are averages already; averaged again they would lag behind (docs/develop/decisions.md).
    ``module`` is a copy in eval mode; tensors of ``model`` must from then on change in place.
    """

    def __init__(self, model: nn.Module, decay: Callable[[int], float]) -> None:
        self._decay = decay
        self.updates = 0
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        self._weights = pairs_by_dtype(self.module.parameters(), model.parameters())
        self._statistics = pairs_by_dtype(self.module.buffers(), model.buffers())

    @torch.no_grad()
    def update(self) -> None:
        """Blend in the weights, and copy the statistics, after an optimiser step."""
        self.updates += 1
        weight = 1 - self._decay(self.updates)
        for averaged, current in self._weights:
            torch._foreach_lerp_(averaged, current, weight)
        for copied, current in self._statistics:
            torch._foreach_copy_(copied, current)

    def load(self, state: dict[str, Tensor], updates: int) -> None:
        """Restore a saved average (state dict of the plain model) and its number of updates."""
        self.module.load_state_dict(state)
        self.updates = updates


def pairs_by_dtype(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> list[Pair]:
    """Group pairs of tensors by dtype: on CUDA only lists of one dtype share a kernel."""
    groups: dict[torch.dtype, Pair] = {}
    for target, source in zip(targets, sources, strict=True):
        of_targets, of_sources = groups.setdefault(target.dtype, ([], []))
        of_targets.append(target)
        of_sources.append(source)
    return list(groups.values())
