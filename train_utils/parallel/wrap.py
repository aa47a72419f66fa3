"""Wrapping a model so that all processes train one model; each function leaves it alone in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train_utils.parallel.image_sums import ImageSummed
from train_utils.parallel.sync_batchnorm import GlobalBatchNorm2d, Stack
from train_utils.parallel.wait_clock import WaitClock
from train_utils.processes.world import World


def convert_sync_batchnorm(model: nn.Module, world: World, stack_over_ranks: Stack) -> nn.Module:
    """The model, changed in place, with batch-norm statistics over all processes: torch's SyncBatchNorm on CUDA, which
    exists there only, else GlobalBatchNorm2d with ``stack_over_ranks``. Names and state dict stay as they are.

    On a CPU this holds for one process, too: torch's own kernel has statistics that are off by 1e-5 there (docs/
    results.md), which the network multiplies, so one process would train another model than two.
    """
    if world.device.type == "cuda" and world.world_size == 1:
        return model
    if world.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    if type(model) is nn.BatchNorm2d:
        return GlobalBatchNorm2d(model, stack_over_ranks)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, world, stack_over_ranks))
    return model


def own_statistics(model: nn.Module) -> set[str]:
    """Names of the buffers that each process measures on its own images: none after ``convert_sync_batchnorm``."""
    return {
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if type(module) is nn.BatchNorm2d and module.training
        for buffer in ("running_mean", "running_var")
    }


def wrap_model(
    model: nn.Module, world: World, seed: int | None, sum_over_ranks: Callable[[Tensor], Tensor]
) -> nn.Module:
    """The model with gradients of all processes. With a ``seed``, on a CPU: the same bits at any number of them."""
    if seed is not None and world.device.type == "cpu":
        return ImageSummed(model, sum_over_ranks, seed)
    if world.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # saves one copy of the gradients
    )
    # Buffers are made equal once, above. Synchronised statistics stay so by themselves; others play no part in
    # training, and those of rank 0 are kept. (As an argument this would also leave out the first time.)
    wrapped.broadcast_buffers = False
    return wrapped


def time_waiting(model: nn.Module, clock: WaitClock) -> None:
    """Have ``clock`` count what a model of ``wrap_model`` waits for other processes in forward and backward passes.

    Whoever runs the backward pass calls ``clock.end`` behind it. Values stay as they are to the last bit.
    """
    if isinstance(model, ImageSummed):
        model.sum_over_ranks = clock.timed(model.sum_over_ranks)
    elif not isinstance(model, DistributedDataParallel):
        return
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm2d):
            module.stack_over_ranks = clock.timed(module.stack_over_ranks)
        elif isinstance(module, nn.SyncBatchNorm):
            _time_layer(module, clock)
    if isinstance(model, DistributedDataParallel):
        # The gradient that comes last is that of the first layer; what is not summed by then has to be waited for.
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(clock.begin)


def _time_layer(layer: nn.Module, clock: WaitClock) -> None:
    """Count both passes of a layer that exchanges something in the middle of its computation."""

    def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        clock.end()
        if output.requires_grad and inputs[0].requires_grad:
            output.register_hook(lambda _: clock.begin())  # its gradient is there: the backward pass of the layer
            inputs[0].register_hook(lambda _: clock.end())

    def before(*_: Any) -> None:
        clock.begin()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``wrap_model``, whose state dict has no ``module.`` in its names."""
    return model.module if isinstance(model, (DistributedDataParallel, ImageSummed)) else model


def loss_factor(model: nn.Module, world: World) -> int:
    """What a rank multiplies its share of the loss by before it calls backward: DDP averages over the ranks."""
    return world.world_size if isinstance(model, DistributedDataParallel) else 1


@contextmanager
def gradient_exchange(model: nn.Module, last: bool, step: int = 0, indices: Sequence[int] = ()) -> Iterator[None]:
    """Context of one micro-batch's forward and backward: gradients travel with the ``last`` one of a step only.

    ``step`` and ``indices`` (positions of the images in the data set) say what an ImageSummed model draws numbers from.
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
