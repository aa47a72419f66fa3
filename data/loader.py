"""Batches: their tensors, their memory, and their way from worker processes to the device."""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import cv2
import numpy as np
import torch

from data.colour import network_input
from data.errors import DataError
from data.plan import Request

# Forked workers share the pages of the index, start in milliseconds and never touch CUDA. The
# system libraries of macOS do not survive a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
HOST = torch.device("cpu")
PREFETCHED_BATCHES = 4  # per worker, at most
PINNED_BYTES = 2e9  # of the batches that wait in page-locked memory, which no other program can have
PATIENCE = 0.4  # share of the time-out: the cause is reported before other ranks stop waiting
# The fields of a batch that travel to a device. With the others, always on the host, it names
# images and maps detections back to them.
OF_THE_DEVICE = ("images", "targets", "gains")


@dataclass
class Batch:
    """B samples of one size with T boxes in all."""

    images: torch.Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    targets: torch.Tensor  # float32 (T, 6): position in the batch, class, cx, cy, w, h in pixels of these images
    indices: torch.Tensor  # int64 (B,) positions in the data set
    # float64 (B, 4) ratio_x, ratio_y, pad_x, pad_y; (0, 4) for training samples
    letterboxes: torch.Tensor = field(default_factory=lambda: torch.empty((0, 4), dtype=torch.float64))
    # float32 (B, 3) of hue, saturation and value, for network_input to apply; (0, 3): none
    gains: torch.Tensor = field(default_factory=lambda: torch.empty((0, 3)))

    def network_input(self) -> torch.Tensor:
        """The images as floats in 0..1, with the gains applied, on the batch's device."""
        return network_input(self.images, self.gains)

    def pin_memory(self) -> Self:
        """The batch with what the device needs in page-locked memory; the loader calls this."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in OF_THE_DEVICE})

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch with what the network and the loss need on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in OF_THE_DEVICE}
        return replace(self, **moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory on the device until what ``stream`` has queued by its release is done."""
        for name in OF_THE_DEVICE:
            getattr(self, name).record_stream(stream)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        # From a worker only the images travel as shared memory: for each such tensor the training
        # process asks the worker, which is busy with the next batch.
        return _receive, (self.images, *(getattr(self, one.name).numpy() for one in fields(self)[1:]))


def _receive(images: torch.Tensor, *others: np.typing.NDArray[Any]) -> Batch:
    return Batch(images, *map(torch.from_numpy, others))


def empty_images(requests: Sequence[Request]) -> torch.Tensor:
    """Return uninitialised memory for the images of a batch, uint8 (B, H, W, 3).

    In a worker it is shared with the training process. Raises ``DataError`` where there is no more.
    """
    height, width = requests[0].height, requests[0].width
    assert all((request.height, request.width) == (height, width) for request in requests), "one size per batch"
    shape = (len(requests), height, width, 3)
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As torch's own collate function does: a tensor that is not shared yet would be copied when it
    # is sent.
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(math.prod(shape))
    except RuntimeError as error:
        raise DataError(
            f"no shared memory for a batch of {math.prod(shape) / 1e6:.0f} MB ({error}). fix: make /dev/shm larger (in "
            "a container: --shm-size=8g), or lower data.workers; 0 does without"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class BatchLoader(torch.utils.data.DataLoader[Batch]):
    """A torch loader that raises DataError if its workers hang.

    On a GPU its batches arrive there while the ones before them are in use.
    """

    copies: torch.cuda.Stream | None  # on a GPU; one for all epochs, as torch keeps freed memory for each stream

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._loaded() if self.copies is None else copied_ahead(self._loaded(), self.copies)

    def _loaded(self) -> Iterator[Batch]:
        """The batches on the host."""
        batches: Any = super().__iter__()
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError as error:
                if not (self.timeout and "timed out" in str(error)):
                    raise
                # A hung worker may ignore SIGTERM, and the exit of the program would wait for it.
                handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each
                for worker in batches._workers:
                    worker.kill()
                    worker.join()
                signal.signal(signal.SIGCHLD, handler)
                raise DataError(
                    f"the {self.num_workers} worker process(es) gave no batch for {self.timeout:g} s. fix: look for a "
                    "disk that does not respond, raise data.workers, or allow a longer time-out"
                ) from error
            if batch is None:
                return
            passed_on = [batch]
            del batch  # else the next call would free it first, which takes milliseconds
            yield passed_on.pop()


def make_loader(
    dataset: torch.utils.data.Dataset[Batch],
    batch_sampler: Iterable[list[Request]],
    workers: int,
    device: torch.device = HOST,
    timeout_seconds: float = 0.0,
    *,
    batch_bytes: float = 0.0,
) -> BatchLoader:
    """Make a loader of ``Batch``; its ``workers`` processes (0: none) live as long as it does.

    Batches for a GPU, ``device``, are there already; others are on the host. Raises DataError if
    the processes give no batch for PATIENCE times ``timeout_seconds`` (0: no limit). The largest
    batch has ``batch_bytes``; no more than PINNED_BYTES wait for a GPU, or one for each worker.
    """
    pinned = device.type == "cuda"
    fitting = int(PINNED_BYTES / max(1, workers * batch_bytes)) if pinned else PREFETCHED_BATCHES
    loader = BatchLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=torch.utils.data.default_convert,  # none: __getitems__ returns whole batches
        pin_memory=pinned,
        worker_init_fn=_start_worker,
        multiprocessing_context=START_METHOD if workers else None,
        generator=torch.Generator(),  # for the workers' seed, so that the global one is not used
        persistent_workers=workers > 0,
        prefetch_factor=min(max(1, fitting), PREFETCHED_BATCHES) if workers else None,
        timeout=PATIENCE * timeout_seconds if workers else 0,
    )
    loader.copies = torch.cuda.Stream(device) if pinned else None
    return loader


def copied_ahead(batches: Iterable[Batch], copies: torch.cuda.Stream) -> Iterator[Batch]:
    """Yield the ``batches`` on a GPU, copied on the stream ``copies``.

    A batch is handed over once the next one is on its way, so that its copy runs beside the
    computation; the stream in use waits for the copy, the host does not. A batch that nobody asked
    for any more is dropped.
    """

    def arrived() -> Batch:
        batch, copied = ahead.pop(0)
        stream = torch.cuda.current_stream(copies.device)
        stream.wait_event(copied)
        batch.record_stream(stream)  # its memory belongs to the stream of the copies
        return batch

    ahead: list[tuple[Batch, torch.cuda.Event]] = []
    for batch in batches:
        with torch.cuda.stream(copies):
            ahead.append((batch.to(copies.device, non_blocking=True), copies.record_event()))
        if len(ahead) > 1:
            yield arrived()
    if ahead:
        yield arrived()


def _start_worker(worker: int) -> None:
    """Leave signals to the training process, and give each worker one core.

    Ctrl-C and SLURM's signals reach every process of a job. The training process handles them and
    needs its workers until the end of the step. Workers exit with it.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM cannot be ignored: the training process ends leftover workers with it at exit.
    if hasattr(signal, "sigwaitinfo"):  # macOS does not tell the sender, and SIGTERM ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, args=(os.getppid(),), daemon=True).start()
    cv2.setNumThreads(0)


def _obey_parent(parent: int) -> None:
    """End this worker on SIGTERM from its parent; ignore SIGTERM from all others."""
    while sys.platform != "darwin" and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
