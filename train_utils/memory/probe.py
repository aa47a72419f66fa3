"""How many images fit into a forward and backward pass: by trial on a GPU, by counting on a CPU.

The passes run on a copy of the network without collectives. So a rank that runs out of memory keeps
no other waiting, and the training's weights, statistics, gradients and random numbers do not
change.
"""

from __future__ import annotations

import bisect
import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from train_utils.loop.interfaces import Loss
from train_utils.memory.out_of_memory import is_out_of_memory
from train_utils.parallel.wrap import convert_sync_batchnorm
from train_utils.processes.world import World

BOXES = 50  # per synthetic image; COCO has a mean of 7, a mosaic up to four times an image's
# Share of a GPU for what torch does not count: NCCL's buffers, cuDNN's handles, other image sizes.
GPU_MARGIN = 0.05
CPU_SHARE = 0.75  # of the available memory; the loader's workers need the rest
# CPU peak = KEPT_FACTOR * bytes that autograd keeps + LARGEST_FACTOR * the largest of its tensors +
# OVERHEAD: gradients and scratch space of several early maps exist at once (docs/results/).
KEPT_FACTOR, LARGEST_FACTOR, OVERHEAD = 1.1, 5, 64 * 2**20


class Probe(Protocol):
    """Finds the bytes that a training needs: more than ``available`` if it does not fit."""

    available: int

    def needed(self, images: int) -> int:
        """Bytes that a step on ``images`` images takes."""
        ...


class Choice(NamedTuple):
    """The chosen number of images, the same on all ranks; 0 if not even one fits."""

    images: int
    needed: int  # bytes of the rank that needs most; for one image if none fits
    available: int  # bytes of the rank that has least


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def largest_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of ascending ``candidates`` that fits, by bisection; 0 if none does."""
    count = bisect.bisect_left(candidates, True, key=lambda candidate: not fits(candidate))
    return candidates[count - 1] if count else 0


def choose_images(candidates: Sequence[int], probe: Probe, max_over_ranks: Callable[[list[int]], list[int]]) -> Choice:
    """The largest of ascending ``candidates`` that fits on every rank.

    All ranks call this together; ``max_over_ranks`` gives the elementwise maximum over ranks.
    """
    own = largest_that_fits(candidates, lambda images: probe.needed(images) <= probe.available)
    images = -max_over_ranks([-own])[0]
    needed, less = max_over_ranks([probe.needed(images or candidates[0]), -probe.available])
    return Choice(images, needed, -less)


class TrainingPass:
    """Passes of a copy of ``model`` and ``loss`` over synthetic square images of ``sides`` pixels.

    The first side is the largest; the others follow because images of another size leave holes in
    the memory. The copy is in train mode on the device of ``world``, in ``dtype`` and
    ``memory_format``; its forward pass uses ``autocast_dtype`` (None: ``dtype``). On a CPU
    ``sync_bn`` gives it synchronised batch norms, which take more memory than torch's, with the
    other ranks simulated.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        sides: Sequence[int],
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
        self._loss, self._sides, self._dtype, self._autocast_dtype = loss, sides, dtype, autocast_dtype

    def forward(self, images: int, side: int | None = None) -> Tensor:
        """The loss of ``images`` images of ``side`` pixels (None: of the first), with its graph."""
        side = side or self._sides[0]
        numbers = torch.arange(images, device=self.device).repeat_interleave(BOXES)
        rows = numbers.new_tensor([0, 0, side / 2, side / 2, side / 2, side / 2], dtype=torch.float32)
        targets = rows.repeat(len(numbers), 1)
        targets[:, 0] = numbers
        pixels = torch.zeros(images, 3, side, side, device=self.device, dtype=self._dtype)
        pixels = pixels.to(memory_format=torch.channels_last)  # like the loader's batches
        with self._own_random_state():
            with torch.autocast(self.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None):
                raw_maps = self.model(pixels)
            return self._loss(
                raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=lambda counts: counts, world_size=1
            ).total

    def __call__(self, images: int) -> None:
        """Run forward and backward for each side, beside the gradients of an earlier pass."""
        try:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            for side in self._sides:
                self.forward(images, side).backward()
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None

    def _own_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


class GpuProbe:
    """Runs real passes on a GPU, with room for optimiser, average, DDP buckets and GPU_MARGIN.

    ``moments``: how many tensors the optimiser keeps for each weight.
    """

    def __init__(self, run: TrainingPass, world_size: int, moments: int = 1) -> None:
        self._run = run
        self.available = torch.cuda.get_device_properties(run.device).total_memory
        copies = moments + (1 if world_size == 1 else 2)
        self._room = copies * run.weights_bytes + int(GPU_MARGIN * self.available)
        self._found: dict[int, int] = {}

    def needed(self, images: int) -> int:
        """The peak of what torch reserves with that room; ``available`` + 1 if memory ran out."""
        if images not in self._found:
            self._found[images] = self._measure(images)
        return self._found[images]

    def _measure(self, images: int) -> int:
        device = self._run.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            self._run_beside_room(images)
            peak = int(torch.cuda.max_memory_reserved(device))  # with the holes between allocations
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            peak = self.available + 1
        # The error is gone here, and with it the frames that held the tensors of the pass.
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
    """Counts what autograd keeps for one image and for two, and extrapolates linearly.

    A CPU raises no error in time: the machine swaps, or the kernel kills the process. ``available``
    is the number of bytes that this process may take; ``moments`` is as in GpuProbe.
    """

    def __init__(self, run: TrainingPass, world_size: int, available: int, moments: int = 1) -> None:
        self.available = available
        # Gradients, optimiser, the average and, once, DDP's new buckets beside the old ones.
        self._kept = (moments + (2 if world_size == 1 else 3)) * run.weights_bytes
        parameters = list(run.model.parameters())
        one = peak_of(saved_bytes(run.forward, 1, parameters))
        self._fixed, self._per_image = 0, one  # from one image only if two cannot fit
        if self.needed(1) <= available:
            self._per_image = peak_of(saved_bytes(run.forward, 2, parameters)) - one
            self._fixed = one - self._per_image

    def needed(self, images: int) -> int:
        """Bytes of a training with ``images`` images in a pass, without the weights."""
        return self._kept + OVERHEAD + self._fixed + images * self._per_image


def peak_of(saved: Sequence[int]) -> int:
    """Peak bytes of a pass on a CPU for which autograd keeps storages of these sizes."""
    return round(KEPT_FACTOR * sum(saved) + LARGEST_FACTOR * max(saved))


def saved_bytes(forward: Callable[[int], Tensor], images: int, parameters: Iterable[Tensor]) -> list[int]:
    """Sizes of the distinct storages that autograd keeps for backward, without ``parameters``'."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(images)
    del loss  # only now: another tensor could reuse a freed storage before all are counted
    return [size for address, size in storages.items() if address not in known]
