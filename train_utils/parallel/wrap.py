"""Wrap a model so that all ranks train it together; a single rank keeps it as it is."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.distributed import World
from train_utils.parallel.reduced_batchnorm import ReducedBatchNorm2d


def convert_sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Change batch norm to statistics over all ranks; names and state dict are kept.

    Call it before ``wrap_model``. On CUDA this is torch's SyncBatchNorm. On a CPU it is
    ReducedBatchNorm2d, for a single rank as well: the statistics of torch's kernel are off by 1e-5
    (docs/results/), the network amplifies that, and one rank would train another model than two.
    """
    if world.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.world_size > 1 else model
        return converted
    if type(model) is nn.BatchNorm2d:
        return ReducedBatchNorm2d(model)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, world))
    return model


def wrap_model(model: nn.Module, world: World) -> nn.Module:
    """Wrap the model so that ranks sync gradients; a single rank keeps the plain model."""
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
