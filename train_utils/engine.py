"""One epoch of training: the loop over batches, and steps that are not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.checkpoint import CheckpointWriter
from train_utils.distributed import World, max_over_ranks, sum_over_ranks
from train_utils.errors import TrainError
from train_utils.optim import Schedule, pairs_by_dtype
from train_utils.progress import Progress
from train_utils.stop import StopRequest
from train_utils.train_state import LOSS_NAMES, TrainState

BatchType = TypeVar("BatchType")
Loss = Callable[..., Any]  # models.YoloLoss is one: four scalars in the order of LOSS_NAMES, the first is ``total``
HELP = "a lower optim.lr, a longer optim.burn_in_epochs, optim.clip_norm=10, or train.precision=float32"


class EpochResult(NamedTuple):
    """The result of one epoch of training, or of the part of it until a stop."""

    lr: float  # of the convolution weights, at the last step
    losses: dict[str, float]  # means over the epoch and all ranks, by LOSS_NAMES
    images_per_second: float
    waiting: float  # share of the time that this rank waited for batches


def train_one_epoch(  # noqa: PLR0913, PLR0915 - what a step needs, and all that it does
    model: nn.Module,
    loss: Loss,
    loader: Iterable[Any],
    state: TrainState,
    schedule: Schedule,
    world: World,
    guard: NonFiniteGuard,
    stop: StopRequest,
    writer: CheckpointWriter,
    *,
    progress: Progress,
    log_step: Callable[[Mapping[str, float]], None],
    accumulate: int,
    autocast_dtype: torch.dtype | None,
    to_input: Callable[[Any], Tensor],
) -> EpochResult:
    """Train on the batches that ``loader`` has left of an epoch, or until all ranks stop.

    ``model`` is ``state.model`` as ``wrap_ddp`` returned it. A step takes ``accumulate`` batches,
    and ``to_input`` turns each, on its device, into the network's floats. ``autocast_dtype`` is
    that of the forward pass (None: that of the weights). ``log_step`` gets the rate and this rank's
    losses after each step that was not skipped: one whose loss or gradient is not finite changes
    nothing. Raises TrainError if too many steps in a row are skipped.
    """
    model.train()
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    sums, passes, images = torch.zeros_like(state.loss_sums), 0, 0  # of the step under way, and of the epoch
    waiting, started = Waiting(loader), time.perf_counter()

    def live_figures() -> dict[str, str]:
        share = waiting.seconds / (time.perf_counter() - started)
        return {"loss": f"{_mean_losses(state, 1)['loss']:.4g}", "wait": f"{share:.0%}"}

    with progress:
        for on_host in waiting:
            if passes == 0:
                guard.begin_step(state.model)
                schedule.apply(state.optimizer, state.step)
            passes += 1
            batch = on_host.to(world.device, non_blocking=True)
            sync = gradient_sync(model, is_last=passes == accumulate)
            with explain_out_of_memory(len(batch.images), accumulate, world.world_size), sync:
                raw_maps = forward(model, to_input(batch), autocast_dtype)
                parts = loss(
                    raw_maps,
                    batch.targets,
                    objectness_ratio=schedule.burn_in(state.step),
                    sum_over_ranks=sum_over_ranks,
                    world_size=world.world_size,
                )
                # Each rank has its share of the loss, and DDP averages gradients over the ranks.
                state.scaler.scale(parts.total * (world.world_size / accumulate)).backward()
            # Times the number of ranks, so that the mean over ranks is the loss.
            sums += torch.stack([part.detach() for part in parts]).double() * world.world_size
            images += world.world_size * len(batch.images)
            state.seen += world.world_size * len(batch.images)
            del raw_maps, parts  # their memory is for the next batch
            if passes < accumulate:
                continue

            state.scaler.unscale_(state.optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            means = sums / accumulate
            *losses, _ = numbers = torch.cat([means, norm.to(means).view(1)]).tolist()  # the step's only host read
            named = dict(zip(LOSS_NAMES, losses, strict=True))
            finite = all(map(math.isfinite, numbers))
            skip, save = stop.agree(skip=not finite, save=writer.is_due(state.step + 1))
            if skip:
                skip_step(state, guard, named)
            else:
                guard.in_a_row = 0
                if schedule.config.clip_norm is not None:
                    nn.utils.clip_grads_with_norm_(parameters, schedule.config.clip_norm, norm)
                state.optimizer.step()  # scaler.step() would ask the device again whether all is finite
                state.scaler.update()
                state.average.update()
                state.loss_sums += means
                state.loss_steps += 1
            state.optimizer.zero_grad(set_to_none=True)
            state.step += 1
            sums.zero_()
            passes = 0
            if not skip:
                log_step({"lr": _lr(state), **named})
            if save or stop.agreed:
                writer.save(state.to_plain())
            if stop.agreed:
                break
            progress.at(images, live_figures)
    seconds = time.perf_counter() - started
    losses_of_epoch = _mean_losses(state, world.world_size)
    return EpochResult(_lr(state), losses_of_epoch, images / seconds, waiting.seconds / seconds)


def rehearse(
    model: nn.Module, loss: Loss, state: TrainState, world: World, autocast_dtype: torch.dtype | None, side: int
) -> None:
    """Run one DDP pass on an empty image of ``side`` pixels, before a resumed state is loaded.

    After its first backward pass DDP puts gradients into other buckets. With three or more ranks it
    then adds in another order. A resumed run needs that pass too, or it would differ from the
    uninterrupted run in the last bits.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.train()
    dtype = next(parameter for parameter in model.parameters() if parameter.requires_grad).dtype
    parts = loss(
        forward(model, torch.zeros(2, 3, side, side, device=world.device, dtype=dtype), autocast_dtype),
        torch.tensor([[0, 0, side / 2, side / 2, side / 2, side / 2]], device=world.device),
        objectness_ratio=1.0,
        sum_over_ranks=sum_over_ranks,
        world_size=world.world_size,
    )
    parts.total.backward()
    state.optimizer.zero_grad(set_to_none=True)


