"""Measure how long a rank waits for its peers in the steps of an epoch.

Four places count: the exchange at the end of a step, sums in the loss, batch-norm statistics, and
the part of the gradient sync that outlasts the backward pass. On a CPU these block, so the host's
clock measures them. On CUDA the host only queues work, so pairs of device events enclose the same
places. They are read once per step, as far as the device has come. There a layer of torch's
SyncBatchNorm counts as a whole, with its small computation. Measuring itself never exchanges data
or waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WaitClock:
    """Adds up ``seconds``: as a context its body, with ``begin`` and ``end`` device work."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._cuda = device.type == "cuda"
        self._entered = 0.0
        self._since: float | torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def restart(self) -> None:
        """Reset to 0."""
        self.seconds = 0.0
        self._spans.clear()
        self._since = None

    def __enter__(self) -> WaitClock:
        self._entered = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._entered

    def timed(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Wrap ``function`` so that all of its time counts."""

        def counted(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
            with self:
                return function(*arguments, **named)

        return counted

    def spanning(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Wrap ``function`` so that the device's work in it counts."""

        def counted(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
            self.begin()
            result = function(*arguments, **named)
            self.end()
            return result

        return counted

    def begin(self, *_: object) -> None:
        """Start counting; takes any arguments, so it can serve as a hook."""
        self._since = self._mark()

    def end(self, *_: object) -> None:
        """Stop counting; does nothing without a ``begin``."""
        since, self._since = self._since, None
        if isinstance(since, float):
            self.seconds += time.perf_counter() - since
        elif since is not None:
            now = self._mark()
            assert isinstance(now, torch.cuda.Event)
            self._spans.append((since, now))

    def read_device(self) -> None:
        """Add the time between events that the device has passed; others are left for later."""
        while self._spans and self._spans[0][1].query():
            begin, end = self._spans.pop(0)
            self.seconds += begin.elapsed_time(end) / 1000

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
