"""The two loops: one epoch of training, and evaluation. Plain loops over objects that are handed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from train_utils.coco_eval import Detections, make_detections
from train_utils.distributed import World, no_sync, sum_over_ranks, unwrap
from train_utils.errors import TrainError
from train_utils.log import Progress
from train_utils.optim import Schedule, WeightAverage


class NetworkInput(Protocol):
    """What a forward pass needs of a batch."""

    images: Tensor  # uint8 (B, 3, H, W)

    def to(self, device: torch.device, non_blocking: bool = False) -> NetworkInput: ...


class ImageBatch(NetworkInput, Protocol):
    """What the loops need of a batch: see data.Batch."""

    targets: Tensor  # float32 (T, 6): image in the batch, class, cx, cy, w, h in pixels
    indices: Tensor  # int64 (B,) positions in the data set

    def to(self, device: torch.device, non_blocking: bool = False) -> ImageBatch: ...


BatchType = TypeVar("BatchType", bound=ImageBatch)
InputType = TypeVar("InputType", bound=NetworkInput)
LOSS_NAMES = ("loss", "loss_box", "loss_objectness", "loss_classification")


class EpochResult(NamedTuple):
    """What one epoch of training gave."""

    step: int  # optimiser steps made since the start of training
    lr: float  # of the convolution weights, at the last step
    losses: dict[str, float]  # means over the epoch and all ranks, by LOSS_NAMES
    seconds: float
    images_per_second: float


def train_one_epoch(
    *,
    model: nn.Module,
    loss: Callable[..., Any],
    loader: Iterable[ImageBatch],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    average: WeightAverage,
    schedule: Schedule,
    world: World,
    accumulate: int,
    step: int,
    autocast_dtype: torch.dtype | None,
    to_input: Callable[[Any], Tensor],
    progress: Progress,
) -> EpochResult:
    """Train over one pass of ``loader``, ``accumulate`` micro-batches to an optimiser step, from step ``step`` on.

    ``to_input`` makes of a batch on its device the floats that the network takes. The update is that of the mean loss
    over the step's global batch, whatever the number of processes. Raises TrainError when the loss is not finite.
    """
    model.train()
    plain_model = unwrap(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sums = torch.zeros(len(LOSS_NAMES), dtype=torch.float64, device=world.device)
    images_seen, micro_batches, started = 0, 0, time.perf_counter()
    lr = optimizer.param_groups[0]["lr"]
    for micro_batch, batch in enumerate(loader):
        batch = batch.to(world.device, non_blocking=True)
        images = to_input(batch)
        last_of_step = (micro_batch + 1) % accumulate == 0
        schedule.apply(optimizer, step)
        with no_sync(model, last_of_step):
            with torch.autocast(world.device.type, autocast_dtype, enabled=autocast_dtype is not None):
                raw_maps = model(images)
            parts = loss(
                raw_maps,
                batch.targets,
                objectness_ratio=schedule.burn_in(step),
                sum_over_ranks=sum_over_ranks,
                world_size=world.world_size,
            )
            scaler.scale(parts.total / accumulate).backward()
        sums += torch.stack([part.detach().double() for part in parts])
        images_seen += len(batch.indices) * world.world_size
        micro_batches += 1
        if last_of_step:
            if schedule.config.clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, schedule.config.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            average.update(plain_model)
            lr = optimizer.param_groups[0]["lr"]
            scheduler.step()
            step += 1
        if progress.due(micro_batch + 1):
            means = _finite((sums / micro_batches).tolist(), step)
            progress.show(
                micro_batch + 1,
                **dict(zip(LOSS_NAMES, means, strict=True)),
                lr=lr,
                images_per_second=images_seen / (time.perf_counter() - started),
            )
    means = _finite((sum_over_ranks(sums) / (micro_batches * world.world_size)).tolist(), step)
    seconds = time.perf_counter() - started
    progress.close()
    return EpochResult(step, lr, dict(zip(LOSS_NAMES, means, strict=True)), seconds, images_seen / seconds)


def _finite(losses: list[float], step: int) -> list[float]:
    if not np.isfinite(losses).all():
        named = ", ".join(f"{name} {value:.4g}" for name, value in zip(LOSS_NAMES, losses, strict=True))
        raise TrainError(
            f"the loss is no longer finite at step {step} ({named}). fix: a lower optim.lr, a longer "
            "optim.burn_in_epochs, optim.clip_norm=10, or train.precision=float32"
        )
    return losses


@torch.inference_mode()
def detect(
    model: nn.Module,
    loader: Iterable[BatchType],
    postprocess: Callable[[list[Tensor]], list[Tensor]],
    to_original: Callable[[BatchType, int, np.ndarray], np.ndarray],
    device: torch.device,
    progress: Progress,
) -> Detections:
    """Detections of ``model`` on every image of ``loader``, in original pixels.

    ``postprocess`` turns raw maps into one (n, 6) tensor for each image (x1, y1, x2, y2, score, class at network
    scale); ``to_original(batch, i, boxes_xyxy)`` takes float64 boxes of the batch's i-th image back to its pixels. The
    image field of the result holds positions in the data set. An image's detections do not depend on the number of
    processes or threads that share the work.
    """
    was_training = model.training
    model.eval()
    found = []
    for batch, detections in forward_all(model, loader, postprocess, device):
        for i, rows in enumerate(detections):
            table = rows.double().cpu().numpy()
            boxes_xyxy = to_original(batch, i, table[:, :4])
            found.append(make_detections(int(batch.indices[i]), table[:, 5].astype(int), table[:, 4], boxes_xyxy))
        progress.advance(len(detections))
    progress.close()
    model.train(was_training)
    return np.concatenate(found) if found else make_detections(0, np.zeros(0, int), np.zeros(0), np.zeros((0, 4)))


def forward_all(
    model: Callable[[Tensor], list[Tensor]],
    loader: Iterable[InputType],
    postprocess: Callable[[list[Tensor]], list[Tensor]],
    device: torch.device,
) -> Iterator[tuple[InputType, list[Tensor]]]:
    """Each batch with its detections, in order; ``model`` is on ``device`` and in evaluation mode.

    On a CPU a convolution's last bits depend on the number of threads that share it. So there each batch is computed
    by one thread, and the threads work on different batches side by side: the same figures on any number of cores.
    """

    def forward(batch: InputType) -> tuple[InputType, list[Tensor]]:
        with torch.inference_mode():  # thread-local, so it is entered here
            images = batch.to(device, non_blocking=True).images.float().div_(255)
            return batch, postprocess(model(images))

    if device.type != "cpu":
        # A benchmark would choose algorithms by speed, other ones in each process.
        cudnn = torch.backends.cudnn
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
            yield from map(forward, loader)
        return
    with _one_thread_per_operator() as threads, ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[tuple[InputType, list[Tensor]]]] = []
        for batch in loader:
            waiting.append(pool.submit(forward, batch))
            if len(waiting) > threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


@contextmanager
def _one_thread_per_operator() -> Iterator[int]:
    """Inside, torch computes every operator with one thread; gives the number of threads there were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
