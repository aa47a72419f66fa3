"""What readers share: many files at once, and what they return; files written or fetched whole."""

import glob
import hashlib
import io
import multiprocessing
import os
import re
import shlex
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError, printable
from data.progress import Progress, is_live
from data.remote import MAX_FETCHED, Place, is_remote

T = TypeVar("T")
R = TypeVar("R")
Entries = Sequence[Any] | NDArray[Any]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Flags = NDArray[np.bool_]

FILES_PER_TASK = 256  # one by one, handing them to a thread would cost more than reading most files
FETCHES_PER_TASK = 4  # each takes longer than handing it over
MAX_THREADS = 32
THREADS_PER_CORE = 4  # they mostly wait
WAITING_RATIO = 3.0  # a task waited if it took this multiple of its CPU time,
MIN_WAIT = 0.005  # plus these seconds, for the clocks' resolution and the scheduler
RETRIES = 3  # of a download
TIMEOUT_SECONDS = 60.0  # of a download, without a byte
MEGABYTE = 1_000_000  # bytes
REPORTED_FINDINGS = 20
OF_SYSTEM = "thumbnails, waste and conflict copies of a NAS, a system or a cloud, which are left out"
COPIES = frozenset("original originals thumb thumbs thumbnail thumbnails".split())  # of pictures beside
SYSTEM_NAMES = re.compile(
    r"(@(eadir|recycle|recently-snapshot|__thumb|tmp|sharesnap)|[#~](recycle|snapshot)|\$recycle\.bin"
    r"|lost\+found|__macosx|system volume information|network trash folder|temporary items)$"
    r"|.*(conflicted copy|[_-]conflict-\d{8})",
    re.IGNORECASE,
)
ROTATED = "boxes with an attribute rotation, which are read as if it were 0"


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


def files_below(folder: Path, suffixes: Collection[str], left_out: list[str] | None = None) -> list[str]:
    """Sorted files with these suffixes below a folder, without hidden ones. Raises ``OSError``.

    ``left_out`` gets what has one of SYSTEM_NAMES, and folders of COPIES beside their originals.
    """

    def stop(error: OSError) -> None:
        raise error

    def is_kept(parent: str, name: str, beside: Collection[str] = ()) -> bool:
        is_copy = name.lower() in COPIES and {*beside} & {*os.listdir(f"{parent}/{name}")}
        is_waste = is_copy or SYSTEM_NAMES.match(name)
        if is_waste and left_out is not None:
            left_out.append(f"{parent}/{name}")
        return not is_waste and name[0] != "."

    files, visited = [], set()
    tops = [os.fspath(folder)]
    for top in tops:  # links follow, so that a folder keeps its own name; they may lead round in circles
        for parent, folders, names in os.walk(top, onerror=stop):
            target = os.path.realpath(parent)
            wanted = [name for name in names if name[name.rfind(".") :].lower() in suffixes]
            folders[:] = [name for name in folders if target not in visited and is_kept(parent, name, wanted)]
            tops += [path for path in (f"{parent}/{name}" for name in folders) if os.path.islink(path)]
            if target not in visited:
                files += [f"{parent}/{name}" for name in wanted if is_kept(parent, name)]
            visited.add(target)
    return sorted(files)


def expand(pattern: str) -> tuple[Path, list[str]]:
    """The last folder of a pattern that is there, and what matches the rest below it, sorted.

    That folder is meant as written, brackets and all.
    """
    whole = Path(os.path.abspath(pattern))
    top = next(filter(Path.is_dir, whole.parents))
    return top, sorted(glob.glob(str(whole.relative_to(top)), root_dir=top, recursive=True))


def in_chunks(function: Callable[[Sequence[T]], R], items: Sequence[T], title: str, root: Place = "") -> Iterator[R]:
    """Yield ``function`` of each chunk of the items, files below ``root``, in order.

    Threads take over after the first chunk that mostly waited. With files in memory they would
    only compete for the interpreter's lock and halve the speed.
    """
    size, threads = FILES_PER_TASK, min(MAX_THREADS, THREADS_PER_CORE * len(usable_cores()))
    if is_remote(root):
        size, threads = FETCHES_PER_TASK, MAX_THREADS
    starts = iter(range(0, len(items), size))
    progress = Progress(len(items), title, enabled=is_live(), unit="file")
    with progress, ThreadPoolExecutor(threads) as pool:
        for start in starts:
            chunk = items[start : start + size]
            wall, busy = time.perf_counter(), time.thread_time()
            result = function(chunk)
            waited = time.perf_counter() - wall > WAITING_RATIO * (time.thread_time() - busy) + MIN_WAIT
            yield result
            progress.advance(len(chunk))
            if waited:
                rest = [items[at : at + size] for at in starts]
                for chunk, result in zip(rest, pool.map(function, rest), strict=True):  # an error cancels
                    yield result
                    progress.advance(len(chunk))


class Stamps(NamedTuple):
    """The status of files. An edit can keep size and mtime, but not ctime."""

    digest: str  # of names, sizes and times
    is_file: Flags  # (N,) whether each is a regular file


