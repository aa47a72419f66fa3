"""Train for hours on two ranks with evaluations, and watch memory, open files and threads.

    python -m tests.runs.soak [minutes=120] [processes=2] [folder=<for the run and its table>]

Each minute adds a row to soak.csv for each rank, and one for all its loader workers together. At
the end a line for each compares the mean of the second tenth of the time with that of the last
tenth and gives the slope between them.
"""

from __future__ import annotations

import csv
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.runs.kill_resume import finish, start

FIELDS = ("minute", "rank", "step", "megabytes", "files", "threads", "workers", "worker_megabytes")
WATCHED = ("megabytes", "files", "threads", "workers", "worker_megabytes")
OPTIONS = (
    "train.epochs=1000000", "evaluate.every=1", "train.save_every_steps=7", "train.timeout_seconds=600",
    "optim.lr=0.0001",
)  # fmt: skip


def memory(process: int) -> float:
    """MB that a process does not share with others; 0 if it has ended."""
    try:
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) / 1024


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def look(process: int) -> dict[str, float]:
    """What a training process holds now."""
    workers = children(process)
    return {
        "megabytes": memory(process),
        "files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": len(os.listdir(f"/proc/{process}/task")),
        "workers": len(workers),
        "worker_megabytes": sum(map(memory, workers)),
    }


def last_step(run: Path) -> int:
    """The step of the last row of the run's table; 0 before there is one."""
    table = run / "metrics.csv"
    rows = list(csv.DictReader(table.open(newline=""))) if table.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def soak(folder: Path, minutes: int, processes: int) -> list[dict[str, float]]:
    """Write the rows of the table as they come and return them; finally stop the training."""
    run, rows = folder / "run", []
    ranks = start(run, processes, *OPTIONS)
    with (folder / "soak.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        for minute in range(1, minutes + 1):
            time.sleep(60)
            for rank, process in enumerate(ranks):
                assert process.is_alive(), Path(f"{run}.txt").read_text()[-3000:]
                rows.append({"minute": minute, "rank": rank, "step": last_step(run), **look(process.pid)})
                table.writerow(rows[-1])
            file.flush()
    os.kill(ranks[-1].pid, signal.SIGTERM)
    assert finish(ranks, 120), Path(f"{run}.txt").read_text()[-3000:]
    return rows


def main(arguments: list[str]) -> None:
    """Run and print."""
    values = {"minutes": "120", "processes": "2"} | dict(a.split("=", 1) for a in arguments)
    minutes, processes = int(values["minutes"]), int(values["processes"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(values.get("folder", temporary))
        folder.mkdir(parents=True, exist_ok=True)
        rows = soak(folder, minutes, processes)
    tenth = max(1, minutes // 10)
    for rank in range(processes):
        mine = [row for row in rows if row["rank"] == rank]
        for field in WATCHED:
            early = statistics.mean(row[field] for row in mine[tenth : 2 * tenth])
            late = statistics.mean(row[field] for row in mine[-tenth:])
            slope = (late - early) / max(1, minutes - 2 * tenth)
            print(f"rank {rank} {field}: {early:.1f} -> {late:.1f}, {slope:+.3f} a minute")
    print(f"{rows[-1]['step']:.0f} steps in {minutes} minutes")


if __name__ == "__main__":
    main(sys.argv[1:])
