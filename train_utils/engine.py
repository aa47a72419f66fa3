"""One epoch of training: the loop over batches, and what happens to steps that are not finite."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from conf import TrainError
from conf.schema import Compile, TrainSection
from data import Batch, TrainBatchSampler
from data.progress import LogLine, Progress, counted
from models import Darknet
from models.layers import Dropout
from models.loss import HeadLoss, LossParts
from train_utils import auto, checkpoint, compile, distributed, numerics, optim
from train_utils.train_state import LOSS_NAMES, TrainState

# By these the CPU's allocator, CUDA, cuDNN and cuBLAS say that memory is full.
MEMORY_IS_FULL = (
    "can't allocate memory",
    "out of memory",
    "unable to find an engine",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
MAX_NONFINITE_STEPS = 3  # in a row; one more ends the training
HELP = "a lower optim.lr, a longer optim.warmup_epochs, optim.clip_norm=10, or train.precision=float32"


@dataclass(frozen=True)
class ForwardPass:
    """The network with its loss: what every micro-batch goes through."""

    model: torch.nn.Module  # the plain model, or as ``wrap_ddp`` returned it
    loss: HeadLoss | compile.CompiledLoss
    to_input: compile.ToInput  # turns a batch, on its device, into the network's floats
    autocast_dtype: torch.dtype | None  # None: that of the weights
    world: distributed.World

    @classmethod
    def create(
        cls,
        model: Darknet,
        loss: HeadLoss,
        options: TrainSection,
        compile_mode: str,
        *,
        batches: TrainBatchSampler,
        world: distributed.World,
        log_line: LogLine,
    ) -> Self:
        """Compile the step for ``batches`` by the mode that choose_mode gave; wrap for DDP."""
        for layer in model.modules():
            if isinstance(layer, Dropout):
                layer.place = world.rank, world.world_size, batches.sampler.unit
        images = options.epochs * batches.steps_per_epoch * options.batch_size // world.world_size
        is_fused = auto.fuses_norm(options, world, model, batches.images_per_rank)
        if is_fused:
            log_line("train.fused_norm=true: batch norm and activation in one pass")
        if options.compile is Compile.auto and compile_mode == "default":
            longer = compile.INPUT_ONLY if is_fused else "default"
            compile_mode = longer if auto.pays_back(model, options.image_size, images) else "off"
        to_input = Batch.network_input
        step: tuple[HeadLoss | compile.CompiledLoss, compile.ToInput] = loss, to_input
        if compile_mode != "off":
            sizes = batches.sizes.count
            step = compile.compile_step(model, loss, to_input, compile_mode, sizes, log_line=log_line)
        dtype = numerics.autocast_dtype(options.precision, world.device)
        return cls(distributed.wrap_ddp(model, world), *step, dtype, world)

    def positives_per_image(self, targets: Iterable[Tensor], images: int) -> Tensor:
        """What the loss asks of all ``targets`` of a step, of ``images`` over all ranks."""
        counts = [self.loss.count_positives(each.to(self.world.device)) for each in targets]
        positives = torch.stack(counts).sum(0)
        return (distributed.sum_over_ranks(positives) if len(positives) else positives) / images

    def __call__(
        self, images: Tensor, targets: Tensor, per_image: Tensor, warmup: float, refines: bool = False
    ) -> tuple[LossParts, Tensor]:
        """Sums and divisor of the loss on ``images`` (B, 3, H, W), float; ``warmup`` is 0..1."""
        with torch.autocast(images.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            raw_maps = self.model(images)
        return self.loss.sums(raw_maps, targets, per_image, warmup, refines)


class EpochResult(NamedTuple):
    """The result of one epoch of training, or of the part of it until a stop."""

    lr: float  # of the convolution weights, at the last step
    losses: dict[str, float]  # means over the epoch and all ranks, by LOSS_NAMES
    images_per_second: float
    waiting: float  # share of the time that this rank waited for batches


def train_one_epoch(
    forward: ForwardPass,
    state: TrainState,
    loader: Iterable[Batch],
    guard: "NonFiniteGuard",
    stop: distributed.StopRequest,
    *,
    writer: checkpoint.CheckpointWriter,
    log_step: Callable[[int, Mapping[str, float]], None],
    progress: Progress,
    accumulate: int,
    refines: bool = False,
) -> EpochResult:
    """Train on the batches that ``loader`` has left of an epoch, or until all ranks stop.

    A step takes ``accumulate`` batches. One whose loss or gradient is not finite changes nothing;
    after every other one ``log_step`` gets its number, the rate and this rank's losses. Raises what
    ``guard.skip`` and, before checkpoints and at the end, ``check_weights`` do.
    """
    world = forward.world
    forward.model.train()
    seen = 0  # images of the epoch
    waited = 0.0
    started = time.perf_counter()

    def live_metrics() -> dict[str, str]:
        loss = float(state.loss_sums[0]) / max(1, state.loss_steps)
        return {"loss": f"{loss:.4g}", "wait": f"{waited / (time.perf_counter() - started):.0%}"}

    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        micro_batches = list(itertools.islice(batches, accumulate))
        waited += time.perf_counter() - asked
        if not micro_batches:
            break
        guard.begin_step()
        state.schedule.apply(state.optimizer, state.step)
        images = world.world_size * sum(map(len, map(attrgetter("images"), micro_batches)))
        seen += images
        state.seen += images
        means, norm = add_gradients(forward, state, micro_batches, images, refines)
        numbers = torch.cat([means, norm.to(means).view(1)])
        votes = stop.votes(skip=~numbers.isfinite().all(), save=writer.is_due(state.step + 1))
        *losses, _, skip, save, signal = torch.cat([numbers, votes]).tolist()  # the step's only host read
        named = dict(zip(LOSS_NAMES, losses, strict=True))
        stop.agree(signal)
        if skip:
            guard.skip(state, named)
        else:
            guard.in_a_row = 0
            state.update(norm, means)
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        if not skip:
            log_step(state.step, {"lr": state.lr, **named})
        if save or stop.agreed:
            check_weights(state)
            writer.save(state.to_plain())
        if stop.agreed:
            break
        progress.at(seen, live_metrics)
    check_weights(state)
    seconds = time.perf_counter() - started
    return EpochResult(state.lr, state.mean_losses(world), seen / seconds, waited / seconds)


def add_gradients(
    forward: ForwardPass, state: TrainState, micro_batches: list[Batch], images: int, refines: bool
) -> tuple[Tensor, Tensor]:
    """Put the gradients of a step, of ``images`` over all ranks, into the parameters.

    Empties the list of ``micro_batches``: their memory is for the next ones. Returns this rank's
    losses, float64, whose mean over the ranks is that of the step, and the norm of the gradients.
    """
    model, world = forward.model, forward.world
    warmup = state.schedule.warmup(state.step)
    per_image = forward.positives_per_image(map(attrgetter("targets"), micro_batches), images)
    sums = torch.zeros_like(state.loss_sums)
    divisor = state.loss_sums.new_zeros(1)
    while micro_batches:
        batch = micro_batches.pop(0).to(world.device, non_blocking=True)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = not micro_batches  # as its no_sync() does
        parts, share = forward(forward.to_input(batch), batch.targets, per_image, warmup, refines)
        # DDP averages gradients over the ranks.
        state.scaler.scale(parts.total * (world.world_size / images)).backward()
        sums += torch.stack([part.detach() for part in parts])
        divisor += share
        del batch, parts
    # The positives of all passes and ranks are known only now.
    divisor = distributed.sum_over_ranks(divisor).clamp(min=images)
    state.scaler.unscale_(state.optimizer)
    gradients = [parameter.grad for parameter in state.parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, (images / divisor[0]).to(gradients[0].dtype))
    return sums * (world.world_size / divisor), get_total_norm(gradients)


def rehearse(forward: ForwardPass, state: TrainState, side: int) -> None:
    """Run one DDP pass on empty images of ``side`` pixels, before a resumed state is loaded.

    After its first backward pass DDP puts gradients into other buckets. With three or more ranks it
    then adds in another order, and a resumed run would differ in the last bits without that pass.
    """
    if not isinstance(forward.model, DistributedDataParallel):
        return
    forward.model.train()
    images = torch.zeros(2, 3, side, side, device=forward.world.device, dtype=state.parameters[0].dtype)
    targets = torch.tensor([[0, 0, side / 2, side / 2, side / 2, side / 2]], device=forward.world.device)
    parts, _ = forward(images, targets, forward.positives_per_image([targets], len(images)), 1.0)
    parts.total.backward()
    state.optimizer.zero_grad(set_to_none=True)


def check_weights(state: TrainState) -> None:
    """Raise TrainError on all ranks if a weight, a statistic or its average is not finite."""
    values = [*state.model.state_dict().values(), *state.average.module.state_dict().values()]
    largest = get_total_norm(list(filter(torch.is_floating_point, values)), math.inf)
    if distributed.any_rank(not math.isfinite(largest)):
        raise TrainError(
            f"a weight or batch-norm statistic is not finite after {counted(state.step, 'step')}, "
            "and training cannot recover; the last checkpoint predates it",
            HELP,
        )


class NonFiniteGuard:
    """Undoes what a bad step did to batch norm of ``model``; ``limit`` in a row may be skipped."""

    def __init__(self, model: torch.nn.Module, limit: int, log_line: LogLine) -> None:
        self.in_a_row = 0  # steps skipped; the caller sets it to 0 after a good step
        self._limit, self._log_line = limit, log_line
        self._buffers = optim.pairs_by_dtype(map(torch.clone, model.buffers()), model.buffers())

    def begin_step(self) -> None:
        """Copy the model's buffers before the step."""
        for before, now in self._buffers:
            torch._foreach_copy_(before, now)

    def skip(self, state: TrainState, losses: Mapping[str, float]) -> None:
        """Undo the step in the model's buffers; ``losses`` are those of this rank.

        All ranks call this together. If float16's loss scale was above 1 and fell because of this
        step, the scale may be the cause, and the step does not count. Raises TrainError after more
        than ``limit`` steps in a row that count, and at once if a weight broke the step.
        """
        for before, now in self._buffers:
            torch._foreach_copy_(now, before)
        check_weights(state)
        loss_broke = distributed.any_rank(not all(map(math.isfinite, losses.values())))
        scale, step = state.scaler.get_scale(), state.step + 1  # as in steps.csv
        state.scaler.update()
        if not loss_broke and scale > max(1.0, state.scaler.get_scale()):
            self._log_line(
                f"step {step}: a gradient overflows at a loss scale of {scale:g}: update skipped, "
                "the scale falls. float16 does this in its first steps and sometimes later; "
                "it counts once the scale is at 1"
            )
            return
        self.in_a_row += 1
        named = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        self._log_line(f"step {step}: loss or gradient is not finite ({named}): update skipped")
        if self.in_a_row > self._limit:
            raise TrainError(
                f"loss or gradient is no longer finite at step {step} ({named}), "
                f"{counted(self.in_a_row, 'step')} in a row",
                HELP,
            )


@contextmanager
def explain_out_of_memory(batches: TrainBatchSampler, world: distributed.World) -> Iterator[None]:
    """Raise TrainError with the next lower train.micro_batch_size if torch runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in MEMORY_IS_FULL):
            raise
        images = batches.images_per_rank
        lower = [size for size in range(1, images) if images * batches.accumulate % size == 0]
        fix = f"train.micro_batch_size={lower[-1] * world.world_size}, or " if lower else ""
        raise TrainError(
            f"out of memory in a pass of train.micro_batch_size={images * world.world_size} images over all ranks",
            f"{fix}a smaller train.image_size or model.width",
        ) from error
