"""Reading many files: each in few steps, and many at once where reading is waiting, over a network above all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 256  # items handled at a time: handing over each by itself would cost more than most files do
MAX_THREADS = 32


def usable_cores() -> int:
    """The cores that this process may use: on Linux those that a scheduler left to it, elsewhere all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_file(path: str | os.PathLike[str], limit: int = sys.maxsize) -> bytes:
    """The content of a file, at most ``limit`` bytes. Raises ``OSError``.

    With as few calls of the system as there can be: Python's own file objects make twice as many, which costs as much
    as the header of an image does.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is empty instead of waited for
    try:
        size = min(os.fstat(descriptor).st_size, limit)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
    finally:
        os.close(descriptor)
    return data


def in_chunks(function: Callable[[Sequence[T]], R], items: Sequence[T], what: str) -> Iterator[R]:
    """What ``function`` makes of the items, ``CHUNK`` of them at a time, in order, with a progress bar.

    Threads take over with the first chunk that was mostly waiting. Before, they would only fight for the interpreter's
    lock: of files in memory they make half as many a second.
    """
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    with tqdm(desc=what, total=len(items), unit="files", disable=None, leave=False) as bar:
        waiting, done = False, 0
        while done < len(chunks) and not waiting:
            wall, busy = time.perf_counter(), time.thread_time()
            result = function(chunks[done])
            waiting = time.perf_counter() - wall > 3 * (time.thread_time() - busy) + 0.005
            bar.update(len(chunks[done]))
            done += 1
            yield result
        with ThreadPoolExecutor(min(MAX_THREADS, 4 * usable_cores())) as pool:
            futures = [pool.submit(function, chunk) for chunk in chunks[done:]]
            try:
                for chunk, future in zip(chunks[done:], futures, strict=True):
                    yield future.result()
                    bar.update(len(chunk))
            finally:  # after an error the rest need not be read
                for future in futures:
                    future.cancel()
