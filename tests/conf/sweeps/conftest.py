"""What the tests of sweeps share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from conf.sweeps.multirun import SIGNALS


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """A program leaves the handlers of its multirun in place, as it ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.Signals[name] for name in SIGNALS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
