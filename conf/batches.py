"""From options to data: the splits, their images, and the training samples of each rank."""

import uuid
from pathlib import Path

import numpy as np

import data
from conf.schema import TrainConfig
from data import Annotations, DataConfig, ImageSource
from data.dataset import AUGMENTATIONS
from data.files import usable_cores
from train_utils.config import AUTO
from train_utils.distributed import World, barrier, broadcast_text, gather_arrays, torch_distributed_zero_first

MEMORY_FILES = Path("/dev/shm")
MOST_WORKERS = 16  # of a rank, by data.workers=auto; each holds batches that it has made ahead
CPU_WORKERS = 2


def loader_workers(wanted: int | str, world: World) -> int:
    """Loader processes of this rank for ``data.workers``.

    ``auto`` shares the cores among the ranks of the node, which srun has done, and leaves one of a
    GPU's rank to the training process. Training on a CPU is slow enough for two to feed it.
    """
    if wanted != AUTO:
        return int(wanted)
    cores = max(1, len(usable_cores()) // (1 if world.launcher == "srun" else world.local_world_size))
    return max(1, min(cores - 1, MOST_WORKERS) if world.device.type == "cuda" else min(cores, CPU_WORKERS))


def open_split(config: DataConfig, split: str, world: World) -> Annotations:
    """Open the index of a split; if it is missing, one rank of a node builds it for all."""
    with torch_distributed_zero_first(world):
        return data.open_annotations(config, split)


def open_images(annotations: Annotations, config: DataConfig, world: World) -> ImageSource:
    """Open the images of a split: files or, with ``data.cache``, images decoded once for all ranks.

    A cache in memory is a file that only this run knows. It is unlinked once all ranks of the node
    have it open, so nothing is left however the run ends. A cache on a disk stays for the next run.
    """
    images = ImageSource(annotations, config.on_error)
    with torch_distributed_zero_first(world):
        images.read_sample()
    if config.cache == data.ImageCache.none:
        return images
    on_disk = config.cache == data.ImageCache.disk
    if on_disk:
        path = Path(config.index_dir).absolute() / data.image_cache_name(annotations, config.on_error)
    elif MEMORY_FILES.is_dir():
        path = MEMORY_FILES / f"hydra-yolov3-spp-{broadcast_text(uuid.uuid4().hex)}"
    else:
        raise data.DataError(f"data.cache=ram needs {MEMORY_FILES}, which this system lacks. fix: data.cache=disk")
    try:
        with torch_distributed_zero_first(world):
            data.build_image_cache(images, path, config.cache)
            images = ImageSource(annotations, config.on_error, path)
        barrier()
    finally:
        if world.is_local_main and not on_disk:
            path.unlink(missing_ok=True)
    return images


def describe_left_out(images: ImageSource, what: str) -> str | None:
    """On rank 0 a line on the images that ranks left out since the last call; all ranks call this.

    Raises DataError if they are too many.
    """
    gathered = gather_arrays(images.take_left_out())
    if gathered is None or not len(positions := np.unique(np.concatenate(gathered))):
        return None
    last = f"{images.annotations.path(positions[-1])}. fix: restore such files, or take them out of the annotations"
    return f"{what}: {images.check_left_out(len(positions), last)}"


def build_dataset(config: TrainConfig, train_set: Annotations, images: ImageSource) -> data.TrainDataset:
    """The augmented training samples, changed by plugins if there are any."""
    return data.TrainDataset(train_set, config.augment, config.train.seed, config.train.epochs, images, AUGMENTATIONS)


def build_sampler(config: TrainConfig, train_set: Annotations, stride: int, world: World) -> data.TrainBatchSampler:
    """Choose this rank's images of each step: the global batch is formed first, then dealt.

    Image sizes are multiples of the network's largest ``stride``.
    """
    options = config.train
    low, high = options.multi_scale
    return data.TrainBatchSampler(
        num_images=len(train_set),
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        world_size=world.world_size,
        rank=world.rank,
        seed=options.seed,
        sizes=data.MultiScale(options.image_size, low, high, stride, options.seed),
        factors=data.repeat_factors(train_set, options.repeat_threshold) if options.repeat_threshold else None,
        image_sizes=train_set.sizes if options.rect else None,
        tile_pool=config.augment.tile_pool,
    )
