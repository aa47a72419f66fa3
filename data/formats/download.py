"""Fetch archives over HTTP and unpack them: resumable, verified, never outside the folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data.errors import DataError

CHUNK = 1 << 20
PAUSE_SECONDS = 1.0  # before the second attempt; doubles each time
CONNECT_SECONDS = 10.0  # until a server must accept a connection
LOOK_SECONDS = 0.2  # between looks at what another process fetches
Report = Callable[[int, int], None]  # (units done, all units: 0 if unknown)


class Expected(NamedTuple):
    """What identifies a file: a digest, its length in bytes, or both."""

    digest: str | None = None  # in hexadecimal digits
    algorithm: str = "md5"
    size: int | None = None

    def problem(self, path: Path) -> str | None:
        """What is wrong with a file, as the rest of a sentence; None if it is the right one."""
        if self.size is not None and (found := path.stat().st_size) != self.size:
            return f"has {found:,} bytes instead of {self.size:,}"
        if self.digest is not None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, self.algorithm).hexdigest()
            if digest != self.digest:
                return f"has the {self.algorithm.upper()} {digest} instead of {self.digest}"
        return None


class UnreachableError(DataError):
    """The server cannot be reached: most likely this machine has no way to it."""


class UnwritableError(DataError):
    """The folder that the file is meant for cannot be written to."""


def download(url: str, path: Path, expected: Expected, attempts: int, timeout: float, report: Report) -> None:
    """Fetch ``url`` into ``path`` unless it is there; resume an interrupted download.

    Bytes go to ``<path>.part``, which is renamed once it is what was expected; otherwise it is
    deleted. Of several processes one fetches and the others wait. Raises ``DataError`` after
    ``attempts`` failures in a row without a new byte, at once where the server refuses the file,
    and for a wrong file; ``UnreachableError`` where the first attempt finds no server;
    ``UnwritableError`` where the folder is not the user's.
    """
    if path.is_file() and expected.problem(path) is None:
        return  # also from a folder that nobody may write to
    part = path.with_name(f"{path.name}.part")
    with _alone(part, expected.size or 0, report):
        problem = expected.problem(path) if path.is_file() else ""
        if problem is None:  # another process has fetched it
            part.unlink()
            return
        if expected.size is not None and part.stat().st_size > expected.size:
            os.truncate(part, 0)
        try:
            _fetch(url, part, attempts, timeout, report)
        except UnreachableError as error:
            if part.stat().st_size == 0:
                part.unlink()
            there = f"{path} {problem}, and " if problem else ""
            fix = f"fix: connect this machine to it, or fetch the file into {path} by other means"
            raise UnreachableError(f"{there}{error}. {fix}") from error
        if (problem := expected.problem(part)) is not None:
            part.unlink()
            raise DataError(f"{url} {problem}, so it is damaged. fix: run the command again")
        part.replace(path)


@contextmanager
def _alone(part: Path, size: int, report: Report) -> Iterator[None]:
    """Hold the lock of ``part``, an empty file at first; meanwhile report what another fetches."""
    while True:
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            opened = part.open("ab")
        except OSError as error:
            message = f"cannot write {part} ({error.strerror}). fix: a folder that you may write to"
            raise UnwritableError(message) from error
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(os.fstat(file.fileno()).st_size, size)
                time.sleep(LOOK_SECONDS)
                continue
            if not part.exists() or not os.path.samestat(os.fstat(file.fileno()), part.stat()):
                continue  # whoever held it has renamed or deleted this file
            yield
            return


def _fetch(url: str, part: Path, attempts: int, timeout: float, report: Report) -> None:
    """Append what is missing of ``url`` to ``part``, in several attempts if need be."""
    failures, pause = 0, PAUSE_SECONDS
    while True:
        before = part.stat().st_size
        try:
            _continue(url, part, timeout, report)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is complete or too long, as its digest or length will tell
                return
            if error.code < 500:
                raise DataError(
                    f"{url}: the server says {error.code} {error.reason}. fix: check the address"
                ) from error
            problem: Exception = error
        except (OSError, HTTPException) as error:
            if failures == 0 and isinstance(error, urllib.error.URLError):  # raised before any answer
                raise UnreachableError(f"{url} cannot be reached ({error.reason})") from error
            problem = error
        arrived = part.stat().st_size > before
        failures = 1 if arrived else failures + 1
        if failures >= attempts:
            raise DataError(
                f"{url}: {problem or type(problem).__name__} after {attempts} attempts."
                f" fix: run the command again; it resumes from {part}"
            ) from problem
        pause = PAUSE_SECONDS if arrived else pause * 2
        time.sleep(pause)


def _continue(url: str, part: Path, timeout: float, report: Report) -> None:
    """Append the missing bytes to ``part``. Raises ``OSError`` if the connection ends early."""
    start = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    with urllib.request.build_opener(_Open).open(request, timeout=timeout) as answer:
        if answer.status != 206:
            start = 0  # the server sends the whole file
        length = int(answer.headers.get("Content-Length", 0))
        total = start + length if length else 0
        with part.open("ab" if start else "wb") as file:
            done = start
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                report(done, total)
    if total and done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")


class _Connection(HTTPConnection):
    """A short time-out to connect, in case of a firewall, and the full one to read."""

    def connect(self) -> None:
        reading = self.timeout
        self.timeout = min(reading or CONNECT_SECONDS, CONNECT_SECONDS)
        super().connect()
        self.sock.settimeout(reading)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Open(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, req)


def unpack(archive: Path, folder: Path, report: Report) -> None:
    """Unpack a .zip, .tar or .tar.gz into ``folder``, over existing files; ``report`` counts files.

    Raises ``DataError`` before anything is written if an entry would end up outside of ``folder``,
    or is neither a file nor a folder.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                entries = [
                    # The upper 16 bits are the Unix mode.
                    _Entry(entry.filename, not stat.S_ISLNK(entry.external_attr >> 16), partial(zipped.extract, entry))
                    for entry in zipped.infolist()
                ]
                _extract(archive, entries, folder, report)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tarred:
                entries = [
                    _Entry(entry.name, entry.isfile() or entry.isdir(), partial(tarred.extract, entry, filter="data"))
                    for entry in tarred.getmembers()
                ]
                _extract(archive, entries, folder, report)
        else:
            raise DataError(f"{archive} is no .zip and no .tar. fix: get it again")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} is damaged ({error}). fix: remove it and run the command again") from error


class _Entry(NamedTuple):
    name: str
    is_plain: bool  # a file or a folder
    extract: Callable[..., object]  # its argument ``path`` is the folder


def _extract(archive: Path, entries: list[_Entry], folder: Path, report: Report) -> None:
    for entry in entries:
        parts = PurePosixPath(entry.name.replace("\\", "/"))
        # resolve() follows links that already exist in the folder.
        inside = (folder / parts).resolve().is_relative_to(folder.resolve())
        if not entry.is_plain or parts.is_absolute() or ".." in parts.parts or not inside:
            raise DataError(
                f"{archive} holds the entry {entry.name!r}, which is not a plain file inside the folder, so nothing was"
                " unpacked. fix: do not use this archive"
            )
    for done, entry in enumerate(entries, start=1):
        entry.extract(path=folder)
        report(done, len(entries))
