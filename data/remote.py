"""Pictures in buckets, on web servers and in tar files: their addresses, and how they are read.

An address is ``s3://bucket/folder/a.jpg`` (also ``gs://``, ``az://``, ``https://``). A picture in a
tar, on the disk or at an address, is ``<tar>@<start>+<length>/<name>``: a name in the index is all
that reading it takes.
"""

import errno
import fnmatch
import hashlib
import io
import os
import posixpath
import re
import tarfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.progress import tracked

T = TypeVar("T")
Place = Path | str  # of pictures: a folder, or as text an address or a pattern of tar files

SCHEMES = ("s3", "gs", "az", "https", "http")
LISTED = ("s3", "gs", "az")  # a web server does not tell what it has
TIMEOUT_SECONDS = 30.0  # of one try
PATIENCE_SECONDS = 60.0  # of tries without a whole answer
FETCHES = 32  # side by side in a process
FEW = 1000  # files that are asked for one by one, not found in a list of all
BLOCK = 2**15  # bytes of a tar that are read at once: a header, and what lies behind it
MAX_FETCHED = 256 * 2**20  # bytes of a picture
FIX = "fix: check the address, the network and the credentials; a stopped training goes on with resume="
_ADDRESS = re.compile(r"(\w+://[^/]+)/?(.*)", re.DOTALL)
_MEMBER = re.compile(r"(.+?\.tar)@(\d+)\+(\d+)/", re.DOTALL)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class FetchError(DataError):
    """An answer did not come, which says nothing about the file."""


def is_place(text: str) -> bool:
    """Whether a text is an address, or a pattern of tar files."""
    return "://" in text or text.endswith(".tar")


def is_remote(path: Place) -> bool:
    """Whether what is there has to be fetched."""
    return isinstance(path, str) and "://" in path


def reads(path: str) -> bool:
    """Whether ``read`` reads a path: an address, or a picture in a tar."""
    return "://" in path or (".tar@" in path and _MEMBER.match(path) is not None)


def place(root: Path, name: str) -> Place:
    """The place that a data set calls ``name``; relative paths start at ``root``."""
    if "://" in name:
        return name.rstrip("/")
    return str(root / name) if name.endswith(".tar") else root / name


def folder_of(images: Place) -> Place:
    """The folder of tar files; any other place itself."""
    return images.rpartition("/")[0] if isinstance(images, str) and images.endswith(".tar") else images


def check_address(text: str, key: str) -> None:
    """Raise ``ValueError``, which names ``key``, for an address that cannot be used."""
    base, separator, _ = text.partition("://")
    if separator and (base not in SCHEMES or not _ADDRESS.fullmatch(text)):
        usable = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{key} is of an unknown kind. fix: one of {usable}, a bucket or host, and a folder")
    if separator and ("@" in text.split("/")[2] or "?" in text):
        why = "which logs and checkpoints would show. fix: set the variables of docs/develop/security.md"
        raise ValueError(f"{key} is an address with a password or a token, {why}")
    if separator:
        try:
            import obstore  # noqa: F401
        except ImportError as error:
            raise ValueError(f"{key} is an address, which needs obstore. fix: uv pip install obstore") from error


@cache
def _store(base: str, _: int) -> Any:
    """The client of a bucket in this process; its credentials are in the environment."""
    from obstore import store

    options: Any = {"timeout": timedelta(seconds=TIMEOUT_SECONDS), "allow_http": True}  # where an address says so
    retries: Any = {"max_retries": 100, "retry_timeout": timedelta(seconds=PATIENCE_SECONDS)}
    return store.from_url(base, client_options=options, retry_config=retries)


def _asked(address: str, ask: Callable[[Any, Any, str], T]) -> T:
    """What ``ask`` returns for obstore, the store and the key of an address.

    Raises ``FileNotFoundError``, ``EOFError`` for a range beyond the end, or else ``FetchError``,
    without obstore's text: that has tokens.
    """
    import obstore
    from obstore import exceptions

    base, key = _ADDRESS.fullmatch(address).groups()  # type: ignore[union-attr]  # by check_address
    try:
        return ask(obstore, _store(base, os.getpid()), posixpath.normpath(key) if key else "")
    except (FileNotFoundError, exceptions.NotFoundError):
        raise FileNotFoundError(errno.ENOENT, "there is no such object", address) from None
    except (exceptions.BaseError, PermissionError, TimeoutError) as error:
        status = re.search(r"status code: (\d{3})", str(error))
        if status and status[1] == "416":
            raise EOFError from None
        kinds = ", ".join(dict.fromkeys(re.findall(r"(?:kind|source): (\w+),$", str(error), re.MULTILINE)))
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        why = "access denied" if denied else f"HTTP status {status[1]}" if status else kinds or type(error).__name__
        tried = f"{why}; a try may take {TIMEOUT_SECONDS:g} s, all of them {PATIENCE_SECONDS:g} s"
        raise FetchError(f"{address} cannot be fetched ({tried}). {FIX}") from None


