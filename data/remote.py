"""Pictures in buckets, on web servers and in tar files: their addresses, and how they are read.

An address is ``s3://bucket/folder/a.jpg`` (also ``gs://``, ``az://``, ``https://``). A picture in a
tar, on the disk or at an address, is ``<tar>@<start>+<length>/<name>``.
"""

import errno
import fnmatch
import hashlib
import importlib.util
import io
import os
import posixpath
import re
import shutil
import sys
import tarfile
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from data.errors import DataError, printable
from data.progress import tracked

T = TypeVar("T")
Stamp = tuple[int, str]  # bytes of a file, and a text that changes with the content
Place = Path | str  # of pictures: a folder, or as text an address or a pattern of tar files

SCHEMES = ("s3", "gs", "az", "https", "http")
LISTED = ("s3", "gs", "az")  # a web server does not tell what it has
TIMEOUT_SECONDS = 30.0  # of one try
PATIENCE_SECONDS = 60.0  # of tries without a whole answer
FETCHES = 32  # side by side in a process
ASKED = 128  # side by side while an index is built: small answers
FEW = 1000  # files that are asked for one by one, not found in a list of all
BLOCK = 2**15  # bytes of a tar that are read at once: a header, and what lies behind it
MAX_FETCHED = 256 * 2**20  # bytes of a picture
MAX_NAME = 1024  # characters of a key
PART = 16 * 2**20  # bytes of a larger file that are fetched at once
WRITES = 4  # parts of a file that are sent side by side: a slow line has time for each
FIX = "check the address, the network and the credentials; a stopped training goes on with resume="
_ADDRESS = re.compile(r"(\w+://[^/]+)/?(.*)", re.DOTALL)
_MEMBER = re.compile(r"(.+?\.tar)@(\d{1,18})\+(\d{1,18})/", re.DOTALL)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class FetchError(DataError):
    """An answer did not come, which says nothing about the file."""


def is_remote(path: Place) -> bool:
    """Whether what is there has to be fetched."""
    return isinstance(path, str) and "://" in path


def place(root: Path, name: str) -> Place:
    """The place that a data set calls ``name``; relative paths start at ``root``."""
    if "://" in name:
        return name.rstrip("/")
    return str(root / name) if name.endswith(".tar") else root / name


def folder_of(images: Place) -> Place:
    """The folder of tar files; any other place itself."""
    return images.rpartition("/")[0] if isinstance(images, str) and images.endswith(".tar") else images


def check_address(text: str, key: str) -> None:
    """Raise DataError, which names ``key``, for an address that cannot be used."""
    if "://" not in text:
        return
    why = fix = ""
    if text.partition("://")[0] not in SCHEMES or not _ADDRESS.fullmatch(text):
        why, fix = "of another kind", f"one of {', '.join(SCHEMES)}, as in s3://bucket/folder"
    elif "@" in text.split("/")[2] or "?" in text:
        why, fix = "with a secret, which logs would show", "the variables of docs/develop/security.md"
    elif importlib.util.find_spec("obstore") is None:
        why, fix = "that needs obstore", "uv pip install obstore"
    if why:
        raise DataError(f"{key} is an address {why}", fix)


def check_bucket(text: str, key: str) -> None:
    """The same for a folder in a bucket, where files are written."""
    if text.partition("://")[0] not in LISTED:
        raise DataError(f"{key}={text} is not in a bucket", "an address such as s3://bucket/folder")
    check_address(text, key)


@cache
def _store(base: str, _: int) -> Any:
    """The client of a bucket in this process; its credentials are in the environment."""
    from obstore import store

    options: Any = {"timeout": timedelta(seconds=TIMEOUT_SECONDS), "allow_http": True}  # if it says so
    retries: Any = {"max_retries": 100, "retry_timeout": timedelta(seconds=PATIENCE_SECONDS)}
    # By its host, from_url() would sign an https address with the user's keys.
    open_store = store.HTTPStore.from_url if base.startswith("http") else store.from_url
    return open_store(base, client_options=options, retry_config=retries)


def _base_and_key(address: str) -> tuple[str, str]:
    base, key = _ADDRESS.fullmatch(address).groups()  # type: ignore[union-attr]  # by check_address
    return base, posixpath.normpath(key) if key else ""


