"""Signals that ask for a stop, and what all ranks do about each optimiser step.

A signal, a clock or a bad batch concerns one rank first. If it acted alone, its peers would wait in
a collective. So each step has one small exchange, and all ranks act alike.
"""

import signal
import threading
from typing import Any

import torch
from torch import Tensor

from conf.cli import launch
from train_utils import distributed

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopRequest:
    """``signal`` asked this process to stop; ``agreed`` is what stops all ranks, after ``agree``.

    SLURM sends USR1 and TERM, submitit USR2, a closing terminal HUP (ignored under nohup), Ctrl-C
    INT. The context handles these signals while its body runs, in the main thread; with
    ``term_ends`` TERM only after ``handle_term``. A second Ctrl-C ends the program at once. If the
    signal had a handler before, that one is called after the body: submitit's requeues its job, and
    Python's for Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self, term_ends: bool = False) -> None:
        self._term_ends = term_ends
        self.signal: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_IGN:
                continue
            self._before[number] = before
            if number != signal.SIGTERM or not self._term_ends:
                signal.signal(number, self._handle)
        return self

    def handle_term(self) -> None:
        """Stop at the next step after TERM, too, from when there is something to save.

        Before, TERM ends the process at once, wherever it waits: for peers, or for an index.
        """
        if signal.SIGTERM in self._before:
            signal.signal(signal.SIGTERM, self._handle)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.signal is None:
            return
        # The launcher ends all ranks with TERM after one of them failed and said why.
        is_ended = self.signal == signal.SIGTERM and launch.is_lost_peer(error)
        if is_ended or (kind is None and callable(self._before.get(self.signal))):
            signal.raise_signal(self.signal)

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)

    def votes(self, skip: Tensor, save: bool) -> Tensor:
        """What any rank asks of this step: float64 (3,), on the device of ``skip``.

        Whether any skips it (``skip``, a bool), whether any wants a checkpoint after it (``save``),
        and the number of the signal that stops them, or 0. All ranks call this together.
        """
        votes = skip.new_empty(3, dtype=torch.float64)  # torch.tensor would copy to the device, and wait
        votes[0] = skip
        votes[1] = save
        votes[2] = int(self.signal or 0)
        return distributed.max_over_ranks(votes)

    def agree(self, number: float | None = None) -> None:
        """Set ``agreed`` from the ``number`` in the ``votes`` of all ranks, or by asking them."""
        if number is None:
            number = self.votes(torch.tensor(False), save=False)[2].item()
        self.agreed = signal.Signals(int(number)) if number else None


def ask_for_requeue(world: distributed.World, stopped_by: signal.Signals) -> None:
    """Ask the SLURM job script, through the file it named, to requeue; not after Ctrl-C.

    Call this last, when the checkpoint is on disk: the requeue ends the job.
    """
    path = launch.requeue_file()
    if world.is_main and path is not None and stopped_by != signal.SIGINT:
        path.write_text(f"{stopped_by.name}\n", encoding="utf-8")
