"""Signals that ask for a stop, sent to this process."""

import os
import signal
from contextlib import nullcontext

import pytest

from train_utils.distributed import StopRequest


@pytest.fixture(autouse=True)
def hang_up_ends() -> None:
    """The tests themselves may run under nohup; conftest.py restores the handler."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks_for_a_stop_and_leaves_its_handler_as_it_was(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    interrupts = pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext()
    with interrupts, StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_the_program_around_hears_of_the_signal_when_the_checkpoint_is_written() -> None:
    order: list[str] = []

    def requeue(*_: object) -> None:
        order.append("requeued")
        raise SystemExit(255)

    signal.signal(signal.SIGUSR2, requeue)
    with pytest.raises(SystemExit), StopRequest():
        os.kill(os.getpid(), signal.SIGUSR2)
        order.append("checkpoint")
    assert order == ["checkpoint", "requeued"]
    with pytest.raises(KeyError), StopRequest():
        os.kill(os.getpid(), signal.SIGUSR2)
        raise KeyError("an error of the training is what counts")
    assert order == ["checkpoint", "requeued"]