def forward(model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Raw maps of ``images`` (B, 3, H, W) on their device; ``dtype``: that of autocast, if any."""
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        maps: list[Tensor] = model(images)
    return maps


def gradient_sync(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """Around one pass of a step: DDP syncs gradients in the last one only."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext()


def skip_step(state: TrainState, guard: NonFiniteGuard, losses: Mapping[str, float]) -> None:
    """Let ``guard`` undo the step; all ranks call this together, each with its own ``losses``.

    If float16's loss scale was above 1 and fell because of this step, the scale may be the cause. A
    scale of 1 enlarges no gradient. If only the norm overflowed, the scale stays.
    """
    loss_broke = max_over_ranks([not all(map(math.isfinite, losses.values()))])[0]
    scale = state.scaler.get_scale()
    state.scaler.update()
    if not loss_broke and scale > max(1.0, state.scaler.get_scale()):
        guard.overflow(state.step, scale)
    else:
        guard.skip(state.step, losses)


class NonFiniteGuard:
    """Undoes what a bad step did to batch-norm statistics, and limits bad steps in a row.

    ``limit`` steps in a row may be skipped (0: none). ``log_line`` gets lines for the log.
    """

    def __init__(self, limit: int, log_line: Callable[[str], None]) -> None:
        self.in_a_row = 0  # steps skipped; the caller sets it to 0 after a good step
        self._limit, self._log_line = limit, log_line
        self._buffers: list[tuple[list[Tensor], list[Tensor]]] = []  # (copies before the step, of the model)
        self._overflow_is_logged = False

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
        self._log_line(f"step {step}: loss or gradient is not finite ({named}): update skipped")
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
        if not self._overflow_is_logged:
            self._log_line(
                f"step {step}: a gradient overflows at a loss scale of {scale:g}: update skipped, the scale falls. "
                "float16 does this in its first steps and sometimes later; it counts once the scale is at 1"
            )
        self._overflow_is_logged = True

    @torch.no_grad()
    def _undo(self) -> None:
        for before, now in self._buffers:
            torch._foreach_copy_(now, before)


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


def _mean_losses(state: TrainState, world_size: int) -> dict[str, float]:
    """Mean losses of the epoch so far, over all ranks, or of this rank if ``world_size`` is 1."""
    sums = sum_over_ranks(state.loss_sums) if world_size > 1 else state.loss_sums
    means = sums / max(1, state.loss_steps * world_size)
    return dict(zip(LOSS_NAMES, means.tolist(), strict=True))


def _lr(state: TrainState) -> float:
    """The learning rate of the convolution weights."""
    return float(state.optimizer.param_groups[0]["lr"])
