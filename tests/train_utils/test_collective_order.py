"""Eight ranks issue the same collectives in the same order, whatever each of them has to do.

A group that only pretends to exchange stands for the other seven, so each rank runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import IouKind, LossConfig, YoloLoss
from models.config import Balance, PositivesBy
from tests.models.small_network import small
from tests.train_utils.small_training import CONFIG, Batch, new_state, train_epoch
from train_utils import engine, stop
from train_utils.distributed import World, max_over_ranks, wrap_ddp
from train_utils.optim import Schedule
from train_utils.sync_batchnorm import convert_sync_batchnorm

WORLD_SIZE = 8
BAD = 5  # the rank whose batch breaks the loss
RANKS = (0, 1, 4, BAD)  # one of each kind: even ranks have targets, rank 0 reports
TARGETS = torch.tensor([[0, 1, 20, 20, 10, 12.0]])
LOSS = LossConfig("yolov3", 3.54, 64.3, 37.4, IouKind.giou, 0.2, None, Balance.equal, PositivesBy.shape, None)


class Collectives(TorchDispatchMode):
    """Notes the collectives with the shapes and dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.issued.append((func._schema.name, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))
        return func(*args, **kwargs or {})


@contextmanager
def as_rank(rank: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield World(rank, rank, WORLD_SIZE, WORLD_SIZE, 1, torch.device("cpu"), "torchrun")
    finally:
        dist.destroy_process_group()


def reduced(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The result that DDP wants; the group without peers gives none."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def collectives_of_steps(rank: int, decide: Callable[[bool], None], sync_bn: bool) -> list[Any]:
    """Those of a step of two micro-batches that is made, of one that is skipped, and of checks."""
    with as_rank(rank) as world:
        torch.manual_seed(0)
        model: nn.Module = small().train()
        if sync_bn:
            model = convert_sync_batchnorm(model, world)
        schedule = Schedule(CONFIG, 1, 40)
        wrapped = wrap_ddp(model, world)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(None, lambda _, bucket: reduced(bucket))
        loss = YoloLoss(model.heads, LOSS)
        to_input = (lambda batch: torch.full(batch.images.shape, float("nan"))) if rank == BAD else None

        def passes() -> Iterator[Batch]:
            for skip in (False, True):
                decide(skip)
                for _ in range(2):
                    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
                    yield Batch(images, TARGETS[: rank % 2 == 0], torch.tensor([rank]))

        with Collectives() as collectives:
            state = new_state(model, schedule)
            train_epoch(world, state, passes(), 2, loss, wrapped, to_input=to_input, limit=9)
        return collectives.issued


@pytest.mark.parametrize("sync_bn", [False, True])
def test_ranks_issue_the_same_collectives(monkeypatch: pytest.MonkeyPatch, sync_bn: bool) -> None:
    def decide(skip: bool) -> None:
        """Let each rank hear whether one of them has to skip."""
        for module in (engine, stop):
            monkeypatch.setattr(module, "max_over_ranks", lambda values: [int(skip), *max_over_ranks(values)[1:]])

    issued = {rank: collectives_of_steps(rank, decide, sync_bn) for rank in RANKS}
    assert len(issued[0]) >= 10
    for rank in RANKS:
        assert issued[rank] == issued[0], f"rank {rank}"
