"""Batches: their tensors, their memory, and their way from worker processes to the device."""

import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import cv2
import torch
from numpy.typing import NDArray

from data.errors import DataError, of_killed_loader
from data.io import end_with_parent
from data.plan import Request
from data.progress import counted

# Forked workers share the pages of the index and start in milliseconds; they never touch CUDA. On
# macOS system libraries break after a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
HOST = torch.device("cpu")
PREFETCHED_BATCHES = 4  # per worker, at most
PINNED_BYTES = 2e9  # of waiting batches in page-locked memory, which other programs cannot use
PATIENCE = 0.4  # share of the time-out: the cause is reported before other ranks stop waiting
# Workers obey it from their parent alone; macOS does not name the sender, and there it ends them.
OF_PARENT = [signal.SIGTERM] if hasattr(signal, "sigwaitinfo") else []
LOOKING_SECONDS = 10.0  # without a batch, to look whether the workers are alive
DEVICE_FIELDS = ("images", "targets", "gains")  # that the device needs; the others stay on the host
MIN_DIVISOR = 1e-6  # of colours: far below the distance between two levels
NO_GAINS = torch.empty((0, 3))
NO_LETTERBOXES = torch.empty((0, 4), dtype=torch.float64)


@dataclass
class Batch:
    """B samples of one size with T boxes in all."""

    images: torch.Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    targets: torch.Tensor  # float32 (T, 6): number in the batch, class, cx, cy, w, h in pixels
    indices: torch.Tensor  # int64 (B,) positions in the data set
    letterboxes: torch.Tensor = NO_LETTERBOXES  # float64 (B, 4) ratio_x, ratio_y, pad_x, pad_y; none in training
    gains: torch.Tensor = NO_GAINS  # float32 (B, 3): hue, saturation and value still to apply, or (0, 3)

    def network_input(self) -> torch.Tensor:
        """The images as floats in 0..1, with the gains applied."""
        return network_input(self.images, self.gains)

    def pin_memory(self) -> Self:
        """The batch with what the device needs in page-locked memory; torch's loader calls this."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in DEVICE_FIELDS})

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch with what the network and the loss need on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in DEVICE_FIELDS}
        return replace(self, **moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the device's memory until ``stream`` has done all that is queued at its release."""
        for name in DEVICE_FIELDS:
            getattr(self, name).record_stream(stream)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        # Only the images travel as shared memory: for each such tensor the training process has to
        # ask the worker, which is busy with the next batch.
        return _receive, (self.images, *(getattr(self, one.name).numpy() for one in fields(self)[1:]))


def _receive(images: torch.Tensor, *others: NDArray[Any]) -> Batch:
    return Batch(images, *map(torch.from_numpy, others))


