"""From options to the network, loss and suppression, the images of a split, a rank's samples."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch

import data
import models
from conf import ConfigError, compose
from conf.cli import run_files
from conf.schema import CHOICES, DetectConfig, EvaluateConfig, Precision, TrainConfig, TrainSection
from data import Annotations, DataConfig, DataError, ImageSource, TrainDataset, TrainSampler, progress
from data.dataset import AUGMENTATIONS
from data.io import usable_cores
from data.loader import BatchLoader
from data.remote import Fetcher
from models import Darknet, Head, LossConfig, ModelConfig, Postprocess
from models.config import COCO, COCO_NAMES, MIN_DECOUPLED_SCALE, AutoLossConfig
from models.layers import Convolution, SharedConvolution
from train_utils import checkpoint, distributed
from train_utils.distributed import World, torch_distributed_zero_first

MEMORY_FILES = Path("/dev/shm")
MOST_WORKERS = 16  # of a rank, by data.workers=auto; each holds batches that it has made ahead
CPU_WORKERS = 2


def load_network(config: ModelConfig) -> models.Cfg:
    """Parse ``model.cfg``, a file or a name in the zoo, with the bins and anchors of ``config``."""
    cfg = models.load_cfg(config.cfg) if Path(config.cfg).suffix else models.zoo_cfg(config.cfg)
    bins = config.bins()
    cfg = cfg if bins is None else models.with_box_bins(cfg, bins)
    return cfg if config.anchors is None else models.with_anchors(cfg, config.anchors)


def build_meta_model(config: ModelConfig, num_classes: int | None = None) -> Darknet:
    """The network without values, which takes neither memory nor random numbers."""
    with torch.device("meta"):
        return Darknet(load_network(config), num_classes, config.width)


def build_model(
    config: ModelConfig, num_classes: int | None, whole: bool = False, world: World | None = None,
    fitted: bool = False, *, names: Sequence[str] = (),
) -> tuple[Darknet, models.WeightsReport | None]:  # fmt: skip
    """Build a network with its initial weights, and report on those; None if they are random.

    ``num_classes`` None keeps the count of the .cfg. All ranks of ``world`` call this, and one of a
    node fetches published weights. With ``whole``, for everything but training, a layer that would
    stay random is an error. With ``fitted`` anchors (auto.fit_anchors), so are weights with heads:
    they learnt other anchors. The heads of a checkpoint bring their anchors, unless ``config``
    names some. Rows of classes follow the ``names``; in a training with the anchors of the .cfg,
    heads for other ones keep the rest.
    """
    cfg = load_network(config)
    published = config.published()
    # Ranks may have different weights: all wait if one fetches.
    waits = world is not None and distributed.any_rank(published is not None)
    path = Path(config.weights) if config.weights is not None else None
    with torch_distributed_zero_first(world if waits else None):
        path = run_files.fetch_weights(published) if published is not None else path
    state = own_checkpoint(path) if path is not None else None
    if state is not None and config.anchors is None:
        ours = build_meta_model(config, num_classes)
        cfg = models.cfg_with_anchors_of(ours, models.network_of_checkpoint(state["network"], path))
    model = Darknet(cfg, num_classes, config.width)
    model.init_head_biases()
    if path is None:
        if whole:
            raise ConfigError(*run_files.NO_WEIGHTS)
        return model, None
    of_file = data.read_names(COCO_NAMES)[0] if config.weights == COCO else []
    partial = not (whole or fitted or config.anchors)
    classes = models.ClassNames(of_file if state is None else state["names"], names, partial)
    if state is not None:
        report = models.load_weights_of_checkpoint(model, state["ema"], path, state["network"], classes)
        model.seen = state["seen"]
    elif path.suffix in (".pt", ".pth"):
        report = models.load_foreign_state_dict(model, models.read_tensor_file(path), path, classes)
    else:
        report = models.load_darknet_weights(model, path, classes)
    keeps_heads = not report.heads_left_out and (report.cut is None or report.cut >= model.heads[0].parts[-1].layer)
    if keeps_heads and fitted and not report.same_decoding:
        raise ConfigError(f"the heads in {path} were trained with other anchors", "model.anchors=null")
    if keeps_heads and names and state is None and config.weights != COCO:
        report = replace(report, note=f"{report.note}; it names no classes: they are {', '.join(names[:4])}, in order")
    if whole and names and report.heads_left_out and report.num_classes not in (None, len(names)):
        given = f"{len(names)}, {', '.join(names[:4])}"
        fix = "one name in each line, or the data of the weights"
        raise ConfigError(f"{path} has {report.num_classes} classes, but names= or data name {given}", fix)
    if whole and report.other_layer:
        raise ConfigError(f"{path}: {report.other_layer}", "the .cfg of its training, or ckpt= in place of model")
    if whole and not report.is_whole:
        raise ConfigError(f"{report}: this suits training only", "a whole file; data or names= with its classes")
    return model, report


def own_checkpoint(path: Path) -> checkpoint.State | None:
    """The state of a checkpoint of this project, or of a run's best.pt; None for another file."""
    if path.is_dir():
        path = run_files.find_checkpoint(path, "best")
    if path.suffix not in (".pt", ".pth"):
        return None
    content = models.read_tensor_file(path)
    if not (isinstance(content, dict) and content.get("format") == checkpoint.FORMAT):
        return None
    return checkpoint.check_entries(checkpoint.load_checkpoint(path), path)  # which also verifies its digest


