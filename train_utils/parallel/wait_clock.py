"""Measures how long a process waits for the others in the steps of an epoch.

On a CPU an exchange blocks the process, so the clock of the host tells: the exchange at the end of a step, sums in the
loss, statistics of batch norm, and what of the sum of gradients is left when the last gradient is there. On CUDA the
host only queues work. There pairs of events in the queue of the device enclose the same places, and are read once a
step, when the loop has waited for the device anyway; a layer of synchronised batch norm then counts with its own small
computation, which is alike on all ranks. Nothing is exchanged and no device is waited for to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WaitClock:
    """Counts ``seconds``. As a context it counts its body; ``begin`` and ``end`` enclose work of the device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._cuda = device.type == "cuda"
        self._entered = 0.0
        self._since: float | torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def restart(self) -> None:
        """Count from 0."""
        self.seconds = 0.0
        self._spans.clear()
        self._since = None

    def __enter__(self) -> WaitClock:
        self._entered = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._entered

    def timed(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """``function``, with all of its time counted."""

        def counted(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
            with self:
                return function(*arguments, **named)

        return counted

    def begin(self, *_: object) -> None:
        """From here on this process waits; takes whatever a hook is called with."""
        self._since = self._mark()

    def end(self, *_: object) -> None:
        """Up to here; without a ``begin`` before it nothing is counted."""
        since, self._since = self._since, None
        if isinstance(since, float):
            self.seconds += time.perf_counter() - since
        elif since is not None:
            now = self._mark()
            assert isinstance(now, torch.cuda.Event)
            self._spans.append((since, now))

    def read_device(self) -> None:
        """Add what the events tell. To be called when the device has done all that was queued."""
        self.seconds += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        self._spans.clear()

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
