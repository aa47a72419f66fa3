"""Detections of every image of a loader: evaluation and prediction."""

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
from train_utils.run.log import Progress
from train_utils.scores.detections import Detections, make_detections

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

    ``postprocess`` turns raw maps into one (n, 6) tensor for each image (x1, y1, x2, y2, score,
    class at network scale); ``to_original(batch, i, boxes_xyxy)`` takes float64 boxes of the
    batch's i-th image back to its pixels. The image field of the result holds positions in the data
    set. An image's detections do not depend on the number of processes or threads that share the
    work.
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
    batch_key: str = "evaluate.batch_size",
) -> Iterator[tuple[InputType, list[Tensor]]]:
    """Each batch with its detections, in order; ``model`` is on ``device`` and in evaluation mode.

    On a CPU a convolution's last bits depend on the number of threads that share it. So there each
    batch is computed by one thread, and the threads work on different batches side by side: the
    same figures on any number of cores.

    Raises TrainError where memory runs out; ``batch_key`` is the option that it names beside the
    image size.
    """

    def forward(batch: InputType) -> tuple[InputType, list[Tensor]]:
        # The mode is thread-local, so it is entered here.
        with torch.inference_mode(), detection_pass(device, batch.images.shape, batch_key):
            images = batch.to(device, non_blocking=True).images.float().div_(255)
            return batch, postprocess(model(images))

    if device.type != "cpu":
        # A benchmark would choose algorithms by speed, other ones in each process.
        cudnn = torch.backends.cudnn
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
            yield from map(forward, loader)
        return
    with one_thread_per_operator() as threads, ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[tuple[InputType, list[Tensor]]]] = []
        for batch in loader:
            waiting.append(pool.submit(forward, batch))
            if len(waiting) > threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()