def describe_network(model: Darknet, config: ModelConfig) -> checkpoint.State:
    """The network as a checkpoint stores it, for open_checkpoint."""
    cfg = model.cfg
    return {"cfg": cfg.text, "source": cfg.source, "num_classes": model.num_classes, "width": config.width}


def suitable_loss(heads: Sequence[Head], config: LossConfig) -> LossConfig:
    """Instead of ``loss=auto`` the options of the loss that suits the heads, or a ConfigError."""
    if not isinstance(config, AutoLossConfig):
        return config
    name = "yolox" if min(head.scale_x_y for head in heads) >= MIN_DECOUPLED_SCALE else "yolov3"
    schema, options = CHOICES["loss"][name], compose.values_of_choice("loss", name)
    for key, value in compose.to_dictionary(config).items():
        if value is None:
            continue
        if key not in get_type_hints(schema):
            raise ConfigError(f"loss.{key} is not an option of loss={name}, which suits these heads", "leave it out")
        options[key] = value
    chosen: LossConfig = compose.from_dictionary(options | {"name": name}, schema)
    return chosen


def check_batch_norm(model: Darknet, options: TrainSection, world: World) -> None:
    """Raise ConfigError if a training has maps of one value a channel, whose variance is 0."""
    key = "micro_batch_size" if options.micro_batch_size is not None else "batch_size"
    ranks = 1 if options.sync_bn else world.world_size
    if getattr(options, key) > ranks:
        return
    low, high = options.multi_scale
    scale = data.MultiScale(options.image_size, low, high, model.max_stride, options.seed)
    height, width = scale.rectangle(scale.smallest * scale.stride, *scale.shares)
    smallest = scale.stride if options.rect else height, width
    for index, (layer, shape) in enumerate(zip(model.layers, model.shapes, strict=True)):
        convolution = layer.source if isinstance(layer, SharedConvolution) else layer
        has_norm = isinstance(convolution, Convolution) and convolution.norm is not None
        if has_norm and index >= model.num_frozen and math.prod(shape.size(smallest)) == 1:
            raise ConfigError(
                f"batch norm of layer {index} gets one value a channel from an image of {height}x{width} pixels",
                f"train.{key}={2 * ranks}, a larger train.image_size or a smaller range of train.multi_scale",
            )


def build_loss(heads: Sequence[Head], config: LossConfig) -> models.HeadLoss:
    """The loss that ``loss=`` selects."""
    config = suitable_loss(heads, config)
    make = models.LOSSES[config.name]
    return make(heads) if type(config) is LossConfig else make(heads, config)


def check_size(model: Darknet, image_size: int | list[int], key: str) -> None:
    """Raise ConfigError unless the network takes images of this size, the option ``key``."""
    height, width = data.both_sides(image_size)
    fits = model.nearest_size(height, width)
    if fits == (height, width):
        return
    nearest = fits[0] if height == width else f"[{fits[0]},{fits[1]}]"
    problem = "is not the size of the exported file"
    if model.takes_any_size:
        problem = f"is not a multiple of the network's largest stride {model.max_stride}"
    raise ConfigError(f"{key}={image_size} {problem}".replace(", ", ","), f"{key}={nearest}")


def build_postprocess(
    config: DetectConfig | EvaluateConfig,
    model: Darknet,
    classes: Sequence[int] | None = None,
    in_training: bool = False,
) -> Postprocess:
    """What turns raw maps of ``model`` into detections, with the limits of ``config``.

    ``classes`` are the numbers of those that are reported; None: all. Only a training goes on with
    raw maps that are not finite, which its loss shows. Raises ConfigError for limits looser than
    those of an exported file, and for options that need what it has dropped.
    """
    prefix = "evaluate." if isinstance(config, EvaluateConfig) else ""
    limits = getattr(model, "limits", {})
    for key in ("merge_nms",) if prefix else ("merge_nms", "multi_label"):
        if limits and getattr(config, key):
            raise ConfigError(f"{prefix}{key}=true needs detections that the file has dropped", f"{prefix}{key}=false")
    for key, limit in limits.items():
        wanted = getattr(config, key)
        if wanted != (max if key == "confidence" else min)(wanted, limit):
            says = f"{prefix}{key}={wanted} is looser than {limit}, by which the file drops detections"
            raise ConfigError(says, f"{prefix}{key}={limit}, or export it anew")
    options = config.confidence, config.nms_iou, config.max_detections, config.multi_label
    return Postprocess(model.heads, *options, merge=config.merge_nms, classes=classes, refuse_nonfinite=not in_training)


