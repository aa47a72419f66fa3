"""Fetch archives over HTTP and unpack them: resumable, verified, never outside the folder."""

from __future__ import annotations

import hashlib
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data.errors import DataError

CHUNK = 1 << 20
PAUSE_SECONDS = 1.0  # before the second attempt; doubles each time
CONNECT_SECONDS = 10.0  # until a server must accept a connection
Report = Callable[[int, int], None]  # (units done, all units: 0 if unknown)


class UnreachableError(DataError):
    """The server cannot be reached: most likely this machine has no way to it."""


def download(url: str, path: Path, md5: str, attempts: int, timeout: float, report: Report) -> None:
    """Fetch ``url`` into ``path`` unless it exists; resume an interrupted download.

    Bytes go to ``<path>.part``, which is renamed once its MD5 is right; otherwise it is deleted.
    Raises ``DataError`` after ``attempts`` failures in a row without a new byte, at once where the
    server refuses the file, and for a wrong MD5; ``UnreachableError`` where the first attempt finds
    no server.
    """
    if path.is_file() and _md5(path) == md5:
        return
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    failures, pause = 0, PAUSE_SECONDS
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(url, part, timeout, report)
            break
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is complete or too long; its MD5 decides
                break
            if error.code < 500:
                raise DataError(
                    f"{url}: the server says {error.code} {error.reason}. fix: check the address"
                ) from error
            problem: Exception = error
        except (OSError, HTTPException) as error:
            if failures == 0 and isinstance(error, urllib.error.URLError):  # raised before any answer
                fix = f"fix: connect this machine to it, or fetch the file into {path} by other means"
                raise UnreachableError(f"{url} cannot be reached ({error.reason}). {fix}") from error
            problem = error
        arrived = part.exists() and part.stat().st_size > before
        failures = 1 if arrived else failures + 1
        if failures >= attempts:
            raise DataError(
                f"{url}: {problem or type(problem).__name__} after {attempts} attempts."
                f" fix: run the command again; it resumes from {part}"
            ) from problem
        pause = PAUSE_SECONDS if arrived else pause * 2
        time.sleep(pause)
    if (found := _md5(part)) != md5:
        part.unlink()
        raise DataError(f"{url} has the MD5 {found} instead of {md5}, so it is damaged. fix: run the command again")
    part.replace(path)


def _continue(url: str, part: Path, timeout: float, report: Report) -> None:
    """Append the missing bytes to ``part``. Raises ``OSError`` if the connection ends early."""
    start = part.stat().st_size if part.exists() else 0
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


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
