"""One update of the weights: micro-batches in, and what all processes decide about it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from train_utils.distributed import World, gradient_exchange, loss_factor, max_over_ranks, sum_over_ranks
from train_utils.loop.interfaces import ImageBatch
from train_utils.loop.nonfinite import NonFiniteGuard
from train_utils.loop.stop_and_save import Decision, StepDecisions
from train_utils.memory.out_of_memory import training_pass
from train_utils.optim import Schedule
from train_utils.parallel.image_sums import ImageSummed, ImagewiseLoss
from train_utils.parallel.wait_clock import WaitClock
from train_utils.run.run_state import LOSS_NAMES, RunState


@dataclass
class OptimiserStep:
    """Makes one step after another: ``add`` micro-batches until it is ``full``, then ``update``.

    ``model`` is ``state.model``, wrapped or not; see engine.train_one_epoch.
    """

    model: nn.Module
    loss: Callable[..., Any]
    state: RunState
    schedule: Schedule
    world: World
    accumulate: int
    autocast_dtype: torch.dtype | None
    to_input: Callable[[Any], Tensor]
    guard: NonFiniteGuard
    decisions: StepDecisions
    clock: WaitClock
    batches: list[ImageBatch] = field(default_factory=list)  # of the step under way, on the device

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.state.optimizer.param_groups for p in group["params"]]
        self.sums = torch.zeros_like(self.state.loss_sums)
        self._sum_over_ranks = self.clock.timed(sum_over_ranks)
        if isinstance(self.model, ImageSummed):
            self.loss = ImagewiseLoss(self.loss)

    @property
    def full(self) -> bool:
        """Whether all micro-batches of the step are here."""
        return len(self.batches) == self.accumulate

    def add(self, on_host: ImageBatch) -> None:
        """Forward and backward pass of one micro-batch; with the last one of a step the gradients
        travel.
        """
        state = self.state
        if not self.batches:
            self.guard.begin_step(state.model)
            self.schedule.apply(state.optimizer, state.step)
        batch = on_host.to(self.world.device, non_blocking=True)
        self.batches.append(batch)
        exchange = gradient_exchange(self.model, self.full, state.step, on_host.indices.tolist())
        with training_pass(self.world.device, batch.images.shape, self.accumulate), exchange:
            parts = self.loss(
                self.forward(self.model, batch),
                batch.targets,
                objectness_ratio=self.schedule.burn_in(state.step),
                sum_over_ranks=self._sum_over_ranks,
                world_size=self.world.world_size,
            )
            share = parts.total * (loss_factor(self.model, self.world) / self.accumulate)
            state.scaler.scale(share).backward()
            self.clock.end()  # begun where the last gradient was there
        # So that the mean over the ranks is the loss.
        self.sums += torch.stack([part.detach().double() for part in parts]) * self.world.world_size

    def forward(self, network: nn.Module, batch: ImageBatch) -> list[Tensor]:
        """Raw maps of a batch on the device."""
        with torch.autocast(self.world.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            maps: list[Tensor] = network(self.to_input(batch))
        return maps

    def update(self) -> Decision:
        """Change the weights, or leave the step out where a loss or gradient of any process is not
        finite.
        """
        state, clip_norm = self.state, self.schedule.config.clip_norm
        state.scaler.unscale_(state.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        finite = bool(self.sums.isfinite().all() & norm.isfinite())  # waits for the device
        self.clock.read_device()
        with self.clock:
            decision = self.decisions.decide(finite, state.step + 1)
        if decision.skip:
            self._skip()
        else:
            self.guard.good()
            if clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, clip_norm, norm)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.average.update(state.model)
            state.loss_sums += self.sums / self.accumulate
            state.loss_steps += 1
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.seen += self.world.world_size * sum(len(batch.indices) for batch in self.batches)
        self.sums.zero_()
        self.batches.clear()
        return decision

    def _skip(self) -> None:
        """Have ``guard`` undo the step; all processes come here together.

        Where float16's loss scale fell because of the step, and was above 1, the scale may be the
        reason. From 1 on it makes no gradient larger, and a norm that overflows while no gradient
        does leaves it as it is.
        """
        state = self.state
        losses = dict(zip(LOSS_NAMES, (self.sums / self.accumulate).tolist(), strict=True))
        loss_broke = max_over_ranks([not all(map(math.isfinite, losses.values()))])[0]
        scale = state.scaler.get_scale()
        state.scaler.update()
        if not loss_broke and scale > max(1.0, state.scaler.get_scale()):
            self.guard.overflow(state.model, state.step, scale)
        else:
            self.guard.skip(
                state.model, state.step, self.batches, losses, lambda batch: self.forward(state.model, batch)
            )
