"""One optimiser step: micro-batches go in, the weights change or the step is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.distributed import World, max_over_ranks, sum_over_ranks
from train_utils.errors import TrainError
from train_utils.loop.interfaces import ImageBatch, Loss
from train_utils.loop.nonfinite import NonFiniteGuard
from train_utils.loop.stop_and_save import Decision, StepDecisions
from train_utils.optim import Schedule
from train_utils.run.run_state import LOSS_NAMES, RunState


@dataclass
class OptimiserStep:
    """Makes one step after another: ``add`` micro-batches until it is ``full``, then ``update``.

    ``model`` is ``state.model`` as ``wrap_model`` returned it. A step takes ``accumulate``
    micro-batches. ``autocast_dtype`` is that of the forward pass (None: that of the weights), and
    ``to_input`` turns a batch on its device into the network's floats.
    """

    model: nn.Module
    loss: Loss
    state: RunState
    schedule: Schedule
    world: World
    accumulate: int
    autocast_dtype: torch.dtype | None
    to_input: Callable[[Any], Tensor]
    guard: NonFiniteGuard
    decisions: StepDecisions
    passes: int = 0  # micro-batches so far, of the step under way

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.state.optimizer.param_groups for p in group["params"]]
        self.sums = torch.zeros_like(self.state.loss_sums)
        self.losses: dict[str, float] = {}  # of the last step on this rank, by LOSS_NAMES

    @property
    def full(self) -> bool:
        """Whether all micro-batches of the step are here."""
        return self.passes == self.accumulate

    @property
    def lr(self) -> float:
        """Learning rate of the convolution weights."""
        return float(self.state.optimizer.param_groups[0]["lr"])

    def add(self, on_host: ImageBatch) -> None:
        """Forward and backward pass of one micro-batch; the last one of a step syncs gradients."""
        state = self.state
        if self.passes == 0:
            self.guard.begin_step(state.model)
            self.schedule.apply(state.optimizer, state.step)
        batch = on_host.to(self.world.device, non_blocking=True)
        self.passes += 1
        ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        sync = nullcontext() if ddp is None or self.full else ddp.no_sync()
        with explain_out_of_memory(len(batch.images), self.accumulate, self.world.world_size), sync:
            parts = self.loss(
                self.forward(self.model, self.to_input(batch)),
                batch.targets,
                objectness_ratio=self.schedule.burn_in(state.step),
                sum_over_ranks=sum_over_ranks,
                world_size=self.world.world_size,
            )
            # Each rank has its share of the loss, and DDP averages gradients over the ranks.
            share = parts.total * (self.world.world_size / self.accumulate)
            state.scaler.scale(share).backward()
        state.seen += self.world.world_size * len(batch.images)
        # Times the number of ranks, so that the mean over ranks is the loss.
        self.sums += torch.stack([part.detach() for part in parts]).double() * self.world.world_size

    def forward(self, network: nn.Module, images: Tensor) -> list[Tensor]:
        """Raw maps of ``images``, (B, 3, H, W) on the device."""
        with torch.autocast(self.world.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            maps: list[Tensor] = network(images)
        return maps

    def update(self) -> Decision:
        """Update the weights, or skip if a loss or gradient of any rank is not finite."""
        state, clip_norm = self.state, self.schedule.config.clip_norm
        state.scaler.unscale_(state.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        means = self.sums / self.accumulate
        *losses, _ = on_host = torch.cat([means, norm.to(means).view(1)]).tolist()  # a step's only wait for the device
        self.losses = dict(zip(LOSS_NAMES, losses, strict=True))
        finite = all(map(math.isfinite, on_host))
        decision = self.decisions.decide(finite, state.step + 1)
        if decision.skip:
            self._skip()
        else:
            self.guard.in_a_row = 0
            if clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, clip_norm, norm)
            state.optimizer.step()  # scaler.step() would ask the device again whether all is finite
            state.scaler.update()
            state.average.update()
            state.loss_sums += means
            state.loss_steps += 1
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self.sums.zero_()
        self.passes = 0
        return decision

    def rehearse(self, side: int) -> None:
        """Run one DDP pass on an empty image of ``side`` pixels, before a resumed state is loaded.

        After its first backward pass DDP puts gradients into other buckets. With three or more
        ranks it then adds in another order. A resumed run needs that pass too, or it would differ
        from the uninterrupted run in the last bits.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        self.model.train()
        device, dtype = self.world.device, self.parameters[0].dtype
        parts = self.loss(
            self.forward(self.model, torch.zeros(2, 3, side, side, device=device, dtype=dtype)),
            torch.tensor([[0, 0, side / 2, side / 2, side / 2, side / 2]], device=device),
            objectness_ratio=1.0,
            sum_over_ranks=sum_over_ranks,
            world_size=self.world.world_size,
        )
        parts.total.backward()
        self.state.optimizer.zero_grad(set_to_none=True)

    def _skip(self) -> None:
        """Let ``guard`` undo the step; all ranks call this together.

        If float16's loss scale was above 1 and fell because of this step, the scale may be the
        cause. A scale of 1 enlarges no gradient. If only the norm overflowed, the scale stays.
        """
        state = self.state
        loss_broke = max_over_ranks([not all(map(math.isfinite, self.losses.values()))])[0]
        scale = state.scaler.get_scale()
        state.scaler.update()
        if not loss_broke and scale > max(1.0, state.scaler.get_scale()):
            self.guard.overflow(state.step, scale)
        else:
            self.guard.skip(state.step, self.losses)


@contextmanager
def explain_out_of_memory(images: int, accumulate: int, world_size: int) -> Iterator[None]:
    """Raise TrainError with the next lower train.micro_batch_size if torch runs out of memory.

    ``images`` are those of one rank in one of the ``accumulate`` passes of a step.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        lower = [size for size in range(1, images) if images * accumulate % size == 0]
        fix = f"train.micro_batch_size={lower[-1] * world_size}, or " if lower else ""
        raise TrainError(
            f"out of memory in a pass of train.micro_batch_size={images * world_size} images over all ranks. "
            f"fix: {fix}a smaller train.image_size or model.width"
        ) from error
