"""Find the number of images for ``train.device_batch_size=auto``: the most that memory allows."""

from __future__ import annotations

import math

import torch

from conf.build.batches import training_sizes
from conf.build.loss import make_loss
from conf.schema import TrainConfig
from data import fitting_device_batch_size
from models import Darknet
from train_utils.config import AUTO
from train_utils.distributed import World, barrier, max_over_ranks
from train_utils.errors import TrainError
from train_utils.memory.out_of_memory import available_memory, gib
from train_utils.memory.probe import CPU_SHARE, CpuProbe, GpuProbe, TrainingPass, choose_images, divisors
from train_utils.numerics import weights_dtype

CPU_IMAGES = 16
BYTES_OF_PIXEL = 1100  # that yolov3-spp saves for its backward pass in 16 bits; counted in float32: 892 MB at 640
GPU_SHARE = 0.7  # the rest is for weights, gradients and the work space of operators


def images_of_pass(config: TrainConfig, world: World, dtype: torch.dtype | None) -> int:
    """The number for ``train.max_device_batch_size=auto``: a power of two that all ranks can hold.

    On a GPU it is a rule of thumb, by the activations of yolov3-spp at the largest image size;
    ``train.device_batch_size=auto`` measures. ``dtype`` is that of autocast.
    """
    if world.device.type == "cpu":
        return CPU_IMAGES
    side = config.train.image_size * config.train.multi_scale[1]
    total = torch.cuda.get_device_properties(world.device).total_memory
    fitting = GPU_SHARE * total / (side**2 * BYTES_OF_PIXEL * (1 if dtype is not None else 2))
    exponent = int(math.log2(max(1, fitting)))
    return 1 << -max_over_ranks([-exponent])[0]


def probe_micro_batch(
    config: TrainConfig, model: Darknet, world: World, dtype: torch.dtype | None, saved: int | None
) -> tuple[int | None, str | None]:
    """With ``auto``, the images of one forward pass over all ranks and a line for the log.

    Otherwise ``saved`` and None. ``saved`` is the number of a resumed run; it is kept without
    looking at the memory if the ranks can share it. ``dtype`` is that of autocast. All ranks call
    this together and get the same; ``model`` is unchanged. Raises TrainError if not even one image
    fits, and DataError if the ranks cannot share a step.
    """
    if config.train.device_batch_size != AUTO:
        return saved, None
    images_of_step = config.train.batch_size // world.world_size
    limit = fitting_device_batch_size(config.train.batch_size, world.world_size, images_of_step)
    if saved is not None and saved % world.world_size == 0:
        kept = fitting_device_batch_size(config.train.batch_size, world.world_size, saved // world.world_size)
        return kept * world.world_size, f"train.device_batch_size={AUTO}: {kept} images, as before"
    sizes = training_sizes(config, model.max_stride)
    side, smallest = sizes.largest * sizes.stride, sizes.smallest * sizes.stride
    sides = [side] if side == smallest else [side, smallest, side]
    choice = choose_images(divisors(limit), _probe(config, model, world, dtype, sides), max_over_ranks)
    if world.device.type == "cuda":
        budget = f"the {gib(choice.available)} of a GPU"
    else:
        budget = (
            f"the {gib(choice.available)} that a process may use ({CPU_SHARE:.0%} of what is available, "
            f"{world.local_world_size} process(es) on a node)"
        )
    if choice.images == 0:
        needs = "more than" if world.device.type == "cuda" else f"{gib(choice.needed)} of"
        raise TrainError(
            f"out of memory: a training with 1 x {side} x {side} in a pass (images x height x width) needs {needs} "
            f"{budget}. fix: a smaller train.image_size or train.multi_scale, or a smaller model.width"
        )
    why = "all of a step" if choice.images == limit else "the next larger number does not fit"
    note = (
        f"train.device_batch_size={AUTO}: {choice.images} x {side} x {side} in a pass (images x height x width; {why}) "
        f"need {gib(choice.needed)} of {budget}"
    )
    return choice.images * world.world_size, note


def _probe(
    config: TrainConfig, model: Darknet, world: World, dtype: torch.dtype | None, sides: list[int]
) -> GpuProbe | CpuProbe:
    available = int(CPU_SHARE * available_memory() / world.local_world_size)
    barrier()  # before any process takes memory for its passes
    run = TrainingPass(
        model,
        make_loss(model.heads, config.loss),
        sides,
        world,
        weights_dtype(config.train.precision.value),
        dtype,
        torch.channels_last if config.train.channels_last else torch.contiguous_format,
        bool(config.train.sync_bn),
    )
    if world.device.type == "cuda":
        return GpuProbe(run, world.world_size, config.optim.tensors)
    return CpuProbe(run, world.world_size, available, config.optim.tensors)
