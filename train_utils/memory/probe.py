"""How many images fit into one forward and backward pass: found by trying on a GPU, by counting on a CPU.

The passes run on a copy of the network and contain no collective, so a process that runs out of memory keeps no other
waiting, and weights, statistics, gradients and random numbers of the training stay as they are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from train_utils.memory.out_of_memory import is_out_of_memory
from train_utils.parallel.wrap import convert_sync_batchnorm
from train_utils.processes.world import World

BOXES = 50  # of each made-up image; COCO has 7 in the mean, a mosaic up to four times those of an image
# Of a GPU's memory, for what torch does not count: NCCL's buffers, cuDNN's handles, holes between allocations.
GPU_MARGIN = 0.05
# On a CPU: the part of the available memory that a training may take, the loader's workers are beside it.
CPU_SHARE = 0.75
# The peak of a pass on a CPU, from what autograd keeps: so many times that, and so many times the largest tensor of it,
# since gradients and scratch space of a few maps of the first layers are there together (docs/results/), and a bit.
KEPT_FACTOR, LARGEST_FACTOR, OVERHEAD = 1.1, 5, 64 * 2**20


class Probe(Protocol):
    """Finds the bytes that a training needs; larger than ``available`` where that is not enough."""

    available: int

    def needed(self, images: int) -> int: ...


class Choice(NamedTuple):
    """The number of images that was found, the same on all ranks; 0 where not one fits."""

    images: int
    needed: int  # bytes of the rank that needs most, with one image where none fits
    available: int  # bytes of the rank that has least


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def largest_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of ascending ``candidates`` that fits, by bisection: where one fits, all below do. 0 where none."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(candidates[middle]) else (low, middle)
    return candidates[low - 1] if low else 0


def choose_images(candidates: Sequence[int], probe: Probe, max_over_ranks: Callable[[list[int]], list[int]]) -> Choice:
    """The largest of ascending ``candidates`` that fits on every rank; ``max_over_ranks`` gives the largest of each
    value over all ranks, which all call this together."""
    own = largest_that_fits(candidates, lambda images: probe.needed(images) <= probe.available)
    images = -max_over_ranks([-own])[0]
    needed, less = max_over_ranks([probe.needed(images or candidates[0]), -probe.available])
    return Choice(images, needed, -less)


class TrainingPass:
    """Passes of a copy of ``model`` through ``loss`` with made-up square images of ``side`` pixels.

    The copy is in train mode on the device of ``world``, in ``dtype`` and ``memory_format``, its forward pass in
    ``autocast_dtype`` (None: its own). ``sync_bn`` on a CPU gives it the batch norms of synchronised statistics,
    which take more memory than torch's, with as many equal ranks as there are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        side: int,
        world: World,
        dtype: torch.dtype,
        autocast_dtype: torch.dtype | None,
        memory_format: torch.memory_format,
        sync_bn: bool,
    ) -> None:
        self.device = world.device
        self.model = copy.deepcopy(model).to(world.device, dtype).to(memory_format=memory_format).train()
        if sync_bn and world.device.type == "cpu":
            convert_sync_batchnorm(self.model, world, lambda values: values.expand(world.world_size, *values.shape))
        self.weights_bytes: int = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        self._loss, self._side, self._dtype, self._autocast_dtype = loss, side, dtype, autocast_dtype

    def forward(self, images: int) -> Tensor:
        """The loss of so many images, with its graph."""
        side = self._side
        numbers = torch.arange(images, device=self.device).repeat_interleave(BOXES)
        rows = numbers.new_tensor([0, 0, side / 2, side / 2, side / 2, side / 2], dtype=torch.float32)
        targets = rows.repeat(len(numbers), 1)
        targets[:, 0] = numbers
        pixels = torch.zeros(images, 3, side, side, device=self.device, dtype=self._dtype)
        pixels = pixels.to(memory_format=torch.channels_last)  # as the loader's batches are
        with self._own_random_state():
            with torch.autocast(self.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None):
                raw_maps = self.model(pixels)
            total: Tensor = self._loss(raw_maps, targets).total
        return total

    def __call__(self, images: int) -> None:
        """Forward and backward, beside the gradients of an earlier pass."""
        try:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            self.forward(images).backward()
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None

    def _own_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


class GpuProbe:
    """Runs real passes on a GPU, beside room for the momentum, the averaged weights, DDP's buckets and GPU_MARGIN."""

    def __init__(self, run: TrainingPass, world_size: int) -> None:
        self._run = run
        self.available = torch.cuda.get_device_properties(run.device).total_memory
        copies = 2 if world_size == 1 else 3
        self._room = copies * run.weights_bytes + int(GPU_MARGIN * self.available)
        self._found: dict[int, int] = {}

    def needed(self, images: int) -> int:
        """The peak of a pass with that room; one more than ``available`` where it ran out of memory."""
        if images not in self._found:
            self._found[images] = self._measure(images)
        return self._found[images]

    def _measure(self, images: int) -> int:
        device = self._run.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            self._run_beside_room(images)
            peak = int(torch.cuda.max_memory_allocated(device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            peak = self.available + 1
        # Here the error is gone, and with it the frames that held the tensors of the pass.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def _run_beside_room(self, images: int) -> None:
        room = torch.empty(self._room, dtype=torch.uint8, device=self._run.device)
        self._run(images)
        torch.cuda.synchronize(self._run.device)
        del room


class CpuProbe:
    """Counts what autograd keeps of one image and of two, and goes on from there in a straight line.

    A CPU gives no error in time: the machine swaps, or the kernel ends the process. ``available``: bytes that this
    process may take.
    """

    def __init__(self, run: TrainingPass, world_size: int, available: int) -> None:
        self.available = available
        # Gradients, momentum and the average; DDP's buckets are renewed once, beside the old ones.
        self._kept = (3 if world_size == 1 else 4) * run.weights_bytes
        parameters = list(run.model.parameters())
        one = peak_of(saved_bytes(run.forward, 1, parameters))
        self._fixed, self._per_image = 0, one  # with one image only, where two are known to be too many
        if self.needed(1) <= available:
            self._per_image = peak_of(saved_bytes(run.forward, 2, parameters)) - one
            self._fixed = one - self._per_image

    def needed(self, images: int) -> int:
        """Bytes of a training with so many images in a pass, beside the weights."""
        return self._kept + OVERHEAD + self._fixed + images * self._per_image


def peak_of(saved: Sequence[int]) -> int:
    """Bytes at the peak of a pass on a CPU for which autograd keeps storages of these sizes."""
    return round(KEPT_FACTOR * sum(saved) + LARGEST_FACTOR * max(saved))


def saved_bytes(forward: Callable[[int], Tensor], images: int, parameters: Iterable[Tensor]) -> list[int]:
    """Sizes of the distinct storages that autograd keeps for the backward pass, but for those of ``parameters``."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(images)
    del loss  # not before all are counted: a storage that is free could be given to another tensor
    return [size for address, size in storages.items() if address not in known]
