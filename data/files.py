"""Read many files: few system calls for each, threads where the disk is slow, and progress bars."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 256  # items handled at once: handing them over one by one costs more than most files
MAX_THREADS = 32
THREADS_PER_CORE = 4  # they mostly wait
WAITING_RATIO = 3.0  # a chunk waited if its time is this multiple of its computing time,
LEAST_WAIT = 0.005  # plus these seconds, which the clocks' resolution and the scheduler may add


@contextmanager
def bar(what: str, total: int = 0) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr: call its function with units done and in total, 0 if that is unknown."""
    hidden = not (sys.stdout.isatty() and sys.stderr.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as live:
        task = live.add_task(what, total=total or None)
        yield lambda done, of: live.update(task, completed=done, total=of or None)


def counted(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The ``total`` items, with a bar that counts those already handled."""
    with bar(what, total) as report:
        for done, item in enumerate(items, start=1):
            yield item
            report(done, total)


def usable_cores() -> set[int]:
    """Numbers of the cores this process may use: on Linux its CPU affinity, elsewhere all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def read_file(path: str | os.PathLike[str], limit: int = sys.maxsize) -> bytes:
    """Read at most ``limit`` bytes of a file. Raises ``OSError``.

    Python's file objects make twice as many system calls, which costs as much as parsing a header.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe
    try:
        size = min(os.fstat(descriptor).st_size, limit)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
    finally:
        os.close(descriptor)
    return data


def files_below(folder: Path, suffixes: Collection[str]) -> list[str]:
    """Sorted files below a folder, by suffix; no hidden ones, links count. Raises ``OSError``."""

    def stop(error: OSError) -> None:
        raise error

    files, visited = [], set()
    for parent, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        place = os.path.realpath(parent)
        folders[:] = [] if place in visited else sorted(name for name in folders if name[0] != ".")
        if place not in visited:
            files += [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in suffixes]
        visited.add(place)
    return sorted(file for file in files if not os.path.basename(file).startswith("."))


def in_chunks(function: Callable[[Sequence[T]], R], items: Sequence[T], what: str) -> Iterator[R]:
    """Yield ``function`` of each ``CHUNK`` of items, in order, with a progress bar.

    Threads take over after the first chunk that mostly waited. With files in memory they would
    only compete for the interpreter's lock and halve the speed.
    """
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    with bar(what, len(items)) as report:
        waiting, done = False, 0
        while done < len(chunks) and not waiting:
            wall, busy = time.perf_counter(), time.thread_time()
            result = function(chunks[done])
            waiting = time.perf_counter() - wall > WAITING_RATIO * (time.thread_time() - busy) + LEAST_WAIT
            done += 1
            report(min(done * CHUNK, len(items)), len(items))
            yield result
        with ThreadPoolExecutor(min(MAX_THREADS, THREADS_PER_CORE * len(usable_cores()))) as pool:
            futures = [pool.submit(function, chunk) for chunk in chunks[done:]]
            try:
                for number, future in enumerate(futures, start=done + 1):
                    yield future.result()
                    report(min(number * CHUNK, len(items)), len(items))
            finally:  # after an error the rest is not needed
                for future in futures:
                    future.cancel()
