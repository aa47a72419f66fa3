"""Jobs of a real SLURM for tests: submit, watch, signal, and look for leftovers."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conf import REPOSITORY

SECONDS = 400.0  # a job of four processes imports torch four times, beside other tests
OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def slurm_is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    nodes = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle,mix,alloc", "-o", "%N"], capture_output=True, text=True, timeout=30
    )
    return nodes.returncode == 0 and len(set(nodes.stdout.split())) >= 2


def answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def until(condition: Callable[[], object], what: Callable[[], str], seconds: float = SECONDS) -> None:
    """Wait for ``condition``; AssertionError with ``what()`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


@dataclass
class Job:
    """A submitted job or array task (``<job>_<task>``), with output in ``job-<number>.out``."""

    number: str
    folder: Path

    def fact(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", answer("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    @property
    def output(self) -> str:
        path = self.folder / f"job-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_steps(self) -> None:
        def has_steps() -> bool:
            tables = self.folder.glob(f"runs/*/slurm-{self.number}/steps.csv")
            return any(table.read_text().count("\n") > 1 for table in tables)

        until(lambda: has_steps() or self.fact("JobState") in OVER, lambda: f"no step: {self.output}")
        assert has_steps(), self.output

    def restart_now(self) -> None:
        """Wait until the job is requeued, and start it without SLURM's delay of two minutes."""
        until(lambda: self.fact("JobState") == "PENDING" or self.fact("JobState") in OVER, lambda: self.output)
        assert self.fact("JobState") == "PENDING", f"{self.fact('JobState')}: {self.output}"
        time.sleep(3)  # SLURM revokes a job that starts before its last run is cleaned up
        answer("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def end(self) -> str:
        until(
            lambda: self.fact("JobState") in OVER and not self.processes(), lambda: f"{self.processes()} {self.output}"
        )
        return self.fact("JobState")

    def processes(self) -> dict[Path, str]:
        """Command lines of the living processes of this folder's jobs, by their folder in /proc."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if f"data.root='{self.folder}" in arguments:  # a zombie's is empty
                found[path] = arguments
        return found


def submit(script: str, folder: Path, sbatch: list[str], options: list[str]) -> Job:
    """Submit a script of scripts/slurm to work in ``folder``, with one thread per process."""
    number = answer(
        "sbatch", "--parsable", "--cpus-per-task=1", f"--chdir={folder}", f"--output={folder}/job-%j.out",
        f"--export=ALL,PYTHON={sys.executable},OMP_NUM_THREADS=1", *sbatch,
        str(REPOSITORY / "scripts" / "slurm" / script), *options,
    ).strip()  # fmt: skip
    return Job(number, folder)
