"""Fetch files over HTTP, verified."""

from collections.abc import Callable
from pathlib import Path

from data.errors import DataError
from data.files import bar

RETRIES = 3
TIMEOUT_SECONDS = 60.0  # without a byte


class _Progress:
    """What pooch expects of a progress bar."""

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
    try:
        with bar(path.name) as report:
            fetch = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=_Progress(report))
            files.fetch(path.name, downloader=fetch)
        if size not in (None, path.stat().st_size):
            path.unlink()
            raise ValueError(f"it has not {size:,} bytes")
    except OSError as error:
        fix = "fix: check address, network and folder, or fetch the file by other means"
        raise DataError(f"{url} cannot be fetched into {path} ({error}). {fix}") from error
    except ValueError as error:
        raise DataError(f"{url} is damaged, or another file. fix: run the command again") from error
