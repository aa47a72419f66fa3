"""Plant one fault in one rank of a training on two ranks, and report how both ended.

    python -m tests.runs.planted_faults [name ...]

prints a table as Markdown. The processes are real; reports and exit codes are those of
`python train.py`. There is no launcher, which would end the other rank, and each rank writes to its
own file. A fault is a patch in one process (tests/runs/fault_list.py), unknown to the program.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from conf.programs import run
from tests.runs.fault_list import FAULTS, strike
from tests.runs.process_group import fork_context, free_port

WORKERS_NOTICE = 7.0  # seconds: a loader worker checks for its parent every five
LONGEST = 90.0  # seconds before a training counts as hanging
OPTIONS = (
    "data=shapes", "data.shapes={train_images: 32, val_images: 8, image_size: 64, seed: 0}", "data.workers=1",
    "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.multi_scale=[1.0,1.0]",
    "train.batch_size=4", "train.epochs=2", "train.device=cpu", "train.timeout_seconds=30", "evaluate.every=1",
    "evaluate.batch_size=2", "logger.pictures=false",
)  # fmt: skip
TOLD = re.compile(r"^error:|^warning:|Training continues|^stopped at step")
TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
CHAINED = re.compile(r"^(During handling of the above|The above exception was the direct cause)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How the two ranks ended; ``seconds`` from the fault to the end of the last one."""

    seconds: float
    codes: list[int | None]  # None: it had to be killed
    texts: list[str]
    left: list[str]  # processes that outlived their rank

    @property
    def sentences(self) -> list[str]:
        """The lines for the user, from both ranks."""
        return [line for text in self.texts for line in text.splitlines() if TOLD.search(line)]

    @property
    def tracebacks(self) -> int:
        """Tracebacks of both ranks; an exception with its cause counts once."""
        return sum(len(TRACEBACK.findall(text)) - len(CHAINED.findall(text)) for text in self.texts)


def train_rank(rank: int, port: int, name: str, folder: Path, options: Sequence[str]) -> None:
    """Run one rank of a training with the fault ``name``."""
    with open(folder / f"rank_{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()  # lets the parent find what this process leaves behind
    for key in [key for key in os.environ if key.startswith("SLURM")]:
        del os.environ[key]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "PLANTED_FAULT": str(folder / "struck")}
    torch.set_num_threads(1)
    fault = FAULTS[name]
    if rank == fault.rank:
        fault.plant()
    elif name == "beside-leader":
        strike("data.index.annotations.build_index", partial(time.sleep, 8), noted=False)
    sys.argv = ["train.py", *options]
    run("train")


def strike_down(name: str, folder: Path) -> Outcome:
    """Train in ``folder`` with the fault ``name`` and wait, at most LONGEST, for both ranks."""
    folder.mkdir(parents=True)
    context = fork_context()
    places = (f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", f"run_dir={folder / 'run'}")
    options, port = (*OPTIONS, *places, *FAULTS[name].options), free_port()
    ranks = [context.Process(target=train_rank, args=(rank, port, name, folder, options)) for rank in range(2)]
    for process in ranks:
        process.start()
    begun, until = time.time(), time.monotonic() + LONGEST
    stopped = FAULTS[name].plant is FAULTS["stopped"].plant
    for process in ranks:
        if not (stopped and process is ranks[1]):
            process.join(max(0, until - time.monotonic()))
    struck = folder / "struck"
    seconds = time.time() - (struck.stat().st_mtime if struck.exists() else begun)
    if stopped and ranks[1].is_alive():
        os.kill(ranks[1].pid or 0, signal.SIGKILL)  # it cannot end itself
        ranks[1].join()
    codes = [process.exitcode for process in ranks]
    ended, until = {process.pid for process in ranks if not process.is_alive()}, time.monotonic() + WORKERS_NOTICE
    while (left := members(ended)) and time.monotonic() < until:
        time.sleep(0.1)
    for number in members({process.pid for process in ranks}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number.split()[0]), signal.SIGKILL)
    for process in ranks:
        process.join()
    return Outcome(seconds, codes, [(folder / f"rank_{rank}.txt").read_text() for rank in range(2)], left)


def members(sessions: set[int | None]) -> list[str]:
    """``<process id> <name>`` of the living processes of these sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may just end
            name, rest = path.read_text().split("(", 1)[1].rsplit(")", 1)
            fields = rest.split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(f"{path.parent.name} {name}")
    return found


def row(name: str, outcome: Outcome) -> str:
    """One line of the table."""
    fault = FAULTS[name]
    codes = ", ".join("hung" if code is None else str(code) for code in outcome.codes)
    told = "<br>".join(sentence.replace("|", "\\|") for sentence in outcome.sentences) or "-"
    return (
        f"| {name} | {fault.place} | {fault.rank} | {outcome.seconds:.1f} | {codes} | {told} | {outcome.tracebacks} | "
        f"{len(outcome.left)} |"
    )


def main(names: Sequence[str]) -> None:
    """Run and print."""
    print("| fault | place | rank | s until all ended | exit codes | told | tracebacks | left processes |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("PLANTED_FAULTS_FOLDER", temporary))
        for name in names or FAULTS:
            print(row(name, strike_down(name, folder / name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
