"""Detect on all batches of a loader, for evaluation and prediction."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.backends import cudnn

from data.progress import Progress
from train_utils.numerics import DTYPES, keep_to_one_thread, one_thread_per_operator
from train_utils.results import DETECTION, Detections, make_detections

AnyBatch = Any  # data.Batch, or FrameBatch without indices
RawMaps = list[Tensor]
Found = tuple[AnyBatch, list[Tensor]]  # a batch and what was found on its images, (n, 6) each
_QUEUEING = Lock()


def collect_detections(
    found: Iterable[Found], to_original: Callable[[AnyBatch, int, ndarray], ndarray], progress: Progress
) -> Detections:
    """All detections; ``to_original(batch, i, boxes_xyxy)`` maps float64 boxes to i's pixels."""
    tables = [np.zeros(0, DETECTION)]
    with progress:
        for batch, detections in found:
            for i, rows in enumerate(detections):
                table = rows.double().numpy()
                position = int(batch.indices[i])
                boxes_xyxy = to_original(batch, i, table[:, :4])
                tables.append(make_detections(position, table[:, 5], table[:, 4], boxes_xyxy))
            progress.advance(len(detections))
    return np.concatenate(tables)


def detect_batches(
    model: Callable[[Tensor], RawMaps],
    loader: Iterable[AnyBatch],
    postprocess: Callable[[RawMaps], list[Tensor]],
    device: torch.device,
    *,
    precision: str = "float32",
    on_raw_maps: Callable[[AnyBatch, RawMaps], object] | None = None,
    in_turn: bool = False,
) -> Iterator[Found]:
    """Yield each batch with its detections, in order; ``model`` is on ``device``, in eval mode.

    ``postprocess`` turns raw maps into one (n, 6) tensor per image, on the CPU: x1, y1, x2, y2,
    score, class, at network scale. ``on_raw_maps`` gets each batch and its raw maps. ``precision``
    is one of EvalPrecision: tf32 lets convolutions on a GPU round their factors, auto is float32.

    On a CPU the last bits of a convolution depend on how many threads share it. So each batch is
    computed by one thread, several at a time. With ``in_turn`` all threads share a batch, which is
    faster for a single one. On a GPU a batch is finished while the next one is computed.
    """
    dtype, tf32 = DTYPES.get(precision), precision == "tf32"

    # The mode is thread-local, so it is entered in each function.
    def forward(batch: AnyBatch) -> RawMaps:
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            return model(batch.to(device, non_blocking=True).network_input())

    def finish(batch: AnyBatch, raw_maps: RawMaps) -> Found:
        with torch.inference_mode():
            if on_raw_maps is not None:
                on_raw_maps(batch, raw_maps)
            return batch, postprocess(raw_maps)

    def detect(batch: AnyBatch) -> Found:
        return finish(batch, forward(batch))

    def forward_by_cudnn(batch: AnyBatch) -> RawMaps:
        # A benchmark would choose other algorithms on each rank. Without tf32 the metrics are those
        # of IEEE 754's float32, even in a training with TF32. The flags are process-wide, so one
        # thread at a time queues its batch.
        with _QUEUEING, cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            return forward(batch)

    if device.type != "cpu":
        yield from _overlapped(forward_by_cudnn, finish, loader, device)
        return
    if in_turn:
        yield from map(detect, loader)
        return
    with one_thread_per_operator() as threads, ThreadPoolExecutor(threads, initializer=keep_to_one_thread) as pool:
        waiting = []
        for batch in loader:
            waiting.append(pool.submit(detect, batch))
            # Yield results as soon as they are there: the next frame of a camera may be slow.
            while waiting and (len(waiting) > threads or waiting[0].done()):
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream of a GPU for all evaluations: torch caches freed memory for each stream."""
    return torch.cuda.Stream(device)


def _overlapped(
    forward: Callable[[AnyBatch], RawMaps],
    finish: Callable[[AnyBatch, RawMaps], Found],
    loader: Iterable[AnyBatch],
    device: torch.device,
) -> Iterator[Found]:
    """Queue the forward pass of the next batch, then finish the previous one on a second stream."""
    beside = side_stream(device)

    def finish_beside(batch: AnyBatch, raw_maps: RawMaps, computed: torch.cuda.Event) -> Found:
        with torch.cuda.stream(beside):
            beside.wait_event(computed)
            return finish(batch, raw_maps)

    waiting = None
    for batch in loader:
        raw_maps = forward(batch)
        computed = torch.cuda.current_stream(device).record_event()
        if waiting is not None:
            yield finish_beside(*waiting)
        waiting = batch, raw_maps, computed
    if waiting is not None:
        yield finish_beside(*waiting)
