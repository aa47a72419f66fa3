"""The claim on a run folder: one run trains into it at a time, across all machines that see it.

A claim is a file ``.claim-<number>.json`` that names its maker. The highest number holds the
folder. Only one process can create a given file (O_EXCL, which NFS honours), and the highest one is
never removed, so of two processes that find the same dead holder only one succeeds it. The holder
touches its file regularly, for machines that cannot see its process.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from train_utils.errors import TrainError
from train_utils.launch import Job
from train_utils.run.whole_files import whole_file

BEAT_SECONDS = 5.0  # between two touches of a claim
SILENT_SECONDS = 30.0  # without a touch, a remote holder is dead; a long C call may delay some
PAUSE_SECONDS = 0.5  # between two looks at a claim


class Claim:
    """A run folder that this process holds until ``release``.

    ``before`` is the content of the previous claim, {} for the first. ``ended_after`` passes to the
    next claim: the epoch count at which the run was complete, closing table included, else 0.
    """

    def __init__(self, folder: Path, number: int, content: dict[str, Any], before: dict[str, Any]) -> None:
        self.folder, self.before = folder, before
        self.ended_after = int(before.get("ended_after", 0))
        self._number, self._content = number, content
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run folder's claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise TrainError if another run took over, as after a pause that looked like a death."""
        if self._lost:
            holder = _sentence(_read(_path(self.folder, _highest(self.folder))) or {})
            raise TrainError(
                f"{holder} took over {self.folder} because this run had given no sign of life for "
                f"{SILENT_SECONDS:g} s. fix: nothing, the other run continues"
            )

    def release(self, used: bool = True) -> None:
        """Free the folder; unless ``used``, restore the content of the previous claim."""
        self._over.set()
        self._thread.join()
        if self._lost:
            return
        content = self._content if used else self.before
        # A full disk may prevent the write. The end of this process then frees the folder.
        with suppress(OSError), whole_file(_path(self.folder, self._number)) as file:
            json.dump(content | {"released": True, "ended_after": self.ended_after}, file)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # the disk may recover
                os.utime(_path(self.folder, self._number))
            self._lost = self._lost or _highest(self.folder) > self._number


def claim_folder(folder: Path, job: Job, patient: bool) -> Claim | str:
    """Claim an existing folder for a run of ``job``, or return a description of its holder.

    A holder on this machine is looked up in the process table. A job that SLURM or torchrun
    restarted succeeds its own earlier start at once. Otherwise the age of the last touch decides,
    by the clock of the disk: beyond SILENT_SECONDS the holder is dead. A younger claim is watched
    for that long if ``patient``, else it counts as held. Raises OSError if the folder is not
    writable.
    """
    while True:
        number = _highest(folder)
        before = _read(_path(folder, number)) if number else {}
        if before is None:  # removed meanwhile, so there is a higher one
            time.sleep(PAUSE_SECONDS)
            continue
        if number:
            held = _is_held(_path(folder, number), before, job)
            if held or (held is None and not (patient and _falls_silent(folder, _path(folder, number)))):
                if _highest(folder) > number:  # that claim came from a stale listing, and is withdrawn
                    continue
                return _sentence(before)
        content = _make(_path(folder, number + 1), job)
        if content is None:  # another process was faster
            continue
        if _highest(folder) > number + 1:  # the directory listing was a stale one from a cache
            _path(folder, number + 1).unlink(missing_ok=True)
            continue
        for path in (_path(folder, lower) for lower in range(1, number + 1)):
            path.unlink(missing_ok=True)
        return Claim(folder, number + 1, content, before)


def newest_claim(folder: Path, job: Job) -> tuple[dict[str, Any], bool | None]:
    """Content of a folder's newest claim, {} without one, and whether a run holds the folder.

    None instead of the latter means that only waiting could tell.
    """
    number = _highest(folder)
    content = _read(_path(folder, number)) if number else None
    return content or {}, content is not None and _is_held(_path(folder, number), content, job)


def _path(folder: Path, number: int) -> Path:
    return folder / f".claim-{number}.json"


def _highest(folder: Path) -> int:
    numbers = [path.name.removeprefix(".claim-").removesuffix(".json") for path in folder.glob(".claim-*.json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _make(path: Path, job: Job) -> dict[str, Any] | None:
    """Make a claim and return its content, or None if the file exists."""
    with suppress(FileExistsError), path.open("x") as file:
        content = {
            "machine": _machine(), "host": platform.node(), "pid": os.getpid(), "born": _born(os.getpid()),
            "inode": os.fstat(file.fileno()).st_ino, "since": time.strftime("%Y-%m-%d %H:%M:%S"), **job._asdict(),
        }  # fmt: skip
        try:
            file.write(json.dumps(content))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink()
            raise
        return content
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """Content of a claim: {} while it is being written, None if it is gone."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _is_held(path: Path, content: dict[str, Any], job: Job) -> bool | None:
    if "released" in content:
        return False
    if job.job and content.get("job") == job.job and content["restarts"] < job.restarts:
        return False  # SLURM ends a job before it restarts it
    # Another inode means that the folder is a copy.
    if content.get("machine") == _machine() and _inode(path) == content["inode"]:
        return bool(content["born"] == _born(content["pid"]))
    if job.run and content.get("run") == job.run and content["run_restarts"] < job.run_restarts:
        return False  # so does torchrun, but two of its runs on one machine may share an id
    return False if _now(path.parent) - _touched(path) > SILENT_SECONDS else None


def _falls_silent(folder: Path, path: Path) -> bool:
    """Wait to see whether a claim stays untouched for SILENT_SECONDS."""
    last = _touched(path)
    until = time.monotonic() + SILENT_SECONDS - max(_now(folder) - last, 0)
    while time.monotonic() < until:
        time.sleep(PAUSE_SECONDS)
        if _touched(path) != last:
            return False
    return True


def _inode(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0


def _touched(path: Path) -> float:
    """Time of a file's last touch. Opening it makes NFS ask its server instead of its cache."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:  # another claim just replaced it
        return float("inf")


def _now(folder: Path) -> float:
    """Time by the clock of the disk, which also stamps the claims: machines' clocks may differ."""
    probe = folder / f".probe-{platform.node()}-{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _machine() -> str:
    """Identify host, user, boot and container: all that process ids depend on."""
    parts = [platform.node(), str(os.getuid())]
    with suppress(OSError):  # Linux only
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _born(pid: int) -> str | None:
    """Start of a local process in clock ticks; "" if the system hides it, None if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return ""


def _sentence(content: dict[str, Any]) -> str:
    """Describe a holder in a few words."""
    if not content:
        return "a run that is just starting"
    job = f"SLURM job {content['job']}" if content["job"] else ""
    step = f"step {content['step']}" if content["step"] else ""
    where = ", ".join(part for part in (f"host {content['host']}", job, step) if part)
    return f"process {content['pid']} ({where}, since {content['since']})"