def _asked(address: str, ask: Callable[[Any, str], T]) -> T:
    """What ``ask`` returns for the store and the key of an address.

    Raises ``FileNotFoundError``, ``EOFError`` for a range beyond the end, or else ``FetchError``,
    without obstore's text: that has tokens.
    """
    from obstore import exceptions

    base, key = _base_and_key(address)
    if len(key) > MAX_NAME or key.split("/")[0] in (".", "..") or printable(key) != key:
        raise FileNotFoundError(errno.ENOENT, "no bucket can hold such a name", address)
    try:
        return ask(_store(base, os.getpid()), key)
    except (FileNotFoundError, exceptions.NotFoundError):
        raise FileNotFoundError(errno.ENOENT, "there is no such object", address) from None
    except BaseException as error:
        known = isinstance(error, (exceptions.BaseError, PermissionError, TimeoutError))
        if not known and type(error).__name__ != "PanicException":  # of Rust, for a key that cannot be sent
            raise
        status = re.search(r"status code: (\d{3})", str(error))
        if status and status[1] == "416":
            raise EOFError from None
        kinds = ", ".join(dict.fromkeys(re.findall(r"(?:kind|source): (\w+),$", str(error), re.MULTILINE)))
        why = kinds or type(error).__name__
        if status:
            why = f"HTTP status {status[1]}"
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            why = "access denied"
        tried = f"{why}; a try may take {TIMEOUT_SECONDS:g} s, all of them {PATIENCE_SECONDS:g} s"
        raise FetchError(f"{address} cannot be reached ({tried})", FIX) from None


def read(path: str, limit: int = sys.maxsize) -> bytes:
    """At most ``limit`` bytes of an address or of a picture in a tar.

    Raises ``OSError`` if it cannot be what is looked for, ``FetchError`` if it does not come.
    """
    member = _MEMBER.match(path)
    whole, start, length = (member[1], int(member[2]), int(member[3])) if member else (path, 0, sys.maxsize)
    size = min(limit, length)
    data = _bytes(whole, start, size)
    if member and len(data) != size:
        raise OSError(errno.EIO, f"its tar ends after {len(data):,} of {size:,} bytes", path)
    return data


def _bytes(path: str, start: int, size: int) -> bytes:
    """``size`` bytes from ``start`` on, fewer at the end."""

    def ask(store: Any, key: str) -> bytes:
        answer = store.get(key, options=options)
        if answer.range[1] - answer.range[0] > MAX_FETCHED:
            raise OSError(errno.EFBIG, f"it has more than {MAX_FETCHED:,} bytes", path)
        return bytes(answer.bytes())

    if "://" not in path:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(min(size, MAX_FETCHED))
    options = {} if size == sys.maxsize else {"range": (start, start + min(size, MAX_FETCHED))}
    try:
        return _asked(path, ask)
    except EOFError:
        return b""


def fetch(address: str, file: IO[bytes]) -> None:
    """Copy a file of any size into ``file``. Raises ``FileNotFoundError`` and ``FetchError``."""
    shutil.copyfileobj(opened(address), file, PART)


def write(address: str, content: Path | IO[bytes]) -> None:
    """Write a file to a bucket: after an error the old one is unchanged. Raises ``FetchError``."""
    _asked(address, lambda store, key: store.put(key, content, max_concurrency=WRITES))


def copy(address: str, other: str) -> None:
    """Copy a file within its bucket. Raises ``FileNotFoundError`` and ``FetchError``."""
    _asked(address, lambda store, key: store.copy(key, _base_and_key(other)[1]))


def opened(address: str) -> IO[bytes]:
    """A file that is fetched as it is read. Raises ``FileNotFoundError`` and ``FetchError``."""
    size = _asked(address, lambda store, key: store.head(key)["size"])
    return io.BufferedReader(_Parts(address, size), BLOCK)


def _head(path: str) -> Stamp | None:
    with suppress(FileNotFoundError):
        if "://" in path:
            return _stamp(_asked(path, lambda store, key: store.head(key)))
        status = os.stat(path)
        return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return None


def _heads(paths: Sequence[str]) -> list[Stamp | None]:
    with ThreadPoolExecutor(ASKED) as pool:
        return list(tracked(pool.map(_head, paths), len(paths), "looking for files", unit="file"))


def _stamp(meta: Any) -> Stamp:
    return meta["size"], f"{meta['e_tag']} {meta['last_modified']}"


def _below(folder: str) -> Iterator[tuple[str, Stamp]]:
    base, _ = _base_and_key(folder)
    pages = _asked(folder, lambda store, key: store.list(key or None, chunk_size=FEW))
    while page := _asked(folder, lambda *_: list(next(pages, []))):
        yield from ((f"{base}/{meta['path']}", _stamp(meta)) for meta in page)


