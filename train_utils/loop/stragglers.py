"""What each rank spends an epoch on, and which rank the others wait for."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train_utils.distributed import gather_arrays
from train_utils.run.log import MetricsCsv

COLUMNS = ("epoch", "rank", "node", "seconds", "data", "compute", "wait")  # of ranks.csv; the last three are shares
COSTLY = 0.1  # share of the time that the slowest rank may cost before it is named
ENOUGH_STEPS = 20  # to judge a rank by; in fewer, starting loaders and chance weigh as much
RECORD = np.dtype(
    [("seconds", "f8"), ("data", "f8"), ("wait", "f8"), ("node", "S64"), ("steps", "i8")]
)  # as it travels


class RankTimes(NamedTuple):
    """Seconds of one rank in the steps of one or more epochs."""

    seconds: float  # of all steps
    data: float  # waiting for batches
    wait: float  # waiting for other ranks
    node: str = ""
    steps: int = 0

    def plus(self, other: RankTimes) -> RankTimes:
        """The sum of both."""
        seconds, data, wait = self.seconds + other.seconds, self.data + other.data, self.wait + other.wait
        return RankTimes(seconds, data, wait, self.node, self.steps + other.steps)

    @property
    def compute(self) -> float:
        """Seconds of its own work; 0 if device and host waited for different things at once."""
        return max(0.0, self.seconds - self.data - self.wait)

    @property
    def own(self) -> float:
        """Seconds in which this rank does not wait for others."""
        return self.data + self.compute

    def shares(self) -> dict[str, float]:
        """``data``, ``compute`` and ``wait`` as parts of 1."""
        seconds = max(self.seconds, 1e-9)
        return {"data": self.data / seconds, "compute": self.compute / seconds, "wait": self.wait / seconds}


class Straggler(NamedTuple):
    """The slowest rank."""

    rank: int
    cost: float  # share of the time that a rank as fast as the others would save
    by_data: bool  # waiting for batches costs more than computing


def slowest_rank(times: Sequence[RankTimes]) -> Straggler | None:
    """The rank with the longest own time, compared with the median of the others.

    None for a single rank.
    """
    if len(times) < 2:
        return None
    rank = max(range(len(times)), key=lambda number: times[number].own)
    found, others = times[rank], [other for number, other in enumerate(times) if number != rank]
    more_data = found.data - statistics.median(other.data for other in others)
    more_compute = found.compute - statistics.median(other.compute for other in others)
    cost = (found.own - statistics.median(other.own for other in others)) / max(found.seconds, 1e-9)
    return Straggler(rank, cost, more_data > more_compute)


def straggler_sentence(times: Sequence[RankTimes]) -> str | None:
    """A line that names the slowest rank if it costs more than COSTLY of the time, else None."""
    straggler = slowest_rank(times)
    if straggler is None or straggler.cost <= COSTLY:
        return None
    found = times[straggler.rank]
    others = [other for number, other in enumerate(times) if number != straggler.rank]
    key = "data" if straggler.by_data else "compute"
    usual = statistics.median(other.shares()[key] for other in others)
    doing = "waits for its batches" if straggler.by_data else "computes"
    fix = (
        "look at the disk, the cores and the memory of that node, or set data.workers or data.cache"
        if straggler.by_data
        else "look at the clock, the temperature and other programs on that device and node"
    )
    return (
        f"rank {straggler.rank} on {found.node} is slow and costs {straggler.cost:.0%} of the time, in which others "
        f"wait for it: it {doing} {found.shares()[key]:.0%} of the time, they {usual:.0%}. fix: {fix}"
    )


class RankTable:
    """``ranks.csv``: a row for each rank and epoch; ``say`` gets a line about a straggler.

    Short epochs are judged together until they have ENOUGH_STEPS steps.
    """

    def __init__(self, path: Path, is_main: bool, epochs_done: int, say: Callable[[str | None], None]) -> None:
        self._table, self._say = MetricsCsv(path, COLUMNS, is_main, epochs_done), say
        self._unjudged: list[RankTimes] = []  # of each rank

    def write(self, epoch: int, times: RankTimes) -> None:
        """Collect the times of all ranks, which call this together; rank 0 writes them."""
        gathered = gather_times(times)
        for rank, found in enumerate(gathered):
            shares = {key: round(value, 4) for key, value in found.shares().items()}
            row = {"epoch": epoch, "rank": rank, "node": found.node, "seconds": round(found.seconds, 3)}
            self._table.write(row | shares)
        before = self._unjudged or [RankTimes(0, 0, 0, found.node) for found in gathered]
        self._unjudged = [one.plus(other) for one, other in zip(before, gathered, strict=True)]
        if self._unjudged and self._unjudged[0].steps >= ENOUGH_STEPS:
            self._say(straggler_sentence(self._unjudged))
            self._unjudged = []


def gather_times(times: RankTimes) -> list[RankTimes]:
    """The times of all ranks in rank order, each with the name of its node; [] off rank 0."""
    node = platform.node().encode()[:64]
    record = np.array([(times.seconds, times.data, times.wait, node, times.steps)], RECORD)
    gathered = gather_arrays(record)
    rows = np.concatenate(gathered).tolist() if gathered is not None else []
    return [RankTimes(*row)._replace(node=row[3].decode(errors="replace")) for row in rows]
