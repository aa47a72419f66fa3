"""The torch loader around a data set and its batch sampler."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cv2
import torch
from torch.utils.data import DataLoader

from data.batches.samplers import EvalBatchSampler, TrainBatchSampler
from data.errors import DataError
from data.samples.batch import Batch
from data.samples.dataset import EvalDataset, TrainDataset

# Forked workers share the pages of the index and start in milliseconds; they never touch CUDA. The system libraries of
# macOS do not outlive a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
PREFETCHED_BATCHES = 4  # per worker
PATIENCE = 0.4  # part of the time-out: sooner than other ranks give up in an exchange, so that the cause is told


class BatchLoader(DataLoader[Batch]):
    """A torch loader that raises DataError where its workers hang."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
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
                    "disk that does not answer, or too few data.workers; where that is no fault, a longer time-out"
                ) from error
            if batch is None:
                return
            passed_on = [batch]
            del batch  # kept here it would be freed, which takes milliseconds, while the next one is waited for
            yield passed_on.pop()


def make_loader(
    dataset: TrainDataset | EvalDataset,
    batch_sampler: TrainBatchSampler | EvalBatchSampler,
    workers: int,
    pin_memory: bool,
    timeout_seconds: float = 0.0,
) -> BatchLoader:
    """A loader that yields ``Batch``; ``workers`` processes (0: none) live as long as it does.

    Where they give no batch for PATIENCE of ``timeout_seconds`` (0: as long as it takes), a DataError ends it.
    """
    return BatchLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=_identity,  # __getitems__ gives whole batches
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        multiprocessing_context=START_METHOD if workers else None,
        generator=torch.Generator(),  # for seeds of workers that nobody uses: the global one stays as it is
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCHED_BATCHES if workers else None,
        timeout=PATIENCE * timeout_seconds if workers else 0,
    )


def _kill(batches: Any) -> None:
    """End the workers of a loader's iterator: one that hangs may not hear SIGTERM, and the exit would wait for it."""
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
    """Leaves signals to the training process, and one core to each worker.

    Ctrl-C and SLURM's signals reach every process of a job. The training process answers them, and still needs its
    workers for the rest of the step; they end with it.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # SIGTERM cannot be ignored: it is also how the training process, at its own exit, ends a worker that is left over.
    if hasattr(signal, "sigwaitinfo"):  # elsewhere nobody tells who sent it, and it ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, args=(os.getppid(),), daemon=True).start()
    cv2.setNumThreads(0)


def _obey_parent(parent: int) -> None:
    """Ends this worker when its parent sends SIGTERM, and swallows those of all others."""
    while hasattr(signal, "sigwaitinfo") and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
