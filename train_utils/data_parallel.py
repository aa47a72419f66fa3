"""Wrapping a model so that all processes train one model; each function leaves it alone in a single process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.world import World


def convert_sync_batchnorm(model: nn.Module, world: World) -> tuple[nn.Module, str | None]:
    """The model with batch-norm statistics over all processes, or unchanged and one line that says why.

    To be called before ``wrap_ddp``.
    """
    if world.world_size == 1:
        return model, None
    if world.device.type != "cuda":
        return model, "train.sync_bn: torch has SyncBatchNorm on CUDA only; each process uses its own batch statistics"
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), None


def wrap_ddp(model: nn.Module, world: World) -> nn.Module:
    """The model with gradients averaged over all processes."""
    if world.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # saves one copy of the gradients
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``wrap_ddp``, whose state dict has no ``module.`` in its names."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def no_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Context of one micro-batch's forward and backward: gradients travel with the ``last`` one of a step only."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
