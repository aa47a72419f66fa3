"""Find and read many files, with threads where the disk is slow; write or fetch them whole."""

import hashlib
import io
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data.errors import DataError
from data.progress import Progress, is_live

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 256  # items handled at once: handing them over one by one costs more than most files
MAX_THREADS = 32
THREADS_PER_CORE = 4  # they mostly wait
WAITING_RATIO = 3.0  # a chunk waited if its time is this multiple of its computing time,
LEAST_WAIT = 0.005  # plus these seconds, which the clocks' resolution and the scheduler may add
RETRIES = 3  # of a download
TIMEOUT_SECONDS = 60.0  # of a download, without a byte
MEGABYTE = 1_000_000  # bytes
MAX_FETCHED = 256 * 2**20  # bytes of a picture: an address may never end


def usable_cores() -> set[int]:
    """Numbers of the cores this process may use: on Linux its CPU affinity, elsewhere all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


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


def in_chunks(function: Callable[[Sequence[T]], R], items: Sequence[T], title: str) -> Iterator[R]:
    """Yield ``function`` of each ``CHUNK`` of items, in order, with a live line on a terminal.

    Threads take over after the first chunk that mostly waited. With files in memory they would
    only compete for the interpreter's lock and halve the speed.
    """
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    with Progress(len(items), title, enabled=is_live(), unit="file") as progress:
        waiting, done = False, 0
        while done < len(chunks) and not waiting:
            wall, busy = time.perf_counter(), time.thread_time()
            result = function(chunks[done])
            waiting = time.perf_counter() - wall > WAITING_RATIO * (time.thread_time() - busy) + LEAST_WAIT
            progress.advance(len(chunks[done]))
            done += 1
            yield result
        with ThreadPoolExecutor(min(MAX_THREADS, THREADS_PER_CORE * len(usable_cores()))) as pool:
            futures = [pool.submit(function, chunk) for chunk in chunks[done:]]
            try:
                for chunk, future in zip(chunks[done:], futures, strict=True):
                    yield future.result()
                    progress.advance(len(chunk))
            finally:  # after an error the rest is not needed
                for future in futures:
                    future.cancel()


class Stamps(NamedTuple):
    """File status without content. An edit can keep size and mtime, but not ctime."""

    digest: str  # of names, sizes and times
    is_file: np.typing.NDArray[np.bool_]  # (N,) whether each is a regular file


def stamp_files(paths: Sequence[str]) -> Stamps:
    """Stat many files."""
    digest, are_files = hashlib.sha256(), []
    for of_chunk, in_chunk in in_chunks(_stamp_chunk, paths, "looking for files"):
        digest.update(of_chunk)
        are_files += in_chunk
    return Stamps(digest.hexdigest(), np.array(are_files, dtype=bool))


def _stamp_chunk(paths: Sequence[str]) -> tuple[bytes, list[bool]]:
    rows, are_files = [], []
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: an impossible name
            rows.append((0, 0, 0, 0))
            are_files.append(False)
        else:
            rows.append((status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            are_files.append(stat.S_ISREG(status.st_mode))
    digest = hashlib.sha256("\n".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(np.array(rows, dtype=np.int64).data)
    return digest.digest(), are_files


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``folder`` at the end, unless another process made it.

    The files in it, but not in its folders, are then on the disk. After an error nothing is left.
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
    """The content of an address of http or https, which messages call ``shown``.

    Raises ``DataError``.
    """
    import pooch

    def check(done: int, _: int) -> None:
        if done > MAX_FETCHED:
            raise DataError(f"{shown} has more than {MAX_FETCHED:,} bytes. fix: the address of a picture")

    content = io.BytesIO()
    try:
        pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=_DownloadProgress(check))(address, content, None)
    except OSError as error:
        answer = getattr(error, "response", None)  # None: the server gave none
        why = type(error).__name__ if answer is None else f"HTTP status {answer.status_code}"
        # Without the error itself, which holds the password.
        raise DataError(f"{shown} cannot be fetched ({why}). fix: check the address and the network") from None
    return content.getvalue()


def download(url: str, path: Path, known_hash: str | None = None, size: int | None = None) -> None:
    """Fetch ``url`` into ``path`` unless the right file is there; it appears whole or not at all.

    ``known_hash`` is written as ``md5:<digits>`` or ``sha1:<digits>``, ``size`` is in bytes. Raises
    ``DataError`` if the file cannot be fetched or is another one.
    """
    import pooch  # and with it requests: slow

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
            raise ValueError(f"it has not {size:,} bytes")
    except OSError as error:
        fix = "fix: check address, network and folder, or fetch the file by other means"
        raise DataError(f"{url} cannot be fetched into {path} ({error}). {fix}") from error
    except ValueError as error:
        raise DataError(f"{url} is damaged, or another file. fix: run the command again") from error
