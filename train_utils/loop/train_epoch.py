"""The two loops: one epoch of training, and evaluation. Plain loops over objects that are handed
in.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.distributed import World, sum_over_ranks
from train_utils.loop.interfaces import ImageBatch
from train_utils.loop.nonfinite import NonFiniteGuard
from train_utils.loop.same_weights import check_in_sync
from train_utils.loop.step import OptimiserStep
from train_utils.loop.stop_and_save import StepDecisions
from train_utils.loop.stragglers import RankTimes
from train_utils.numerics import one_thread_per_operator
from train_utils.optim import Schedule
from train_utils.parallel.image_sums import ImageSummed
from train_utils.parallel.wait_clock import WaitClock
from train_utils.run.log import Progress
from train_utils.run.run_state import LOSS_NAMES, RunState

BatchType = TypeVar("BatchType", bound=ImageBatch)


class EpochResult(NamedTuple):
    """What one epoch of training gave, or the part of it until a stop."""

    lr: float  # of the convolution weights, at the last step
    losses: dict[str, float]  # means over the epoch and all ranks, by LOSS_NAMES
    images_per_second: float
    times: RankTimes  # of this process
    stopped_by: signal.Signals | None

    @property
    def waiting(self) -> float:
        """Share of the time that this process waited for batches."""
        return self.times.shares()["data"]


class Waiting(Generic[BatchType]):
    """Passes batches on and counts the seconds that they were waited for."""

    def __init__(self, loader: Iterable[BatchType]) -> None:
        self._loader = loader
        self.seconds = 0.0

    def __iter__(self) -> Iterator[BatchType]:
        batches = iter(self._loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - asked
            if batch is None:
                return
            passed_on = [batch]
            del batch  # kept here it would be freed while the next one is waited for
            yield passed_on.pop()


def train_one_epoch(  # noqa: PLR0913 - what an epoch needs, each by its name
    *,
    model: nn.Module,
    loss: Callable[..., Any],
    loader: Iterable[ImageBatch],
    state: RunState,
    schedule: Schedule,
    world: World,
    accumulate: int,
    autocast_dtype: torch.dtype | None,
    to_input: Callable[[Any], Tensor],
    progress: Progress,
    guard: NonFiniteGuard,
    decisions: StepDecisions,
    save: Callable[[], None],
    check_sync_every: int,
    clock: WaitClock,
) -> EpochResult:
    """Train over what ``loader`` has left of an epoch, ``accumulate`` micro-batches in each step.

    ``model`` is ``state.model``, wrapped or not. ``to_input`` turns a batch on its device into the
    network's floats. A step whose loss or gradient is not finite changes nothing (see ``guard``).
    ``save`` is called on all ranks where ``decisions`` say so. Every ``check_sync_every`` steps (0:
    never) the ranks compare their weights. ``clock`` counts the time spent waiting for peers.
    Raises TrainError where the weights differ or ``guard`` gives up.
    """
    model.train()
    clock.restart()
    step = OptimiserStep(
        model, loss, state, schedule, world, accumulate, autocast_dtype, to_input, guard, decisions, clock
    )
    images_done, first_step, started = 0, state.step, time.perf_counter()
    waiting = Waiting(loader)
    stopped_by = None
    with one_thread_per_operator() if isinstance(model, ImageSummed) else nullcontext():
        for micro_batch, batch in enumerate(waiting, start=1):
            step.add(batch)
            images_done += len(batch.indices) * world.world_size
            if not step.full:
                continue
            lr = state.optimizer.param_groups[0]["lr"]
            decision = step.update()
            with clock:
                check_in_sync(state.model, world, state.step, lr, check_sync_every)
            if decision.save or decision.stop:
                save()
                decisions.saved()
            if decision.stop:
                stopped_by = decision.stop
                break
            if progress.due(micro_batch):
                seconds = time.perf_counter() - started
                progress.show(micro_batch, **_means(state, 1), lr=lr, images_per_second=images_done / seconds)
    seconds = time.perf_counter() - started
    times = RankTimes(seconds, waiting.seconds, clock.seconds, steps=state.step - first_step)
    progress.close()
    lr = state.optimizer.param_groups[0]["lr"]
    return EpochResult(lr, _means(state, world.world_size), images_done / times.seconds, times, stopped_by)


def rehearse(
    model: nn.Module,
    loss: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    side: int,
    world: World,
    autocast_dtype: torch.dtype | None,
) -> None:
    """One pass whose result is thrown away, in front of a resumed run: its state is to be loaded
    afterwards.

    DDP puts gradients in other buckets after its first backward pass. With three or more processes
    it then adds in another order, so a run that goes on must have made that pass too, to be the
    same run to the last bit.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.train()
    parameter = next(model.parameters())
    images = torch.zeros(2, 3, side, side, device=world.device, dtype=parameter.dtype)
    targets = torch.tensor([[0, 0, side / 2, side / 2, side / 2, side / 2]], device=world.device)
    with torch.autocast(world.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        raw_maps = model(images)
    parts = loss(raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=sum_over_ranks, world_size=world.world_size)
    parts.total.backward()
    optimizer.zero_grad(set_to_none=True)


def _means(state: RunState, world_size: int) -> dict[str, float]:
    """Mean losses of the epoch so far; over all processes where ``world_size`` is theirs, else of
    this one.
    """
    sums = sum_over_ranks(state.loss_sums) if world_size > 1 else state.loss_sums
    means = sums / max(1, state.loss_steps * world_size)
    return dict(zip(LOSS_NAMES, means.tolist(), strict=True))
