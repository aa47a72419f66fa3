"""Start the ranks of this machine on torch's elastic agent, without torchrun.

The ranks run one command, in processes and sessions of their own, so that a signal reaches each
once, from here. A training answers it as ever: it saves, and all ranks end together. Nothing
restarts.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from train_utils.errors import DistributedError
from train_utils.launch.own_ranks import OWN_RUN

HOST = "127.0.0.1"  # a machine may not know its own name
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LOOK_SECONDS = 0.1  # between two looks at the ranks


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run ``python <command>`` as ``count`` ranks; return their exit code, 0 if all succeed.

    It is that of the rank that failed first and said why. If one fails, the others get SIGTERM, and
    SIGKILL 30 s later. Raises DistributedError if signals ended ranks that said nothing, and
    KeyboardInterrupt for a signal before they run.
    """
    silence = logging.getLogger("torch.distributed.elastic")  # the ranks say what there is to say
    silence.propagate, silence.handlers = False, [logging.NullHandler()]
    with tempfile.TemporaryDirectory() as folder:
        meeting = RendezvousParameters("c10d", f"{HOST}:0", f"{OWN_RUN}{uuid.uuid4()}", 1, 1, HOST, is_host=True)
        spec = WorkerSpec(
            role="rank",
            local_world_size=count,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=get_rendezvous_handler(meeting),
            max_restarts=0,
            monitor_interval=LOOK_SECONDS,
            local_addr=HOST,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(folder))
        try:
            with _forwarding(agent):
                result = agent.run()
        except SignalException as stop:  # SIGQUIT
            raise KeyboardInterrupt(stop.sigval) from None
        finally:
            spec.rdzv_handler.shutdown()
        return exit_code(result.failures)


def exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """The exit code for failed ranks, 0 without any.

    Raises KeyboardInterrupt if Ctrl-C ended them, as a second one does, and DistributedError for
    other signals.
    """
    if not failures:
        return 0
    if told := [failure for failure in failures.values() if failure.exitcode > 0]:
        return min(told, key=lambda failure: failure.timestamp).exitcode
    # The agent ends the others by SIGTERM.
    rank = min(failures, key=lambda rank: (failures[rank].exitcode == -signal.SIGTERM, rank))
    number = signal.Signals(-failures[rank].exitcode)
    if number == signal.SIGINT:
        raise KeyboardInterrupt(number)
    memory = ", which the kernel sends when the memory is full" if number == signal.SIGKILL else ""
    raise DistributedError(
        f"rank {rank} was ended by {number.name}{memory}. fix: look at the system's log; resume=<the run folder> "
        "continues a training from its last checkpoint"
    )


@contextmanager
def _forwarding(agent: LocalElasticAgent) -> Iterator[None]:
    """Pass signals on to the ranks, which decide together; the agent's own way kills after 30 s."""

    def forward(number: int, _: FrameType | None) -> None:
        ranks = [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]
        if not ranks:
            raise KeyboardInterrupt(signal.Signals(number))
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
    for number in SIGNALS:
        if before[number] != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
