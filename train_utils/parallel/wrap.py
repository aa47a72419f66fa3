"""Wrap a model so that all ranks train it together; a single rank keeps it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.distributed import stack_over_ranks, sum_over_ranks
from train_utils.loop.interfaces import SumOverRanks
from train_utils.parallel.image_sums import ImageSummed
from train_utils.parallel.reduced_batchnorm import ReducedBatchNorm2d
from train_utils.parallel.sync_batchnorm import GlobalBatchNorm2d, Stack
from train_utils.processes.world import World


def convert_sync_batchnorm(
    model: nn.Module,
    world: World,
    stack: Stack = stack_over_ranks,
    of_torch: bool = False,
    compiled: bool = False,
) -> nn.Module:
    """Change batch norm in place to statistics over all ranks; names and state dict are kept.

    Call it before ``wrap_model``. On CUDA this is ReducedBatchNorm2d, or torch's SyncBatchNorm if
    it shall be that ``of_torch``, else GlobalBatchNorm2d, which calls ``stack`` and cannot be
    ``compiled``; ReducedBatchNorm2d then replaces it. On a CPU a single rank needs it too: the
    statistics of torch's kernel are off by 1e-5 (docs/results/), the network amplifies that, and
    one rank would train another model than two.
    """
    on_cuda = world.device.type == "cuda"
    if on_cuda and world.world_size == 1:
        return model
    if of_torch:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    if type(model) is nn.BatchNorm2d:
        by_sums = on_cuda or compiled
        return ReducedBatchNorm2d(model, sum_over_ranks) if by_sums else GlobalBatchNorm2d(model, stack)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, world, stack, compiled=compiled))
    return model


def wrap_model(
    model: nn.Module, world: World, seed: int | None = None, add: SumOverRanks = sum_over_ranks
) -> nn.Module:
    """Wrap the model so that ranks sync gradients; a single rank keeps the plain model.

    With a ``seed`` on a CPU, gradients have the same bits at any number of ranks (image_sums.py),
    and layers draw their random numbers from it.
    """
    if seed is not None and world.device.type == "cpu":
        return ImageSummed(model, add, seed)
    if world.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # saves one copy of the gradients
    )
    # The constructor made buffers equal; as its argument this would skip that. Synchronised
    # statistics stay equal. Others do not affect training, and those of rank 0 are kept.
    wrapped.broadcast_buffers = False
    return wrapped


def loss_factor(model: nn.Module, world: World) -> int:
    """Factor for a rank's share of the loss before backward, because DDP averages over ranks."""
    return world.world_size if isinstance(model, DistributedDataParallel) else 1


@contextmanager
def gradient_sync(model: nn.Module, last: bool, step: int = 0, indices: Sequence[int] = ()) -> Iterator[None]:
    """Run one micro-batch's forward and backward; sync gradients only for a step's ``last`` one.

    An ImageSummed model draws random numbers from ``step`` and ``indices``, the positions of the
    images in the data set.
    """
    if isinstance(model, ImageSummed):
        model.begin(step, indices)
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    yield
    if isinstance(model, ImageSummed) and last:
        model.finish()
