"""One epoch of training: batches, optimiser steps, and steps that are not finite."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.distributed import World, max_over_ranks, sum_over_ranks
from train_utils.errors import TrainError
from train_utils.optim import Schedule, pairs_by_dtype
from train_utils.progress import Progress
from train_utils.stop import Decision, StepDecisions
from train_utils.train_state import LOSS_NAMES, RunState

SumOverRanks = Callable[[Tensor], Tensor]  # a tensor of one shape on all ranks -> its sum over them


class NetworkInput(Protocol):
    """What a forward pass needs of a batch."""

    images: Tensor  # uint8 (B, 3, H, W)

    def to(self, device: torch.device, non_blocking: bool = False) -> NetworkInput:
        """Copy to ``device``."""
        ...


class ImageBatch(NetworkInput, Protocol):
    """What training and scoring need of a batch: see data.Batch."""

    targets: Tensor  # float32 (T, 6): image in the batch, class, cx, cy, w, h in pixels
    indices: Tensor  # int64 (B,) positions in the data set

    def to(self, device: torch.device, non_blocking: bool = False) -> ImageBatch:
        """Copy to ``device``."""
        ...


class LossParts(Protocol):
    """Scalars in the order of run_state.LOSS_NAMES; the first is ``total``."""

    @property
    def total(self) -> Tensor:
        """The rank's share of the loss, for backward; shares of all ranks add up."""
        ...

    def __iter__(self) -> Iterator[Tensor]: ...


class Loss(Protocol):
    """The loss of one micro-batch; models.YoloLoss and models.DarknetLoss are two.

    ``raw_maps`` are the network's outputs and ``targets`` those of ``ImageBatch``. Over burn-in
    ``objectness_ratio`` rises from 0 to 1. The loss calls ``sum_over_ranks`` exactly once, so ranks
    stay in step; ``world_size`` ranks have equally many images.
    """

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        *,
        objectness_ratio: float,
        sum_over_ranks: SumOverRanks,
        world_size: int,
    ) -> LossParts:
        """The parts of this rank's loss."""
        ...


HELP = "a lower optim.lr, a longer optim.burn_in_epochs, optim.clip_norm=10, or train.precision=float32"


class NonFiniteGuard:
    """Undoes what a bad step did to batch-norm statistics, and limits bad steps in a row.

    ``limit`` steps in a row may be skipped (0: none). ``say`` gets lines for the log.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.in_a_row = 0  # steps skipped; the caller sets it to 0 after a good step
        self._limit, self._say = limit, say
        self._buffers: list[tuple[list[Tensor], list[Tensor]]] = []  # (copies before the step, of the model)
        self._told_overflow = False

    def begin_step(self, model: nn.Module) -> None:
        """Copy the buffers of the plain model, always the same one, before the step."""
        if not self._buffers:
            buffers = list(model.buffers())
            self._buffers = pairs_by_dtype([buffer.clone() for buffer in buffers], buffers)
        for before, now in self._buffers:
            torch._foreach_copy_(before, now)

    def skip(self, step: int, losses: Mapping[str, float]) -> None:
        """Undo step ``step`` (from 0) in the model's buffers; ``losses`` are those of this rank.

        All ranks call this together. Raises TrainError after more than ``limit`` such steps in a
        row.
        """
        self._undo()
        self.in_a_row += 1
        named = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        self._say(f"step {step}: loss or gradient is not finite ({named}): update skipped")
        if self.in_a_row > self._limit:
            raise TrainError(
                f"loss or gradient is no longer finite at step {step} ({named}), {self.in_a_row} step(s) in a row. "
                f"fix: {HELP}"
            )

    def overflow(self, step: int, scale: float) -> None:
        """Undo step ``step`` (from 0), whose gradients overflowed at float16's loss ``scale``.

        The scale has been lowered already. This is logged once and never counted.
        """
        self._undo()
        if not self._told_overflow:
            self._say(
                f"step {step}: a gradient overflows at a loss scale of {scale:g}: update skipped, the scale falls. "
                "float16 does this in its first steps and sometimes later; it counts once the scale is at 1"
            )
        self._told_overflow = True

    @torch.no_grad()
    def _undo(self) -> None:
        for before, now in self._buffers:
            torch._foreach_copy_(now, before)


@dataclass
class OptimiserStep:
    """Makes one step after another: ``add`` micro-batches until it is ``full``, then ``update``.

    ``model`` is ``state.model`` as ``wrap_ddp`` returned it. A step takes ``accumulate``
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


BatchType = TypeVar("BatchType", bound=ImageBatch)


class EpochResult(NamedTuple):
    """The result of one epoch of training, or of the part of it until a stop."""

    lr: float  # of the convolution weights, at the last step
    losses: dict[str, float]  # means over the epoch and all ranks, by LOSS_NAMES
    images_per_second: float
    waiting: float  # share of the time that this rank waited for batches
    stopped_by: signal.Signals | None


class Waiting(Generic[BatchType]):
    """Iterates over the batches of a loader and counts the ``seconds`` spent waiting for them."""

    def __init__(self, loader: Iterable[BatchType]) -> None:
        self._batches = iter(loader)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[BatchType]:
        return self

    def __next__(self) -> BatchType:
        asked = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - asked


def train_one_epoch(
    step: OptimiserStep,
    loader: Iterable[ImageBatch],
    progress: Progress,
    save: Callable[[], None],
    log: Callable[[], None],
) -> EpochResult:
    """Train on the batches that ``loader`` has left of an epoch.

    A step whose loss or gradient is not finite changes nothing. All ranks call ``save`` when they
    decide to save or stop. ``log`` is called after each step that was not skipped. Raises
    TrainError if too many steps in a row are skipped.
    """
    state, world = step.state, step.world
    step.model.train()
    images_done, started = 0, time.perf_counter()
    waiting = Waiting(loader)
    stopped_by = None

    def figures() -> dict[str, str]:
        share = waiting.seconds / (time.perf_counter() - started)
        return {"loss": f"{_means(state, 1)['loss']:.4g}", "wait": f"{share:.0%}"}

    with progress:
        for batch in waiting:
            step.add(batch)
            images_done += len(batch.indices) * world.world_size
            if not step.full:
                continue
            decision = step.update()
            if not decision.skip:
                log()
            if decision.save or decision.stop:
                save()
                step.decisions.saved()
            if decision.stop:
                stopped_by = decision.stop
                break
            progress.at(images_done, figures)
    seconds = time.perf_counter() - started
    share = waiting.seconds / seconds
    return EpochResult(step.lr, _means(state, world.world_size), images_done / seconds, share, stopped_by)


def _means(state: RunState, world_size: int) -> dict[str, float]:
    """Mean losses of the epoch so far, over all ranks, or of this rank if ``world_size`` is 1."""
    sums = sum_over_ranks(state.loss_sums) if world_size > 1 else state.loss_sums
    means = sums / max(1, state.loss_steps * world_size)
    return dict(zip(LOSS_NAMES, means.tolist(), strict=True))
