"""Fetch files over HTTP, verified, and unpack archives."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from data.errors import DataError
from data.files import bar

RETRIES = 3
TIMEOUT_SECONDS = 60.0  # without a byte


class _Progress:
    """What pooch expects of a progress bar."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report = report
        self.total = self.done = 0

    def update(self, count: int) -> None:
        self.done += count
        self.report(self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def download(url: str, path: Path, known_hash: str | None = None, size: int | None = None) -> None:
    """Fetch ``url`` into ``path`` unless the right file is there; it appears whole or not at all.

    ``known_hash`` is written as ``md5:<digits>`` or ``sha1:<digits>``, ``size`` is in bytes. Raises
    ``DataError`` if the file cannot be fetched or is another one.
    """
    import pooch  # and with it requests: slow

    pooch.get_logger().setLevel("WARNING")
    if path.is_file() and size is not None and path.stat().st_size != size:
        path.unlink()
    files = pooch.create(
        path.parent, base_url="", registry={path.name: known_hash}, urls={path.name: url}, retry_if_failed=RETRIES
    )
    try:
        with bar(path.name) as report:
            files.fetch(
                path.name, downloader=pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=_Progress(report))
            )
    except OSError as error:
        raise DataError(
            f"{url} cannot be fetched into {path} ({error}). fix: check address, network and folder, or fetch the file "
            "by other means"
        ) from error
    except ValueError as error:
        raise DataError(f"{url} is damaged: its {known_hash} differs. fix: run the command again") from error
    if size is not None and (actual := path.stat().st_size) != size:
        path.unlink()
        raise DataError(f"{url} has {actual:,} bytes instead of {size:,}. fix: run the command again")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip, .tar or .tar.gz into ``folder``, over existing files, never outside of it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)
        else:
            with tarfile.open(archive) as tarred:
                tarred.extractall(folder, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} is damaged ({error}). fix: remove it and run the command again") from error