def sizes_of(paths: Sequence[str]) -> list[int]:
    """Bytes of files at addresses and in tar files; -1: not there. Raises ``FetchError``."""
    members = list(map(_MEMBER.match, paths))
    asked = [path for path, member in zip(paths, members, strict=True) if member is None and "://" in path]
    addresses = ["/".join(_base_and_key(path)) for path in asked]  # several paths may name one file
    found: dict[str, Stamp | None]
    if len(asked) <= FEW or not asked[0].startswith(LISTED):
        found = dict(zip(addresses, _heads(asked), strict=True))
    else:
        folder = os.path.commonpath([*map(os.path.dirname, addresses)]).replace(":/", "://", 1)
        wanted = set(addresses)
        listed = tracked(_below(folder), 0, f"listing {folder}", unit="file")
        found = {address: stamp for address, stamp in listed if address in wanted}
    sizes = {}
    for path, address in zip(asked, addresses, strict=True):
        if head := found.get(address):
            sizes[path] = head[0]
    return [int(member[3]) if member else sizes.get(path, -1) for path, member in zip(paths, members, strict=True)]


def shards(pattern: str) -> dict[str, Stamp]:
    """The tar files of a pattern, such as ``s3://bucket/train-*.tar``, with what ``_heads`` says.

    Braces, as in ``train-{0000..0099}.tar``, need no list of the bucket. Raises ``DataError``.
    """
    found: dict[str, Stamp | None]
    folder = pattern.partition("*")[0].rpartition("/")[0]
    if "*" in pattern and "://" in pattern:
        found = {path: stamp for path, stamp in _below(folder) if fnmatch.fnmatchcase(path, pattern)}
    else:
        paths = sorted(map(str, Path(folder).glob(pattern[len(folder) + 1 :]))) if "*" in pattern else [pattern]
        while paths and (span := _BRACES.search(paths[0])):
            numbers = [f"{n:0{len(span[1])}d}" for n in range(int(span[1]), int(span[2]) + 1)]
            paths = [_BRACES.sub(number, path, count=1) for path in paths for number in numbers]
        found = dict(zip(paths, _heads(paths), strict=True))
    there = {path: stamp for path, stamp in found.items() if stamp is not None}
    if len(there) < len(found) or not there:
        missing = next((path for path in found if path not in there), pattern)
        raise DataError(f"there is no {missing}", "name tar files that are there")
    return there


def in_shards(names: Iterable[str], pattern: str) -> list[str]:
    """The names as ``<tar>@<start>+<length>/<name>``; unchanged those that no tar has.

    A name may be found by its last part, if that is its alone. Raises ``DataError``.
    """
    plain = [(name, posixpath.normpath(name.replace("\\", "/"))) for name in names]
    wanted = {path for _, path in plain}
    ends = Counter(path.rpartition("/")[2] for path in wanted)
    members = {}
    by_end = {}
    files = shards(pattern)
    with ThreadPoolExecutor(ASKED) as pool:
        tars = tracked(pool.map(_members, files.items()), len(files), "reading tars", unit="file")
        for name, where in (member for tar in tars for member in tar):
            if name in members and name in wanted:
                raise DataError(f"{pattern} holds {name} twice", "give each picture its own name")
            members[name] = where
            end = name.rpartition("/")[2]
            by_end[end] = "" if end in by_end or ends[end] > 1 else where
    return [members.get(path) or by_end.get(path.rpartition("/")[2]) or name for name, path in plain]


def _members(tar_file: tuple[str, Stamp]) -> list[tuple[str, str]]:
    """The names in a tar, and the places of files from its folder on; of links and the like ""."""
    path, (size, _) = tar_file
    found = []
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Parts(path, size), BLOCK), mode="r:") as tar:
            for member in tar:
                name = posixpath.normpath(member.name)
                place = f"{os.path.basename(path)}@{member.offset_data}+{member.size}/{os.path.basename(name)}"
                is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
                found.append((name, place if is_plain else ""))  # the bytes of a sparse file are elsewhere
                tar.members = []  # type: ignore[attr-defined]  # which it would keep
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} is not a whole, uncompressed tar ({error})", "write it again") from error
    return found


class _Parts(io.RawIOBase):
    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self.at = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        data = _bytes(self.path, self.at, len(buffer)) if self.at < self.size else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


class Fetcher:
    """Fetches files ahead of need, and keeps a ``share`` of them, by their names, in a ``folder``.

    Each read asks whether the file is still the kept one.
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
        member = _MEMBER.match(path)
        version = f" {_head(member[1] if member else path)}"
        kept = self.folder / hashlib.sha256(name + version.encode()).hexdigest()[:32]
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
