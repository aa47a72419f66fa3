"""One epoch of training: a plain loop over batches."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from train_utils.distributed import sum_over_ranks
from train_utils.loop.interfaces import ImageBatch
from train_utils.loop.step import OptimiserStep
from train_utils.progress import Progress
from train_utils.run.run_state import LOSS_NAMES, RunState

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