def read(path: str, limit: int | None = None) -> bytes:
    """The content of an address or a picture in a tar, or its first ``limit`` bytes.

    Raises ``OSError`` if it cannot be what is looked for, ``FetchError`` if it does not come.
    """
    member = _MEMBER.match(path)
    whole, start, length = (member[1], int(member[2]), int(member[3])) if member else (path, 0, None)
    size = min((number for number in (limit, length) if number is not None), default=None)
    data = _bytes(whole, start, size)
    if length is not None and len(data) != size:
        raise OSError(errno.EIO, f"its tar ends after {len(data):,} of {size:,} bytes", path)
    return data


def _bytes(path: str, start: int, size: int | None) -> bytes:
    """``size`` bytes from ``start`` on, fewer at the end; None: all."""
    if (size or 0) > MAX_FETCHED:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FETCHED:,} bytes", path)
    if "://" not in path:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), size or 0, start)
    options = {} if size is None else {"range": (start, start + size)}

    def ask(obstore: Any, store: Any, key: str) -> bytes:
        answer = obstore.get(store, key, options=options)
        length = answer.range[1] - answer.range[0]
        if length > MAX_FETCHED:
            raise OSError(errno.EFBIG, f"it has more than {MAX_FETCHED:,} bytes", path)
        data = bytes(answer.bytes())
        if len(data) != length:
            raise FetchError(f"{path} cannot be fetched ({len(data):,} of {length:,} bytes came). {FIX}")
        return data

    try:
        return _asked(path, ask)
    except EOFError:
        return b""


def _head(path: str) -> tuple[int, str] | None:
    """Bytes of a file, and a text that changes with its content; None if it is not there."""
    with suppress(FileNotFoundError):
        if "://" in path:
            return _stamp(_asked(path, lambda obstore, store, key: obstore.head(store, key)))
        status = os.stat(path)
        return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return None


def _stamp(meta: Any) -> tuple[int, str]:
    return meta["size"], f"{meta['e_tag']} {meta['last_modified']}"


def _heads(paths: Sequence[str]) -> list[tuple[int, str] | None]:
    with ThreadPoolExecutor(FETCHES) as pool:
        return list(tracked(pool.map(_head, paths), len(paths), "looking for files", unit="file"))


