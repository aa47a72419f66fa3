"""Find and read many files, with threads if the disk is slow; write or fetch whole files."""

import hashlib
import io
import multiprocessing
import os
import shlex
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.progress import Progress, is_live
from data.remote import MAX_FETCHED, Place, is_remote

T = TypeVar("T")
R = TypeVar("R")

FILES_PER_TASK = 256  # one by one, handing them to a thread would cost more than reading most files
FETCHES_PER_TASK = 4  # each takes longer than handing it over
MAX_THREADS = 32
THREADS_PER_CORE = 4  # they mostly wait
WAITING_RATIO = 3.0  # a task waited if it took this multiple of its CPU time,
MIN_WAIT = 0.005  # plus these seconds, for the clocks' resolution and the scheduler
RETRIES = 3  # of a download
TIMEOUT_SECONDS = 60.0  # of a download, without a byte
MEGABYTE = 1_000_000  # bytes


def usable_cores() -> set[int]:
    """The cores that this process may use: its CPU affinity on Linux, elsewhere all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def end_with_parent() -> None:
    """Let this worker process end as soon as the one that started it has, however that ended."""

    def watch() -> None:
        parent.join()
        os._exit(0)

    parent: Any = multiprocessing.parent_process()  # with the forkserver not the process above this one
    threading.Thread(target=watch, daemon=True).start()


def files_below(folder: Path, suffixes: Collection[str]) -> list[str]:
    """Sorted files with these suffixes below a folder, without hidden ones. Raises ``OSError``."""

    def stop(error: OSError) -> None:
        raise error

    files, visited, tops = list[str](), set[str](), [os.fspath(folder)]
    for top in tops:  # links follow, so that a folder keeps its own name; they may lead round in circles
        for parent, folders, names in os.walk(top, onerror=stop):
            target = os.path.realpath(parent)
            folders[:] = [] if target in visited else [name for name in folders if name[0] != "."]
            tops += [path for path in (f"{parent}/{name}" for name in folders) if os.path.islink(path)]
            if target not in visited:
                files += [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in suffixes]
            visited.add(target)
    return sorted(file for file in files if not os.path.basename(file).startswith("."))


def chunk_size(root: Place) -> int:
    """How many files below ``root`` a thread should read at a time."""
    return FETCHES_PER_TASK if is_remote(root) else FILES_PER_TASK


def in_chunks(
    function: Callable[[Sequence[T]], R], items: Sequence[T], title: str, size: int = FILES_PER_TASK
) -> Iterator[R]:
    """Yield ``function`` of each chunk of the items, in order, with a live line on a terminal.

    Threads take over after the first chunk that mostly waited. With files in memory they would
    only compete for the interpreter's lock and halve the speed.
    """
    chunks = iter([items[start : start + size] for start in range(0, len(items), size)])
    threads = MAX_THREADS if size < FILES_PER_TASK else min(MAX_THREADS, THREADS_PER_CORE * len(usable_cores()))
    with Progress(len(items), title, enabled=is_live(), unit="file") as progress, ThreadPoolExecutor(threads) as pool:
        for chunk in chunks:
            wall, busy = time.perf_counter(), time.thread_time()
            result = function(chunk)
            waited = time.perf_counter() - wall > WAITING_RATIO * (time.thread_time() - busy) + MIN_WAIT
            yield result
            progress.advance(len(chunk))
            if waited:
                break
        rest = list(chunks)
        for chunk, result in zip(rest, pool.map(function, rest), strict=True):  # after an error, map cancels the rest
            yield result
            progress.advance(len(chunk))


class Stamps(NamedTuple):
    """The status of files. An edit can keep size and mtime, but not ctime."""

    digest: str  # of names, sizes and times
    is_file: NDArray[np.bool_]  # (N,) whether each is a regular file


def stamp_files(paths: Sequence[str]) -> Stamps:
    """Stat many files."""
    digest, are_files = hashlib.sha256(), []
    for of_chunk, in_chunk in in_chunks(_stamp_chunk, paths, "looking for files"):
        digest.update(of_chunk)
        are_files += in_chunk
    return Stamps(digest.hexdigest(), np.array(are_files, dtype=bool))


def _stamp_chunk(paths: Sequence[str]) -> tuple[bytes, list[bool]]:
    rows = []
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: an impossible name
            rows.append((0, 0, 0, 0))
        else:
            rows.append((status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    digest = hashlib.sha256("\n".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(np.array(rows, dtype=np.int64).data)
    return digest.digest(), [stat.S_ISREG(mode) for mode, *_ in rows]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``folder`` at the end, unless another process made it.

    Its files, but not those in its folders, are synced to disk. An error leaves nothing behind.
    Raises ``OSError``.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        else:
            _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # no longer there after the rename


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _DownloadProgress:
    """What pooch expects of a progress bar; ``report`` gets the bytes done and in total."""

    total = done = 0

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report = report

    def update(self, count: int) -> None:
        self.done += count
        self.report(self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def fetch(address: str, shown: str) -> bytes:
    """Read an http(s) address, which messages call ``shown``. Raises ``DataError``."""
    import pooch

    def check(done: int, _: int) -> None:
        if done > MAX_FETCHED:
            raise DataError(f"{shown} has more than {MAX_FETCHED:,} bytes. fix: the address of a picture")

    content = io.BytesIO()
    try:
        pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=_DownloadProgress(check))(address, content, None)
    except OSError as error:
        # Without the error itself, which may show the password.
        raise DataError(f"{shown} cannot be fetched ({_reason(error)}). fix: check address and network") from None
    return content.getvalue()


def _reason(error: OSError) -> str:
    answer = getattr(error, "response", None)  # None: the server gave none
    return type(error).__name__ if answer is None else f"HTTP status {answer.status_code}"


def download(url: str, path: Path, known_hash: str | None = None, size: int | None = None) -> None:
    """Fetch ``url`` into ``path`` unless the right file is there; it appears whole or not at all.

    ``known_hash`` is written as ``md5:<digits>`` or ``sha1:<digits>``, ``size`` is in bytes. Raises
    ``DataError`` if the file cannot be fetched or is not the expected one.
    """
    import pooch  # imports requests, which is slow

    pooch.get_logger().setLevel("WARNING")
    if path.is_file() and size not in (None, path.stat().st_size):
        path.unlink()
    files = pooch.create(
        path.parent, base_url="", registry={path.name: known_hash}, urls={path.name: url}, retry_if_failed=RETRIES
    )

    def report(done: int, total: int) -> None:
        progress.total = total // MEGABYTE
        progress.at(done // MEGABYTE)

    try:
        with Progress(0, path.name, enabled=is_live(), unit="MB") as progress:
            fetch = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=_DownloadProgress(report))
            files.fetch(path.name, downloader=fetch)
        if size not in (None, path.stat().st_size):
            path.unlink()
            raise ValueError(f"expected {size:,} bytes")
    except OSError as error:
        if error.errno is not None:  # of the folder, not of the network
            raise DataError(f"{url} cannot be written to {path} ({error.strerror}). fix: free space there") from error
        fix = shlex.join(["curl", "--create-dirs", "-fLo", str(path), url])
        raise DataError(f"{url} cannot be fetched ({_reason(error)}); by hand, with a network, fix: {fix}") from error
    except ValueError as error:
        raise DataError(f"{url} is damaged, or another file. fix: run the command again") from error
