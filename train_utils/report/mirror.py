"""A run's checkpoints and tables in a bucket, from which another machine continues it."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from conf import TrainError, first_line
from conf.cli import run_files
from data import DataError, remote
from data.progress import LogLine

LAST, PREVIOUS, BEST = (f"{run_files.CHECKPOINTS}/{name}.pt" for name in ("last", "last.previous", "best"))
# Whatever else a resumed run needs; the options, with which there is a run, come first.
BESIDE = [*"config.yaml run_id.txt metrics.csv times.csv steps.csv best_detections.npz".split(), BEST]


class Mirror:
    """Copies a run to ``address`` behind its training; ``log_line`` gets failures in a thread."""

    def __init__(self, folder: Path, address: str, log_line: LogLine) -> None:
        self._folder, self._address = folder, address
        self._log_line = log_line
        self._pool = ThreadPoolExecutor(1, "mirror")
        self._next: Future[None] | None = None
        self._sent: dict[str, int | None] = {}  # when the file that was copied had been written
        self._failure = ""

    def follow(self, written: Future[None]) -> None:
        """Copy the run once last.pt is ``written``; a copy that waits for its turn is left out."""
        if self._next is not None:
            self._next.cancel()
        self._next = self._pool.submit(self._copy, written)

    def close(self) -> None:
        """Wait for the last copy."""
        self._pool.shutdown()

    def _copy(self, written: Future[None]) -> None:
        # last.pt, which a rename hides for a moment, is opened first: a resume can cut later rows.
        if written.exception() is None:
            with suppress(FileNotFoundError), open(self._folder / LAST, "rb") as last:
                told, self._failure = self._failure, self._send(last)
                if self._failure not in ("", told):
                    self._log_line(f"run_mirror: {self._failure}. Training continues, and each checkpoint tries again")

    def _send(self, last: IO[bytes]) -> str:
        try:
            for name in BESIDE:
                path = self._folder / name
                stamp = path.stat().st_mtime_ns if path.exists() else None
                if stamp not in (None, self._sent.get(name)):
                    remote.write(f"{self._address}/{name}", path)
                    self._sent[name] = stamp
            with suppress(FileNotFoundError, remote.FetchError):  # then an older one stays
                remote.copy(f"{self._address}/{LAST}", f"{self._address}/{PREVIOUS}")
            remote.write(f"{self._address}/{LAST}", last)
        except Exception as error:  # whatever it is, it is worth a line and not the training
            return first_line(error) if isinstance(error, DataError) else f"{self._address}: {error!r}"
        return ""


def refuse_other(address: str, resumed: str | None) -> None:
    """Raise TrainError unless ``address`` holds no other run and no later state of ``resumed``."""
    folder = None
    if resumed is not None and not remote.is_remote(resumed):
        folder, resumed = Path(resumed), run_files.read_config(Path(resumed)).get("run_mirror")
    try:
        if address != resumed and run_files.is_mirrored(address):
            fix = f"resume={address} to continue it, or another run_mirror"
            raise TrainError(f"run_mirror={address} already holds a run", fix)
        if folder and address == resumed and run_files.progress_of(folder) < run_files.progress_of(address):
            raise TrainError(f"run_mirror={address} is ahead of {folder}", f"resume={address}, or another run_mirror")
    except remote.FetchError as error:
        says = f"run_mirror={address} may hold another run, or a later state: {first_line(error)}"
        raise TrainError(says, "try again, or run_mirror=null") from error


def fetch(address: str, folder: Path) -> None:
    """Copy the run at ``address`` into ``folder``, its options last. Raises TrainError."""
    for name in (LAST, PREVIOUS, *reversed(BESIDE)):
        try:
            with suppress(FileNotFoundError), run_files.whole_file(folder / name, "wb") as file:
                remote.fetch(f"{address}/{name}", file)
        except (DataError, OSError) as error:
            fix = "check the address, the credentials and the free space, and start again"
            raise TrainError(f"resume={address}: {first_line(error)}", fix) from error
