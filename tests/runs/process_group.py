"""Groups of real processes that run a test's function together over gloo, one thread each."""

import multiprocessing
import multiprocessing.context
import os
import queue
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from conf import REPOSITORY

SECONDS = 120


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_context() -> multiprocessing.context.ForkServerContext:
    """A fork server that has imported the project and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    # DDP imports the second, an evaluation the third, and both are slow.
    context.set_forkserver_preload(["train", "torch._dynamo", "torchvision"])
    return context


def write_to(output: str) -> None:
    """Append what this process says to a file."""
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def python(words: Sequence[str], output: str, folder: str = ".", environment: Mapping[str, str] = os.environ) -> Any:
    """Start what ``python <words>`` does, with its output in a file, with everything imported."""
    process = fork_context().Process(target=_python, args=(words, output, folder, {**environment}))
    process.start()
    return process


def _python(words: Sequence[str], output: str, folder: str, environment: dict[str, str]) -> None:
    write_to(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*words]
        runpy.run_path(words[0], run_name="__main__")


def finish_python(words: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The exit code of ``python <words>`` in ``folder``, and all that it says."""
    process, output = python(words, f"{folder}/output", str(folder), environment), folder / "output"
    process.join(240)
    process.kill()
    return process.exitcode, output.read_text()


def processes_in(folder: Path, link: str = "cwd") -> list[int]:
    """The processes that work in or below ``folder`` or, by ``fd/1``, write to a file there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / link).readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


@contextmanager
def no_process_left(folder: Path, link: str = "cwd") -> Iterator[None]:
    """At the end no process of ``folder`` is left, and none after an error either."""
    try:
        yield
        until = time.monotonic() + 10  # loader processes look for their rank every 5 s
        while processes_in(folder, link) and time.monotonic() < until:
            time.sleep(0.1)
        assert not processes_in(folder, link)
    finally:
        for process in processes_in(folder, link):
            os.kill(process, signal.SIGKILL)


def run_group(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run a module's ``function(*arguments)`` on ``world_size`` ranks and return each one's result.

    The environment is that of torchrun, so ``init_distributed_mode`` finds the peers.
    """
    context = fork_context()
    results: multiprocessing.Queue[tuple[int, bool, Any]] = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_run_one, args=(rank, world_size, port, results, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world_size:
            rank, succeeded, result = results.get(timeout=SECONDS)
            assert succeeded, f"rank {rank}: {result}"
            found[rank] = result
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(found)} of {world_size} answered within {SECONDS} s") from None
    finally:
        for process in processes:
            process.join(0 if len(found) < world_size else 10)
            process.kill()
    return [found[rank] for rank in range(world_size)]


def take_place(rank: int, world_size: int, port: int) -> None:
    """Give this process the environment of a rank under torchrun, and one thread."""
    for key in [key for key in os.environ if key.startswith("SLURM")]:
        del os.environ[key]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)


def _run_one(
    rank: int, world_size: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    from conf.cli.launch import shutdown

    take_place(rank, world_size, port)
    try:
        results.put((rank, True, function(*arguments)))
    except Exception:
        results.put((rank, False, traceback.format_exc()))
    shutdown()


def environment_of_one() -> dict[str, str]:
    """The environment without the variables of launchers: for a process that runs alone."""
    launchers = re.compile(r"SLURM_|MASTER_|TORCHELASTIC_|(GROUP_|LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if not launchers.match(name)}


def clean_environment(**more: str) -> dict[str, str]:
    """The same for a program of this repository."""
    return environment_of_one() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | more