def network_input(images: torch.Tensor, gains: torch.Tensor = NO_GAINS) -> torch.Tensor:
    """Turn uint8 RGB images (B, 3, H, W) into floats in 0..1, with HSV gains (B, 3) applied.

    Hue wraps around at a full turn; saturation and value saturate at 1. Runs in float32 on the
    images' device. Colours changed on the CPU (``data/dataset.py``) have OpenCV's 8-bit HSV.
    """
    if len(gains) == 0:
        return images.float().div_(255)
    hue_gain, saturation_gain, value_gain = gains.float().T[:, :, None, None]  # (B, 1, 1) each
    red, green, blue = (plane.float().div_(255) for plane in images.unbind(1))  # (B, H, W) each, contiguous
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    divisor = chroma.clamp(min=MIN_DIVISOR)
    # Hue in sixths of a turn; the largest channel decides the formula (Smith 1978).
    hue = torch.where(
        value == red,
        (green - blue).div_(divisor),
        torch.where(value == green, (blue - red).div_(divisor).add_(2), (red - green).div_(divisor).add_(4)),
    )
    hue = torch.where(hue < 0, hue + 6, hue).mul_(hue_gain)
    hue = torch.where(hue < 6, hue, hue - 6)  # a gain is at most 2, so hue is below 12
    saturation = chroma.div_(value.clamp(min=MIN_DIVISOR)).mul_(saturation_gain).clamp_(max=1)
    value.mul_(value_gain).clamp_(max=1)
    chroma = saturation.mul_(value)
    lowest = value.sub_(chroma)
    # Back to RGB: each channel is the lowest value plus a trapezoid of hue around its own hue.
    ramps = ((hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    planes = [torch.addcmul(lowest, chroma, ramp.clamp_(0, 1)) for ramp in ramps]
    return torch.stack(planes, dim=-1).permute(0, 3, 1, 2)  # channels-last, as batches are


def empty_images(requests: Sequence[Request]) -> torch.Tensor:
    """Return uninitialised memory for the images of a batch, uint8 (B, H, W, 3).

    In a worker it is shared with the training process. Raises ``DataError`` if there is none left.
    """
    height, width = requests[0].height, requests[0].width
    shape = (len(requests), height, width, 3)
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As in torch's own collate function: sending a tensor that is not shared would copy it.
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(math.prod(shape))
    except RuntimeError as error:
        fix = "make /dev/shm larger (in a container: --shm-size=8g), or lower data.workers; 0 does without"
        raise DataError(f"no shared memory for a batch of {math.prod(shape) / 1e6:.0f} MB ({error})", fix) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class Requests(list[Request]):
    """A batch's requests, and those that the same worker gets next: it fetches their images."""

    ahead: Sequence[Request] = ()


class _WithNext:
    """Batches that know the batch ``distance`` later."""

    def __init__(self, batches: Iterable[list[Request]], distance: int) -> None:
        self.batches, self.distance = batches, distance

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Requests]:
        waiting = deque[Requests]()
        for batch in self.batches:
            waiting.append(Requests(batch))
            if len(waiting) > self.distance:
                waiting[0].ahead = list(waiting[-1])
                yield waiting.popleft()
        yield from waiting


class BatchLoader(torch.utils.data.DataLoader[Batch]):
    """A torch loader that copies batches to a GPU ahead, and raises DataError if workers hang."""

    copies: torch.cuda.Stream | None  # on a GPU; one for all epochs: torch keeps freed memory for each
    patience: float  # seconds without a batch; each ``timeout`` torch looks for dead workers

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._loaded() if self.copies is None else copied_ahead(self._loaded(), self.copies)

    def _started(self) -> Iterator[Any]:
        """Torch's iterator. Its workers inherit a mask: libraries start threads in them at once."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_PARENT)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _loaded(self) -> Iterator[Batch]:
        """The batches on the host."""
        batches = None
        waited = 0.0
        while True:
            try:
                batches = self._started() if batches is None else batches
                batch = next(batches, None)
            except RuntimeError as error:
                if killed := of_killed_loader(error):
                    raise killed from error
                if not (self.timeout and "timed out" in str(error)):
                    raise
                waited += self.timeout
                workers = getattr(self._iterator, "_workers", ())  # of this loader alone
                if batches is not None and waited < self.patience and not any(map(_is_stopped, workers)):
                    continue
                # A hung worker may ignore SIGTERM, and the program could not exit.
                handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises errors
                for worker in workers:
                    worker.kill()
                    worker.join()
                signal.signal(signal.SIGCHLD, handler)
                raise DataError(
                    f"{counted(self.num_workers, 'worker process')} gave no batch for {waited:g} s",
                    "look for a stopped process, a disk that does not respond, "
                    "raise data.workers, or allow a longer time-out",
                ) from error
            if batch is None:
                return
            waited = 0.0
            passed_on = [batch]
            del batch  # or the next call would spend milliseconds on freeing it
            yield passed_on.pop()


def _is_stopped(worker: Any) -> bool:
    """Whether a signal has stopped a process; False where the system is not Linux."""
    with suppress(OSError):
        return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


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

    If ``device`` is a GPU, batches come on it, else on the host. Iterating raises DataError if no
    batch comes for PATIENCE times ``timeout_seconds`` (0: no limit), or for LOOKING_SECONDS while a
    worker is stopped. The largest batch has ``batch_bytes``: up to PINNED_BYTES wait for a GPU, but
    at least one batch for each worker.
    """
    is_remote = getattr(getattr(dataset, "images", None), "is_remote", False)
    # The client of a bucket gives no answer in a fork of a process that used it.
    context = torch.multiprocessing.get_context("forkserver" if is_remote else START_METHOD)
    if is_remote:
        context.set_forkserver_preload(["torch", f"{__package__}.dataset"])  # else each worker imports them
    pinned = device.type == "cuda"
    fitting = int(PINNED_BYTES / max(1, workers * batch_bytes)) if pinned else PREFETCHED_BATCHES
    loader = BatchLoader(
        dataset,
        batch_sampler=_WithNext(batch_sampler, max(1, workers)) if is_remote else batch_sampler,
        num_workers=workers,
        collate_fn=torch.utils.data.default_convert,  # changes nothing: __getitems__ returns whole batches
        pin_memory=pinned,
        worker_init_fn=_start_worker,
        multiprocessing_context=context if workers else None,
        generator=torch.Generator(),  # of the workers' seeds; the global one stays untouched
        persistent_workers=workers > 0,
        prefetch_factor=min(max(1, fitting), PREFETCHED_BATCHES) if workers else None,
        timeout=min(PATIENCE * timeout_seconds, LOOKING_SECONDS) if workers else 0,
    )
    loader.patience = PATIENCE * timeout_seconds
    loader.copies = torch.cuda.Stream(device) if pinned else None
    return loader


def copied_ahead(batches: Iterable[Batch], copies: torch.cuda.Stream) -> Iterator[Batch]:
    """Yield the ``batches`` on a GPU, copied on the stream ``copies``.

    A batch comes once the next copy is queued. The current stream waits for its copy, not the host.
    """

    def arrived() -> Batch:
        batch, copied = ahead.pop(0)
        stream = torch.cuda.current_stream(copies.device)
        stream.wait_event(copied)
        batch.record_stream(stream)  # its memory belongs to the stream of the copies
        return batch

    ahead = []
    for batch in batches:
        with torch.cuda.stream(copies):
            ahead.append((batch.to(copies.device, non_blocking=True), copies.record_event()))
        if len(ahead) > 1:
            yield arrived()
    if ahead:
        yield arrived()


def _start_worker(worker: int) -> None:
    """Use one core, and leave signals to the training process: it needs us until the step ends."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM must not be ignored: the training process ends leftover workers with it.
    if OF_PARENT:
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_PARENT)
        threading.Thread(target=_obey_parent, daemon=True).start()
    end_with_parent()  # torch looks for the forkserver, which would wait for us; its thread inherits the mask
    cv2.setNumThreads(0)


def _obey_parent() -> None:
    """End this worker on SIGTERM from its parent; ignore SIGTERM from all others."""
    parent: Any = multiprocessing.parent_process()
    while sys.platform != "darwin" and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
