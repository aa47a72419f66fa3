"""Detections for every image of a loader, for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from train_utils.loop.interfaces import ImageBatch, NetworkInput
from train_utils.memory.out_of_memory import detection_pass
from train_utils.numerics import one_thread_per_operator
from train_utils.scores.detections import Detections, make_detections
from train_utils.terminal.progress import Progress

BatchType = TypeVar("BatchType", bound=ImageBatch)
InputType = TypeVar("InputType", bound=NetworkInput)


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

    ``postprocess`` turns raw maps into one (n, 6) tensor per image: x1, y1, x2, y2, score, class,
    at network scale. ``to_original(batch, i, boxes_xyxy)`` maps float64 boxes of the batch's i-th
    image to its original pixels. The result's image ids are positions in the data set. An image's
    detections do not depend on the number of ranks or threads.
    """
    was_training = model.training
    model.eval()
    found = []
    with progress:
        for batch, detections in detect_batches(model, loader, postprocess, device):
            for i, rows in enumerate(detections):
                table = rows.double().cpu().numpy()
                boxes_xyxy = to_original(batch, i, table[:, :4])
                found.append(make_detections(int(batch.indices[i]), table[:, 5].astype(int), table[:, 4], boxes_xyxy))
            progress.advance(len(detections))
    model.train(was_training)
    return np.concatenate(found) if found else make_detections(0, np.zeros(0, int), np.zeros(0), np.zeros((0, 4)))


def detect_batches(
    model: Callable[[Tensor], list[Tensor]],
    loader: Iterable[InputType],
    postprocess: Callable[[list[Tensor]], list[Tensor]],
    device: torch.device,
    batch_key: str = "evaluate.batch_size",
) -> Iterator[tuple[InputType, list[Tensor]]]:
    """Yield each batch with its detections, in order; ``model`` is on ``device``, in eval mode.

    On a CPU the last bits of a convolution depend on how many threads share it. So there one thread
    computes a batch, while others compute other batches: any number of cores gives the same result.
    Raises TrainError if memory runs out; it names ``batch_key``, the option of the batch size.
    """

    def forward(batch: InputType) -> tuple[InputType, list[Tensor]]:
        # The mode is thread-local, so it is entered here.
        with torch.inference_mode(), detection_pass(device, batch.images.shape, batch_key):
            images = batch.to(device, non_blocking=True).images.float().div_(255)
            return batch, postprocess(model(images))

    if device.type != "cpu":
        # A benchmark would choose algorithms by speed, different ones on each rank. Figures are
        # those of IEEE 754's float32, also in a training with TF32.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield from map(forward, loader)
        return
    with one_thread_per_operator() as threads, ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[tuple[InputType, list[Tensor]]]] = []
        for batch in loader:
            waiting.append(pool.submit(forward, batch))
            # What is finished leaves at once: the next frame of a slow camera may take its time.
            while waiting and (len(waiting) > threads or waiting[0].done()):
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()
