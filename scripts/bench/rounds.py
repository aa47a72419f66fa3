"""Fair comparisons: contenders take turns in each round, and ratios are those of their medians."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")


def take_turns(contenders: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """What each contender returned in each round, by name; progress goes to stderr."""
    found: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, run in contenders.items():
            print(f"round {number}/{rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(run())
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's rounds."""
    return {name: median(values) for name, values in found.items()}


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function in a process of its own: nothing imported, no memory in use."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its process may have children
        return pool.submit(function, *arguments).result()


def seconds_of(function: Callable[..., object], *arguments: object) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