def _below(folder: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """The addresses below a folder of a bucket."""
    base = _ADDRESS.fullmatch(folder)[1]  # type: ignore[index]
    pages = _asked(folder, lambda obstore, store, key: obstore.list(store, key or None, chunk_size=FEW))
    while page := _asked(folder, lambda *_: list(next(pages, []))):
        yield from ((f"{base}/{meta['path']}", _stamp(meta)) for meta in page)


def sizes_of(paths: Sequence[str]) -> NDArray[np.int64]:
    """Bytes of files (N,) at addresses and in tar files; -1: not there. Raises ``FetchError``."""
    members = map(_MEMBER.match, paths)
    sizes = np.array([int(member[3]) if member else -1 for member in members], dtype=np.int64)
    asked = [row for row in np.flatnonzero(sizes < 0).tolist() if "://" in paths[row]]
    if len(asked) <= FEW or paths[asked[0]].partition("://")[0] not in LISTED:
        for row, head in zip(asked, _heads([paths[row] for row in asked]), strict=True):
            sizes[row] = -1 if head is None else head[0]
        return sizes
    rows = {paths[row]: row for row in asked}
    folder = os.path.commonpath([*map(os.path.dirname, rows)]).replace(":/", "://", 1)
    for address, (size, _) in tracked(_below(folder), 0, f"listing {folder}", unit="file"):
        if address in rows:
            sizes[rows[address]] = size
    return sizes


class Shards:
    """The tar files that a pattern names, such as ``s3://bucket/train-*.tar``.

    With braces, as in ``train-{0000..0099}.tar``, it works without a list of the bucket.
    """

    def __init__(self, pattern: str) -> None:
        """Find the tar files. Raises ``DataError`` if there are none, or one of braces is not."""
        self.pattern = pattern
        self.stamps: dict[str, tuple[int, str] | None] = {}
        if "*" in pattern and "://" in pattern:
            found = _below(pattern[: pattern.index("*")].rpartition("/")[0])
            self.stamps = {path: stamp for path, stamp in found if fnmatch.fnmatchcase(path, pattern)}
        else:
            folder, _, name = pattern.rpartition("/")
            paths = sorted(map(str, Path(folder).glob(name))) if "*" in pattern else [pattern]
            while paths and (span := _BRACES.search(paths[0])):
                numbers = [f"{n:0{len(span[1])}d}" for n in range(int(span[1]), int(span[2]) + 1)]
                paths = [_BRACES.sub(number, path, count=1) for path in paths for number in numbers]
            self.stamps = dict(zip(paths, _heads(paths), strict=True))
        missing = next((path for path, stamp in self.stamps.items() if stamp is None), None)
        if missing or not self.stamps:
            raise DataError(f"there is no {missing or pattern}. fix: name tar files that are there")

    def digest(self) -> str:
        """Another text if one of the files is another."""
        return hashlib.sha256(repr(sorted(self.stamps.items())).encode("utf-8", "surrogateescape")).hexdigest()

    def located(self, names: Iterable[str]) -> list[str]:
        """The names as ``<tar>@<start>+<length>/<name>``; unchanged those that no tar has.

        Where the folders differ, a name is found by its last part. Raises ``DataError``.
        """
        members: dict[str, str] = {}
        by_end: dict[str, str] = {}
        with ThreadPoolExecutor(FETCHES) as pool:
            tars = tracked(pool.map(_members, self.stamps.items()), len(self.stamps), "reading tars", unit="file")
            for name, where in (member for tar in tars for member in tar):
                if name in members:
                    raise DataError(f"{self.pattern} holds {name} twice. fix: give each picture its own name")
                members[name] = where
                end = name.rpartition("/")[2]
                by_end[end] = "" if end in by_end else where
        plain = [(name, posixpath.normpath(name.replace("\\", "/"))) for name in names]
        return [members.get(path) or by_end.get(path.rpartition("/")[2]) or name for name, path in plain]


def _members(tar_file: tuple[str, tuple[int, str]]) -> list[tuple[str, str]]:
    """The names of the files in a tar, and their places from its folder on."""
    path, (size, _) = tar_file
    shard, found = path.rpartition("/")[2], []
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Ranges(path, size), BLOCK), mode="r:") as tar:
            for member in tar:
                if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):  # the bytes of a sparse file are elsewhere
                    name = posixpath.normpath(member.name)
                    end = name.rpartition("/")[2]
                    found.append((name, f"{shard}@{member.offset_data}+{member.size}/{end}"))
                tar.members = []  # type: ignore[attr-defined]  # which it would keep
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} is not a whole, uncompressed tar ({error}). fix: write it again") from error
    return found


class _Ranges(io.RawIOBase):
    """A file of ``size`` bytes, fetched in parts as they are read."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size, self.at = path, size, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self.size - self.at))
        data = _bytes(self.path, self.at, wanted) if wanted else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


class Fetcher:
    """Fetches files ahead of need, side by side, and keeps a ``share`` of them in a ``folder``.

    Their names decide which, as every file is read once in each epoch.
    """

    def __init__(self, folder: Path | None = None, share: float = 0.0) -> None:
        self.folder, self.share = folder, share
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[bytes]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.folder, self.share)

    def begin(self, paths: Iterable[str]) -> None:
        """Begin to fetch files that will be read, the first ones first; forget all others."""
        pool = self._pool = self._pool or ThreadPoolExecutor(FETCHES)
        begun, self._begun = self._begun, {}
        for path in dict.fromkeys(paths):
            self._begun[path] = begun.pop(path) if path in begun else pool.submit(self._read, path)
        for future in begun.values():
            future.cancel()

    def read(self, path: str) -> bytes:
        """The content of a file. Raises ``OSError`` and ``FetchError``."""
        begun = self._begun.pop(path, None)
        return self._read(path) if begun is None else begun.result()

    def _read(self, path: str) -> bytes:
        name = path.encode("utf-8", "surrogateescape")
        if self.folder is None or zlib.crc32(name) >= self.share * 2**32:
            return read(path)
        kept = self.folder / hashlib.sha256(name).hexdigest()[:32]
        with suppress(OSError):
            content = kept.read_bytes()
            if len(content) > 4 and zlib.crc32(content[4:]) == int.from_bytes(content[:4]):
                return content[4:]
        data = read(path)
        temporary = kept.with_name(f".{kept.name}.{uuid.uuid4().hex}.tmp")
        with suppress(OSError):  # on a full disk
            temporary.write_bytes(zlib.crc32(data).to_bytes(4) + data)
            temporary.rename(kept)
        return data
