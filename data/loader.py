"""The torch loader around a data set and its batch sampler."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import torch
from torch.utils.data import DataLoader

from data.batch import Batch
from data.dataset import EvalDataset, TrainDataset
from data.errors import DataError
from data.plan import Request
from data.samplers import TrainBatchSampler

# Forked workers share the pages of the index, start in milliseconds and never touch CUDA. The
# system libraries of macOS do not survive a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
HOST = torch.device("cpu")
PREFETCHED_BATCHES = 4  # per worker
PATIENCE = 0.4  # share of the time-out: the cause is reported before other ranks stop waiting
AT_HAND = 2  # batches that the training process holds: one in use, one on its way to the device


class BatchLoader(DataLoader[Batch]):
    """A torch loader that raises DataError if its workers hang.

    On a GPU its batches arrive there while the ones before them are in use.
    """

    copies: torch.cuda.Stream | None  # on a GPU; one for all epochs, as torch keeps freed memory for each stream

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._loaded() if self.copies is None else copied_ahead(self._loaded(), self.copies)

    def _loaded(self) -> Iterator[Batch]:
        """The batches on the host."""
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError as error:
                if not (self.timeout and "timed out" in str(error)):
                    raise
                _kill(batches)
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
    dataset: TrainDataset | EvalDataset,
    batch_sampler: TrainBatchSampler | Sequence[list[Request]],
    workers: int,
    device: torch.device = HOST,
    timeout_seconds: float = 0.0,
) -> BatchLoader:
    """Make a loader of ``Batch``; its ``workers`` processes (0: none) live as long as it does.

    Batches for a GPU, ``device``, are there already; others are on the host. Raises DataError if
    the processes give no batch for PATIENCE times ``timeout_seconds`` (0: no limit).
    """
    loader = BatchLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=_identity,  # __getitems__ returns whole batches
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker,
        multiprocessing_context=START_METHOD if workers else None,
        generator=torch.Generator(),  # for the workers' seed, so that the global one is not used
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCHED_BATCHES if workers else None,
        timeout=PATIENCE * timeout_seconds if workers else 0,
    )
    loader.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    return loader


def copied_ahead(batches: Iterable[Batch], copies: torch.cuda.Stream) -> Iterator[Batch]:
    """Yield the ``batches`` on a GPU, copied on the stream ``copies``.

    A batch is handed over once the next one is on its way, so that its copy runs beside the
    computation. A batch that nobody asked for any more is dropped.
    """
    ahead: list[tuple[Batch, torch.cuda.Event]] = []
    for batch in batches:
        ahead.append(_copied(batch, copies))
        if len(ahead) > 1:
            yield _arrived(*ahead.pop(0))
    for last in ahead:
        yield _arrived(*last)


def _copied(batch: Batch, copies: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """Queue the copy of a batch on a stream; return it with the event of its end."""
    with torch.cuda.stream(copies):
        return batch.to(copies.device, non_blocking=True), copies.record_event()


def _arrived(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """The batch, for use on the current stream, which waits for the copy; the host does not."""
    stream = torch.cuda.current_stream(batch.images.device)
    stream.wait_event(copied)
    batch.record_stream(stream)  # its memory belongs to the stream of the copies
    return batch


def _kill(batches: Any) -> None:
    """Kill an iterator's workers.

    A hung worker may not react to SIGTERM, and the exit of the program would wait for it.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each
    try:
        for worker in batches._workers:
            worker.kill()
            worker.join()
    finally:
        signal.signal(signal.SIGCHLD, before)


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Leave signals to the training process, and give each worker one core.

    Ctrl-C and SLURM's signals reach every process of a job. The training process handles them and
    needs its workers until the end of the step. Workers exit with it.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # SIGTERM cannot be ignored: the training process ends leftover workers with it at exit.
    if hasattr(signal, "sigwaitinfo"):  # elsewhere the sender is unknown, and SIGTERM ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, args=(os.getppid(),), daemon=True).start()
    cv2.setNumThreads(0)


def _obey_parent(parent: int) -> None:
    """End this worker on SIGTERM from its parent; ignore SIGTERM from all others."""
    while hasattr(signal, "sigwaitinfo") and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def shared_memory_note(loader: DataLoader[Batch], pixels: int, processes: int, folder: Path) -> str | None:
    """A warning if the workers of ``loader`` could fill the memory file system ``folder``.

    The images of a batch have up to ``pixels`` pixels together; ``processes`` of this node have
    such a loader. None if there is room. Call it when a cache in memory has been made.
    """
    if loader.num_workers == 0 or not folder.is_dir():
        return None
    assert loader.prefetch_factor is not None
    batch = processes * pixels * 3
    needed = (loader.num_workers * loader.prefetch_factor + AT_HAND) * batch
    disk = shutil.disk_usage(folder)
    if needed <= disk.free:
        return None
    fitting = max(0, (disk.free - AT_HAND * batch) // (loader.prefetch_factor * batch))
    return (
        f"loader workers may hold {needed / 1e6:,.0f} MB in {folder}, where {disk.free / 1e6:,.0f} MB are free; a "
        f"batch without room ends the training. fix: make it larger (in a container: --shm-size="
        f"{math.ceil((disk.used + needed) / 2**30)}g), or data.workers={fitting}"
    )
