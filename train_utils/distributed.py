"""The ranks of a run: how they meet, who builds first, what they exchange, and how they stop.

In a single process each function does nothing or returns its input. What must answer before torch
is imported is in launch.py.
"""

import itertools
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Signals
from typing import Any, Self

import torch
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor

from conf import DistributedError, first_line
from conf.cli import launch
from data.progress import counted, log

NVIDIA_DEVICE = Path("/dev/nvidiactl")  # there if the kernel knows a GPU, whatever torch can do
PAUSE_SECONDS = 0.1  # between looks at the store
STOP_SIGNALS = (SIGUSR1, SIGUSR2, SIGTERM, SIGHUP, SIGINT)
_groups = itertools.count()  # that this process opened


@dataclass(frozen=True)
class World:
    """Rank and device of this process; ``local``: on the same node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    device: torch.device
    launcher: str  # "torchrun", "srun" or "none"

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this rank prepares data for its node."""
        return self.local_rank == 0


def init_distributed_mode(device: str, timeout_seconds: float) -> World:
    """Find out how this process was launched, choose its device and join its peers.

    ``timeout_seconds`` bounds the wait for peers, here and in each later exchange. Raises
    DistributedError if they are not found, or if a rank has no device of its own.
    """
    place = launch.read_launch()
    log.disabled = place.rank > 0
    chosen, num_nodes = choose_device(device, place.local_rank), 1
    if chosen.type == "cuda":
        if place.launcher == "torchrun" and place.local_rank >= torch.cuda.device_count():
            raise DistributedError(
                f"process {place.local_rank} of this machine finds {counted(torch.cuda.device_count(), 'GPU')}",
                "start one process for each GPU, or device=cpu",
            )
        torch.cuda.set_device(chosen)
        _grow_memory_segments(chosen)
    if place.world_size > 1:
        if not dist.is_initialized():
            _open_group(place, chosen, timeout_seconds)
        counts = torch.tensor([place.local_rank == 0, chosen.type == "cuda"]).long()
        num_nodes, on_gpus = sum_over_ranks(counts).tolist()
        if on_gpus not in (0, place.world_size):
            raise DistributedError(
                f"{on_gpus} of {place.world_size} ranks have a GPU", "device=cpu, or GPUs on all nodes"
            )
    of_node = -(-place.world_size // num_nodes)
    return World(place.rank, place.local_rank, place.world_size, of_node, num_nodes, chosen, place.launcher)


def choose_device(requested: str, local_rank: int | None = None) -> torch.device:
    """The device for the option ``device``; without ``local_rank`` the current one."""
    has_cuda = torch.cuda.is_available()
    if requested == "auto" and not has_cuda and NVIDIA_DEVICE.exists():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            if "driver" in str(error):  # not if CUDA_VISIBLE_DEVICES hides all
                raise DistributedError(
                    f"torch cannot use the GPU of this machine ({first_line(error)})",
                    "a newer driver, or a build of torch for this one; device=cpu does without",
                ) from error
    if requested == "cpu" or (requested == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise DistributedError(
            f"a CUDA device was asked for, but torch {torch.__version__} finds none",
            "device=auto, or look at nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    # Tasks that see only their own GPU (srun --gpus-per-task=1) all number it 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _grow_memory_segments(device: torch.device) -> None:
    """Let CUDA's memory segments grow, since many image sizes leave holes in fixed ones."""
    if sys.platform != "linux" or launch.chose_allocator():
        return
    try:
        # As torch 2.10 to 2.15 name it; the name in torch.cuda.memory warns.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.empty(1, device=device)
    except AttributeError:
        return
    except RuntimeError:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def _open_group(place: launch.Launch, device: torch.device, timeout_seconds: float) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if place.store is not None:
            _wait_for_store(place.store, time.monotonic() + timeout_seconds)
        meeting = dist.rendezvous(place.url, place.rank, place.world_size, timeout=timeout)
        reached, rank, world_size = next(meeting)
        # torchrun's store may hold the keys of dead processes and of an earlier training here.
        store = dist.PrefixStore(f"{place.attempt}/{next(_groups)}", reached)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # With its device NCCL joins its peers here, and not in the first exchange.
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {place.rank} did not meet its peers ({first_line(error)})",
            "look for the first error in the output of all ranks; "
            "MASTER_ADDR and MASTER_PORT say where to meet, "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME=<the interface between the hosts> how",
        ) from error


def _wait_for_store(address: tuple[str, int], until: float) -> None:
    """Wait for the store; torch would wait three times as long, and print its stack."""
    while True:
        try:
            return socket.create_connection(address, max(PAUSE_SECONDS, until - time.monotonic())).close()
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(PAUSE_SECONDS)


@contextmanager
def torch_distributed_zero_first(world: World | None) -> Iterator[None]:
    """Run the body on rank 0, then on the first rank of each other node, then on all others.

    One builds, the others open what it built. They wait on the store, not in a collective with its
    time-out, and none leaves before all builders are done. If one raises, those that wait for it
    raise DistributedError with its sentence.
    """
    if world is None or world.world_size == 1:
        yield
        return
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    section = f"zero_first/{store.add(f'zero_first/entered/{world.rank}', 1)}"  # each rank counts its own

    def wait_for(builders: int) -> None:
        while store.add(f"{section}/done", 0) < builders:
            if store.check([f"{section}/failure"]):
                raise DistributedError(*store.get(f"{section}/failure").decode().rsplit("\n", 1))
            time.sleep(PAUSE_SECONDS)

    wait_for(0 if world.is_main else 1 if world.is_local_main else world.num_nodes)
    try:
        yield
    except BaseException as error:  # Ctrl-C too: peers must not wait for a builder that ends
        launch.claim_error()  # before its peers wake: this rank has the traceback
        sentence = f"{getattr(error, 'sentence', error)} ({type(error).__name__} on rank {world.rank})"
        store.compare_set(f"{section}/failure", "", f"{sentence}\n{getattr(error, 'fix', '')}")
        raise
    if world.is_local_main:
        store.add(f"{section}/done", 1)
    wait_for(world.num_nodes)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` (same shape and dtype everywhere) over all ranks, without autograd."""
    if not dist.is_initialized():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def max_over_ranks(values: Tensor) -> Tensor:
    """The maximum of each value over all ranks, exchanged on the device of ``values``."""
    if not dist.is_initialized():
        return values
    largest = values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def any_rank(value: bool) -> bool:
    """Whether ``value`` is true on any rank; exchanged on the CPU, so a GPU's queue stays full."""
    return bool(max_over_ranks(torch.tensor(value, dtype=torch.uint8)))


def broadcast_text(text: str | None) -> str:
    """The text of rank 0 on every rank; what its peers pass is ignored."""
    texts = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(texts)
    return str(texts[0])


def broadcast_module(module: torch.nn.Module) -> None:
    """Overwrite parameters and buffers with rank 0's."""
    if dist.is_initialized():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def wrap_ddp(model: torch.nn.Module, world: World) -> torch.nn.Module:
    """Wrap the model so that ranks sync gradients; a single rank keeps the plain model."""
    if world.world_size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    # As views of its buckets the gradients exist once.
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    # The constructor made buffers equal; as its argument this would skip that. Synchronised
    # statistics stay equal. Others do not affect training, and those of rank 0 are kept.
    wrapped.broadcast_buffers = False
    return wrapped


def gather_arrays(array: ndarray) -> list[ndarray] | None:
    """The arrays of all ranks in rank order, on rank 0; None elsewhere. Shapes may differ."""
    if not dist.is_initialized():
        return [array]
    gathered = [array] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(array, gathered)
    return gathered


class StopRequest:
    """``signal`` asked this process to stop; ``agreed`` is what stops all ranks, after ``agree``.

    SLURM sends USR1 and TERM, submitit USR2, a closing terminal HUP (ignored under nohup), Ctrl-C
    INT. The context handles these signals in the main thread; with ``term_ends`` TERM only after
    ``handle_term``. A second Ctrl-C ends the program at once. If the signal had a handler before,
    that one is called after the body: submitit's requeues its job, and Python's for Ctrl-C raises
    KeyboardInterrupt.
    """

    def __init__(self, term_ends: bool = False) -> None:
        self._term_ends = term_ends
        self.signal: Signals | None = None
        self.agreed: Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if number == SIGHUP and before == signal.SIG_IGN:
                continue
            self._before[number] = before
            if number != SIGTERM or not self._term_ends:
                signal.signal(number, self._handle)
        return self

    def handle_term(self) -> None:
        """Stop after the step on TERM, too; before, it ends the process wherever it waits."""
        if SIGTERM in self._before:
            signal.signal(SIGTERM, self._handle)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # The launcher ends all ranks with TERM after one of them failed and said why.
        is_ended = self.signal == SIGTERM and launch.is_lost_peer(error)
        if self.signal is None:
            return
        if is_ended or (error is None and callable(self._before.get(self.signal))):
            signal.raise_signal(self.signal)

    def _handle(self, number: int, _: object) -> None:
        if number == SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = self.signal or Signals(number)

    def votes(self, skip: Tensor, save: bool) -> Tensor:
        """Skip, save, signal number or 0, if any rank wants it: float64 (3,), by all together."""
        votes = skip.new_empty(3, dtype=torch.float64)  # torch.tensor would copy to the device, and wait
        votes[0] = skip
        votes[1] = save
        votes[2] = self.signal or 0
        return max_over_ranks(votes)

    def agree(self, number: float | None = None) -> None:
        """Set ``agreed`` from the ``number`` in the ``votes`` of all ranks, or by asking them."""
        if number is None:
            number = self.votes(torch.tensor(False), save=False)[2].item()
        self.agreed = Signals(int(number)) if number else None


def ask_for_requeue(world: World, stopped_by: Signals) -> None:
    """Ask the SLURM job script to requeue, which ends the job; not after Ctrl-C."""
    if world.is_main and stopped_by != SIGINT:
        launch.ask_for_requeue(stopped_by.name)
