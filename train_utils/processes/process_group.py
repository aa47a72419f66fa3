"""The process group of a run: opened here or by the caller's program, joined and left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train_utils.errors import DistributedError, SharedError, first_line
from train_utils.launch.devices import choose_device, device_conflict
from train_utils.launch.environment import agent_holds_store, leave_failures_of_nccl, node_name
from train_utils.launch.launch import Launch
from train_utils.launch.nodes import Arrival, Peer, this_machine
from train_utils.processes import store
from train_utils.processes.communicators import CollectiveError, CommunicatorWatch
from train_utils.processes.connect import Deadline, in_time, listen, resolve, wait_for_listener, without_native_output
from train_utils.processes.ending import ending
from train_utils.processes.lost_peers import Lookout, collective_seconds
from train_utils.processes.rendezvous import meet
from train_utils.processes.reporter_lock import ReporterLock
from train_utils.processes.world import World

JOIN_SECONDS = 120.0  # for the rendezvous; torch's 30 minutes only delay the error


@dataclass
class Group:
    """What this rank knows of its process group."""

    store: dist.Store | None = None  # of this start
    cpu: dist.ProcessGroup | None = None  # for CPU tensors; None: the default group takes them

    def of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """The group that takes the tensor; None is the default group.

        For a CPU tensor it raises CollectiveError if an exchange of the devices failed. What the
        device exchanges asks nothing, so that it can be compiled.
        """
        if tensor.device.type != "cpu":
            return None
        if ending.watch is not None:
            ending.watch.check()
        return self.cpu

    def shared_store(self) -> dist.Store:
        """The store of this start."""
        assert self.store is not None
        return self.store

    def enter(self, launch: Launch, device: str, timeout_seconds: float) -> World:
        """Choose the device and join the peers, if there are any."""
        num_nodes, backend = 1, "none"
        if launch.world_size > 1 or dist.is_initialized():
            me, chosen, num_nodes = self.join(launch, device, timeout_seconds)
            backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
        else:
            me = Peer(0, launch.node_rank or 0, node_name(), launch.local_rank or 0, 1)
            chosen, problem = choose_device(device, me)
            if problem is not None:
                raise DistributedError(problem)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
        ending.joining = False
        return World(
            rank=me.rank,
            local_rank=me.local_rank,
            world_size=launch.world_size,
            local_world_size=me.local_world_size,
            node_rank=me.node_rank,
            num_nodes=num_nodes,
            device=chosen,
            launcher=launch.launcher,
            backend=backend,
        )

    def join(self, launch: Launch, device: str, timeout_seconds: float) -> tuple[Peer, torch.device, int]:
        """Meet all ranks and open the group; return this rank, its device and the node count."""
        deadline, seconds = Deadline(min(timeout_seconds, JOIN_SECONDS)), collective_seconds(timeout_seconds)
        reached = _default_store() if dist.is_initialized() else _reach_store(launch, deadline)
        on_node = (launch.local_rank, launch.local_world_size, launch.node_rank)
        arrival = Arrival(launch.rank, launch.world_size, node_name(), this_machine(), *on_node)
        try:
            found = meet(reached, arrival, deadline)
            me = found.peers[launch.rank]
            # After a restart torchrun may hand out the old store, with the keys of dead processes.
            started = dist.PrefixStore(f"start/{found.number}", reached)
            chosen, problem = choose_device(device, me)
            with store.lost_store_as_error():
                problem = problem or device_conflict(started, me, chosen)
            lock = ReporterLock(found.token)
            try:
                num_nodes = store.agree(started, me.rank, launch.world_size, me.local_rank == 0, problem, deadline)
            finally:
                lock.settle()
        except SharedError:
            ending.joining = False
            raise
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        if not dist.is_initialized():
            _open_group(launch, started, chosen, seconds)
            ending.destroy_group = dist.destroy_process_group
        # Some programs open NCCL alone, which cannot exchange CPU tensors.
        takes_cpu = re.search(r"\bcpu:|^(gloo|mpi|ucc)$", dist.get_backend_config()) is not None
        cpu = None if takes_cpu else dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        assert not isinstance(cpu, int)
        self.cpu = cpu
        self.store = dist.PrefixStore("train_utils", started)
        ending.losses = (dist.DistError, CollectiveError)
        ending.lookout = Lookout(
            self.store.clone(), me.rank, found, lock, store_name(launch), not agent_holds_store(), seconds
        )
        if chosen.type == "cuda" and "nccl" in dist.get_backend_config():
            ending.watch = CommunicatorWatch(NcclCommunicators(chosen), ending.lookout)
        return me, chosen, num_nodes


class NcclCommunicators:
    """NCCL's communicators of the default group on ``device``."""

    def __init__(self, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        self._backend: Any = dist.group.WORLD._get_backend(device)

    def failure(self) -> str | None:
        """What NCCL reports, e.g. a collective that took longer than the group's time-out."""
        found = self._backend.get_error().name
        return None if found == "SUCCESS" else f"NCCL reports {found}"

    def abort(self) -> None:
        """Abort them all; later collectives raise torch's DistError."""
        self._backend.abort()


def _open_group(launch: Launch, started: dist.Store, device: torch.device, seconds: float) -> None:
    if device.type == "cuda":
        leave_failures_of_nccl()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=started,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None,  # connect now, while an error is easy to explain
        )
    except RuntimeError as error:
        raise DistributedError(
            f"rank {launch.rank} met its peers through {store_name(launch)}, but cannot connect to them "
            f"({first_line(error)}). fix: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME=<the interface between the hosts>"
        ) from error


def _reach_store(launch: Launch, deadline: Deadline) -> dist.Store:
    """Connect to the rendezvous store: torchrun's own, or one that rank 0 opens."""
    numbers = resolve(launch.address, launch.port, launch.rank, deadline)
    world_size, timeout = launch.world_size, timedelta(seconds=deadline.seconds)
    if launch.rank == 0 and not agent_holds_store():
        opened = listen(numbers, launch.port, one_machine=launch.local_world_size == world_size)
        bound = opened.getsockname()[0]
        here = bound if bound in numbers else "127.0.0.1"
        return dist.TCPStore(
            here, launch.port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=opened.detach()
        )
    wait_for_listener(launch.address, launch.port, launch.rank, deadline)

    def connect() -> dist.Store:
        patience = timedelta(seconds=0.75 * deadline.left())  # so that it gives up before the deadline
        return dist.TCPStore(launch.address, launch.port, world_size, False, patience, wait_for_workers=False)

    try:
        with without_native_output():
            reached = in_time(connect, deadline)
    except (dist.DistError, OSError) as error:
        raise DistributedError(
            f"rank {launch.rank} reached {launch.address}:{launch.port}, but what answers there is no store of this "
            f"training ({first_line(error)}). fix: MASTER_PORT=<a port that is free there>, the same for all processes"
        ) from error
    reached.set_timeout(timeout)
    return reached


def launch_of_group() -> Launch:
    """The launch as given by a group that another program opened; nodes follow from hosts."""
    return Launch("group", dist.get_rank(), dist.get_world_size(), None, None, None, address="", port=0)


def store_name(launch: Launch) -> str:
    """The rendezvous store, for messages."""
    return f"the store at {launch.address}:{launch.port}" if launch.port else "the store of the existing process group"


def _default_store() -> dist.Store:
    assert dist.group.WORLD is not None
    return dist.PrefixStore("hydra_yolov3_spp", dist.group.WORLD.get_group_store())