def loader_workers(wanted: int | str, world: World) -> int:
    """Loader processes of this rank; ``auto`` leaves a core of a GPU's rank to the training."""
    if isinstance(wanted, int):
        return wanted
    cores = len(usable_cores()) // (1 if world.launcher == "srun" else world.local_world_size)
    return max(1, min(cores - 1, MOST_WORKERS) if world.device.type == "cuda" else min(cores, CPU_WORKERS))


def open_split(config: DataConfig, split: str, world: World) -> Annotations:
    """Open the index of a split, built by one rank of each node. DataError if the nodes' differ."""
    with torch_distributed_zero_first(world):
        annotations = data.open_annotations(config, split)
    if world.num_nodes > 1:
        own = f"{annotations.names} {annotations.digest()}"
        if distributed.any_rank(own != distributed.broadcast_text(own)):
            raise DataError(f"{config.name}: {split} differs between the nodes", "the same files on all")
    return annotations


def open_splits(config: DataConfig, world: World) -> tuple[Annotations, Annotations]:
    """Open both sets. Raises DataError if their classes differ."""
    train_set, val_set = open_split(config, "train", world), open_split(config, "val", world)
    data.check_same_classes(train_set, val_set)
    return train_set, val_set


def open_images(annotations: Annotations, config: DataConfig, world: World) -> ImageSource:
    """Open the images of a split: files or, with ``data.cache``, images decoded once for all ranks.

    A cache in memory is unlinked once all ranks of the node have it open: nothing is left. A cache
    on a disk stays; of images at an address it has the files.
    """
    images = ImageSource(annotations, config.on_error)
    on_disk = config.cache == data.ImageCache.disk
    index_dir = Path(config.index_dir).absolute()
    if images.is_remote and on_disk:
        folder = index_dir / "fetched"
        folder.mkdir(parents=True, exist_ok=True)
        images.fetcher = Fetcher(folder, config.cache_gb * 1e9 / max(1, annotations.num_bytes))
    images.quiet = not world.is_local_main  # all ranks read the same sample
    with torch_distributed_zero_first(world):
        found = images.read_sample()
    images.quiet = False
    for kind, paths in found.items():
        if paths and world.is_main:
            progress.warn(f"{len(paths)} {kind}, of a few that were read, first: {paths[0]}")
    if config.cache == data.ImageCache.none or (images.is_remote and on_disk):
        return images
    if on_disk:
        path = index_dir / data.image_cache_name(annotations, config.on_error)
    elif MEMORY_FILES.is_dir():
        path = MEMORY_FILES / f"hydra-yolov3-spp-{distributed.broadcast_text(uuid.uuid4().hex)}"
    else:
        raise DataError(f"data.cache=ram needs {MEMORY_FILES}, which this system lacks", "data.cache=disk")
    try:
        with torch_distributed_zero_first(world):
            data.build_image_cache(images, path, config.cache)
            images = ImageSource(annotations, config.on_error, path)
        distributed.any_rank(False)  # all have it open; waits at most for the group's time-out
    finally:
        if world.is_local_main and not on_disk:
            path.unlink(missing_ok=True)
    return images


def describe_left_out(images: ImageSource, what: str) -> str | None:
    """On rank 0 a line on images that ranks left out since the last call; DataError if too many."""
    gathered = distributed.gather_arrays(images.take_left_out())
    if gathered is None:
        return None
    positions = np.unique(np.concatenate(gathered))
    if len(positions) == 0:
        return None
    last = DataError(str(images.annotations.path(positions[-1])), "restore such files, or leave them out of the set")
    return f"{what}: {images.check_left_out(len(positions), last)}"


def to_device(model: Darknet, options: TrainSection, world: World) -> Darknet:
    """Move a network to its device for a training; all ranks get the values of rank 0."""
    dtype = torch.float64 if options.precision is Precision.float64 else torch.float32
    model = model.to(world.device, dtype).to(memory_format=torch.channels_last)
    distributed.broadcast_module(model)
    return model


def build_dataset(config: TrainConfig, train_set: Annotations, images: ImageSource) -> TrainDataset:
    """The augmented training samples, changed by plugins if there are any."""
    seed, epochs = config.train.seed, config.train.epochs
    return TrainDataset(train_set, images, config.augment, seed=seed, epochs=epochs, changes=AUGMENTATIONS)


def build_loader(
    dataset: TrainDataset, batches: data.TrainBatchSampler, config: TrainConfig, world: World
) -> BatchLoader:
    """Load this rank's share of each batch, ahead of the step that needs it."""
    workers, timeout = config.data.workers, config.train.timeout_seconds
    return data.make_loader(dataset, batches, workers, world.device, timeout, batch_bytes=batches.batch_bytes)


def build_sampler(config: TrainConfig, train_set: Annotations, stride: int, world: World) -> TrainSampler:
    """The order of the images for this rank, at sizes that are multiples of ``stride``."""
    options = config.train
    low, high = options.multi_scale
    return TrainSampler(
        len(train_set),
        data.MultiScale(options.image_size, low, high, stride, options.seed),
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
        seed=options.seed,
        factors=data.repeat_factors(train_set, options.repeat_threshold) if options.repeat_threshold else None,
        image_sizes=train_set.sizes if options.rect else None,
        tile_pool=config.augment.tile_pool,
    )
