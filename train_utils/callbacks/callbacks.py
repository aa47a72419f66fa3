"""Call the callbacks of plugins, and find out whether one changes the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from train_utils.distributed import World, max_over_ranks
from train_utils.errors import TrainError
from train_utils.numerics import cuda_generator
from train_utils.run.run_state import RunState
from train_utils.run.whole_files import whole_file

MOMENTS = ("run_start", "step", "epoch", "evaluation", "checkpoint", "end")
WATCHED = ("weights", "averaged weights", "gradients", "optimiser state", "random numbers", "layers")
NONE: Mapping[str, float] = MappingProxyType({})
FAR = 2**60  # steps
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
ROW_FACTOR = 0x1E3779B97F4A7C15  # odd and without pattern: makes factors of different rows unrelated
TOUCHED = "touched.json"  # in the run folder, if a callback changed something


@dataclass(frozen=True)
class Moment:
    """What a callback may read; the models are those of the training, not copies."""

    name: str  # one of MOMENTS
    step: int  # optimiser steps done
    epoch: int  # epochs finished
    epochs: int
    folder: Path  # of the run
    model: nn.Module  # the weights in training
    average: nn.Module  # the averaged weights, which are scored
    losses: Mapping[str, float] = field(default_factory=dict)  # of a step on this rank, of an epoch on all
    figures: Mapping[str, float] = field(default_factory=dict)  # COCO's, on rank 0, at evaluation and end


class Added(Protocol):
    """A callback as a plugin registers it."""

    every_rank: bool

    def __call__(self) -> Any:
        """Make the object whose methods are called."""
        ...


CALLBACKS: dict[str, Added] = {}  # of the plugins in use, by name


class Callbacks:
    """The callbacks of this rank; all ranks call ``at`` together, except at the moment ``step``.

    All tensors of the training are read before and after each call, which takes as long as copying
    them. ``say`` reports each difference once, and TOUCHED lists it.
    """

    def __init__(self, state: RunState, world: World, folder: Path, epochs: int, say: Callable[[str], None]) -> None:
        self._state, self._world, self._folder, self._epochs, self._say = state, world, folder, epochs, say
        self._made = {name: make() for name, make in CALLBACKS.items() if world.is_main or make.every_rank}
        for name, one in self._made.items():
            public = {method for method in dir(one) if not method.startswith("_") and callable(getattr(one, method))}
            if odd := (public - {*MOMENTS}) if public else {"no method"}:
                raise TrainError(
                    f"callback {name} has {min(odd)}: its methods are called at the moments {', '.join(MOMENTS)}. "
                    "fix: one of these names, and _ before those of others"
                )
        self._marks: dict[tuple[str, str, str], Tensor] = {}  # 0: unchanged by the callback
        path = folder / TOUCHED
        self._told = json.loads(path.read_text(encoding="utf-8")) if world.is_main and path.exists() else []

    def at(self, moment: str, losses: Mapping[str, float] = NONE, figures: Mapping[str, float] = NONE) -> None:
        """Call the methods named after this moment. Raises TrainError if a callback fails."""
        state = self._state
        for name in [name for name, one in self._made.items() if hasattr(one, moment)]:
            before = self._prints()
            models = state.model, state.average.module
            view = Moment(moment, state.step, state.epoch, self._epochs, self._folder, *models, losses, figures)
            try:
                getattr(self._made[name], moment)(view)
            except (Exception, SystemExit) as error:
                said = " ".join(str(error).split())
                raise TrainError(
                    f"callback {name} failed at the moment {moment} ({type(error).__name__}: {said}). fix: correct it, "
                    "or leave the plugin out"
                ) from error
            for what, one, other in zip(WATCHED, before, self._prints(), strict=True):
                key, same_shape = (name, moment, what), one.shape == other.shape
                changed = (one != other).any() if same_shape else torch.ones((), dtype=torch.bool, device=one.device)
                mark = changed * (FAR - state.step)  # the earliest step has the largest mark
                self._marks[key] = torch.maximum(self._marks[key], mark) if key in self._marks else mark
        if moment != "step":  # an accelerator's step must not wait for the host
            self._tell()

    def _tell(self) -> None:
        keys = list(product(CALLBACKS, MOMENTS, WATCHED))
        marks = [int(self._marks.get(key, 0)) for key in keys]
        if any(make.every_rank for make in CALLBACKS.values()):
            marks = max_over_ranks(marks)
        new = []
        for (name, moment, what), mark in zip(keys, marks, strict=True):
            row = {"callback": name, "moment": moment, "what": what}
            if mark and not any(row.items() <= told.items() for told in self._told):
                new.append(row | {"step": FAR - mark})
                self._say(
                    f"warning: callback {name} changes {what} at the moment {moment} (step {FAR - mark}): without it "
                    f"these weights cannot be had again; {TOUCHED} says so"
                )
        self._told += new
        if new and self._world.is_main:
            with whole_file(self._folder / TOUCHED) as file:
                json.dump(self._told, file, indent=1)
        self._marks.clear()

    def _prints(self) -> list[Tensor]:
        """The fingerprints of each of WATCHED, most of them on the device of the weights."""
        state = self._state
        weights, averages = ([*each.parameters(), *each.buffers()] for each in (state.model, state.average.module))
        gradients = [weight.grad for weight in state.model.parameters() if weight.grad is not None]
        kept = [value for values in state.optimizer.state.values() for value in values.values()]
        tensors = [value for value in kept if isinstance(value, Tensor)]
        layers = [
            [module.training, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)]
            for module in state.model.modules()
        ]
        trained = [[weight.requires_grad, 0, 0, 0] for weight in state.model.parameters()]
        groups = [_prints(group, state.loss_sums.device) for group in (weights, averages, gradients, tensors)]
        random = torch.cat((torch.get_rng_state(), cuda_generator()))
        return [*groups, random, torch.tensor([*layers, *trained])]


def _prints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([fingerprint(one).to(device) for one in tensors]) if tensors else torch.empty(0, device=device)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number (int64, on the tensor's device) computed from a tensor's bits, equal on any device.

    It sums the elements' bits as integers modulo 2**64, each row (first dimension) times its own
    factor. One differing element always shows; several could only cancel by chance.
    """
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    rows = bits.sum(dim=tuple(range(1, bits.ndim)), dtype=torch.int64) if bits.ndim > 1 else bits.long()
    factors = torch.arange(rows.numel(), device=rows.device).view_as(rows) * 2 * ROW_FACTOR + 1
    return (rows * factors).sum()
