"""The errors of ranks that do not find each other, against real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.runs.process_group import free_port
from train_utils.distributed import init_distributed_mode
from train_utils.errors import DistributedError
from train_utils.launch.environment import read_launch
from train_utils.processes.connect import listen
from train_utils.processes.ending import should_report_error, shutdown

SECONDS = 1.0


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI", "LOCAL_", "GROUP_")):
            monkeypatch.delenv(name)
    yield
    shutdown()


def join(monkeypatch: pytest.MonkeyPatch, rank: int, address: str, port: int) -> tuple[str, float]:
    """The error of ``rank`` of two, and the seconds until it came."""
    values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    started = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        init_distributed_mode("cpu", SECONDS)
    return str(caught.value), time.monotonic() - started


@contextmanager
def program(behaviour: str) -> Iterator[int]:
    """The port of a program that is not a store: it is silent, hangs up, or answers HTTP."""
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                if behaviour == "answers":
                    caller.recv(10)
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                if behaviour != "is silent":
                    caller.close()
                callers.append(caller)

        callers: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["no-such-host.invalid", "no such host", ".", "a" * 300])
def test_a_name_that_does_not_resolve_is_told_at_once(
    rank: int, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said, _ = join(monkeypatch, rank, address, 1)
    assert said.startswith(f"rank {rank} cannot resolve {address}, the host") and "fix: MASTER_ADDR=" in said
    assert should_report_error(), "the others cannot know of it"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_is_waited_for_longer_than_the_time_out(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    said, seconds = join(monkeypatch, rank, "localhost", port)
    assert {
        0: "rank 1 of 2 did not come within 1 s. fix:",
        1: f"rank 1 found no process at localhost:{port} within 1 s (Connection refused). fix:",
    }[rank] in said
    assert SECONDS <= seconds < 2 * SECONDS and should_report_error()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("behaviour", ["is silent", "hangs up", "answers"])
def test_a_port_that_another_program_has(
    rank: int, behaviour: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with program(behaviour) as port:
        said, seconds = join(monkeypatch, rank, "127.0.0.1", port)
    if rank == 0:
        assert said.startswith(
            f"rank 0 cannot open port {port}, the rendezvous of all processes (another program uses it)"
        )
        assert seconds < SECONDS, "nothing is waited for"
    else:
        assert said.startswith(f"rank 1 reached 127.0.0.1:{port}, but what answers there is no store of this training")
        assert seconds < 2 * SECONDS
    assert "fix: MASTER_PORT=" in said and "\n" not in said and should_report_error()
    assert capfd.readouterr().err == "", "no C++ frames"


def test_a_port_that_only_root_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    said, _ = join(monkeypatch, 0, "127.0.0.1", 80)
    assert said.startswith("rank 0 cannot open port 80, the rendezvous of all processes (Permission denied). fix:")


@pytest.mark.parametrize(
    ("numbers", "one_machine", "bound"),
    [
        (["127.0.0.1"], True, "127.0.0.1"),
        (["192.0.2.1", "127.0.0.1"], True, "127.0.0.1"),  # the first is reserved for documentation (RFC 5737)
        (["127.0.0.1"], False, None),
        (["192.0.2.1"], True, None),  # an address behind NAT
    ],
)
def test_where_all_are_on_one_machine_nobody_else_can_reach_the_store(
    numbers: list[str], one_machine: bool, bound: str | None
) -> None:
    with listen(numbers, free_port(), one_machine) as opened:
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        assert opened.getsockname()[0] == (bound or everywhere)


def test_an_error_before_the_processes_meet_is_told_by_the_rank_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not should_report_error()
    with pytest.raises(DistributedError, match="WORLD_SIZE is missing"):
        read_launch({"RANK": "1"})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(DistributedError, match="WORLD_SIZE is missing"):
        init_distributed_mode("cpu", SECONDS)
    assert should_report_error()