def stamp_files(paths: Sequence[str]) -> Stamps:
    """Stat many files."""
    digest, are_files = hashlib.sha256(), []
    for of_chunk, in_chunk in in_chunks(_stamp_chunk, paths, "looking for files"):
        digest.update(of_chunk)
        are_files += in_chunk
    return Stamps(digest.hexdigest(), np.array(are_files, bool))


def _stamp_chunk(paths: Sequence[str]) -> tuple[bytes, list[bool]]:
    rows, are_files = np.zeros((len(paths), 4), np.int64), []
    for row, path in enumerate(paths):
        try:
            status = os.stat(path)
            rows[row] = status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            are_files.append(stat.S_ISREG(status.st_mode))
        except (OSError, ValueError):  # ValueError: an impossible name
            are_files.append(False)
    digest = hashlib.sha256("\n".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(rows.data)
    return digest.digest(), are_files


@dataclass
class Findings:
    """Bad or changed entries of a data set, counted by kind, with a sentence on the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, entries: Entries, count: int | None = None, describe: Callable[[Any], str] = str) -> None:
        """Record ``count`` findings of a ``kind``, or one per entry; the first are described."""
        if len(entries):
            self.counts[kind] = self.counts.get(kind, 0) + (len(entries) if count is None else count)
            first = self.examples.setdefault(kind, [])
            first.extend(printable(describe(entry)) for entry in entries[: REPORTED_FINDINGS - len(first)])

    def summary(self) -> str:
        """The counts, such as ``boxes without area (2), missing image files (1)``."""
        return ", ".join(f"{kind} ({count})" for kind, count in self.counts.items())

    def first(self) -> list[str]:
        """The first sentences of all kinds."""
        return [sentence for examples in self.examples.values() for sentence in examples][:REPORTED_FINDINGS]

    def stop(self) -> None:
        """Raise ``DataError`` with the first finding and the number of all, if there are any."""
        if self.counts:
            total = sum(self.counts.values())
            more = "" if total == 1 else f" ({total} bad entries in all: {self.summary()})"
            fix = "correct the source, or set data.on_error=skip to leave such entries out"
            raise DataError(f"{self.first()[0]}{more}", fix)


@dataclass
class Source:
    """N images and M boxes in the order of their files. Boxes refer to images by id."""

    path: Path  # the annotation file, list or folder, for messages
    image_root: Place
    file_names: list[str]  # relative to image_root, absolute outside of it
    image_ids: Int64  # (N,)
    sizes: Int64  # (N, 2) height, width
    box_image_ids: Int64  # (M,)
    boxes_xywh: Float64  # (M, 4) left, top, width, height in pixels
    box_category_ids: Int64  # (M,)
    areas: Float64  # (M,)
    crowd: Flags  # (M,)
    categories: dict[int, str]  # the classes in order: category id to name
    box_name: Callable[[int], str]  # the box at a position in messages, such as "annotation 17"
    findings: Findings  # entries the reader could not use
    notes: Findings = field(default_factory=Findings)  # entries that were used but changed
    num_bytes: int = 0  # of all images at an address or in tar files
    missing_files: list[str] = field(default_factory=list)  # images that are not there now, and may be later


class LocatedSplit(NamedTuple):
    """The files of a split, not read yet. If one changes, a new index is built."""

    stamps: list[str]  # digests of names, sizes and times
    image_root: Place
    read: Callable[[], Source]


def relative_name(path: str, root: Place) -> str:
    """An absolute path relative to ``root``; unchanged if it lies elsewhere."""
    return path.removeprefix(f"{str(root).rstrip('/')}/")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, synced to disk, that becomes ``folder`` unless that is there.

    An error leaves nothing behind. Raises ``OSError``.
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
            raise DataError(f"{shown} has more than {MAX_FETCHED:,} bytes", "the address of a picture")

    content = io.BytesIO()
    try:
        progress = _DownloadProgress(check)
        pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=progress)(address, content, None)
    except OSError as error:
        # Without the error itself, which may show the password.
        raise DataError(f"{shown} cannot be fetched ({_reason(error)})", "check address and network") from None
    return content.getvalue()


def _reason(error: OSError) -> str:
    answer = getattr(error, "response", None)  # None: the server gave none
    return type(error).__name__ if answer is None else f"HTTP status {answer.status_code}"


def download(url: str, path: Path, known_hash: str | None = None, size: int | None = None) -> None:
    """Fetch ``url`` into ``path`` unless the right file is there, whole or not at all.

    ``known_hash`` is ``md5:<digits>`` or ``sha1:<digits>``, ``size`` in bytes. Raises DataError.
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
            raise DataError(
                f"{url} cannot be written to {path} ({error.strerror})", "free space, or another folder"
            ) from error
        fix = shlex.join(["curl", "--create-dirs", "-fLo", str(path), url])
        raise DataError(f"{url} cannot be fetched ({_reason(error)})", fix) from error
    except ValueError as error:
        raise DataError(f"{url} is damaged, or another file", "run the command again") from error
