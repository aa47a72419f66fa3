"""What a training starts from: its options without ``auto``, and its network."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

import models
from conf import CheckpointError, ConfigError, TrainError, compose
from conf.cli import launch, resume
from conf.schema import Precision, TrainConfig, TrainSection, is_installed
from data import Annotations, Colour, both_sides
from data.anchors import Sizes, choose_anchors
from data.samplers import TABLE_IMAGES
from models import Darknet
from models.config import AUTO
from train_utils import build, checkpoint, compile, numerics
from train_utils.distributed import World, any_rank, broadcast_text

# yolov3-spp at 640 pixels on an H100, torch 2.11: compiling its 76 convolutions takes 98 s, and an
# image, of 156.7 GFLOPs in the forward pass, then takes .75 ms less (343 and 461 images/s).
COMPILE_SECONDS = 98 / 76  # for each convolution
SAVED_SECONDS = 0.75e-3 / 156.7e9  # for each image and FLOP
# The same network, eager, with train.fused_norm: with 64, 32, 16 images in a micro-batch, 8e7, 4e7
# and 2e7 values in the mean map, a step is 1.34, 1.04 and .75 times as fast.
FUSED_VALUES = 6e7


def choose_mode(options: TrainSection, world: World) -> str:
    """What ``train.compile`` means here: "off", "default" or INPUT_ONLY.

    For ``auto`` it is the one to take if that ``pays_back``. All ranks call this together. Raises
    TrainError for options that cannot go together, or not on this machine.
    """
    mode: str = options.compile
    on_cpu, fused = world.device.type == "cpu", options.fused_norm is True
    if fused and (on_cpu or not can_generate_code()):
        raise TrainError("train.fused_norm=true needs a GPU, Triton and a C++ compiler", "train.fused_norm=false")
    if mode == AUTO:
        if on_cpu or any_rank(not can_generate_code()):
            return "off"
        many_sizes = options.rect or options.multi_scale[0] < options.multi_scale[1]
        return compile.INPUT_ONLY if fused or many_sizes else "default"
    if mode == "off":
        return mode
    if fused:
        raise TrainError(f"train.fused_norm=true replaces kernels that train.compile={mode} makes", "leave one out")
    if options.rect:
        raise TrainError(
            "train.rect=true gives hundreds of image sizes, and train.compile needs minutes for each",
            "train.compile=off or train.rect=false",
        )
    return mode


def pays_back(network: Darknet, image_size: int | Sequence[int], images: int) -> bool:
    """Whether compiling saves twice its time, on all ``images`` of one process, resumed or not."""
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in network.modules())
    saved = images * SAVED_SECONDS * models.count_flops(network, both_sides(image_size))
    return saved >= 2 * COMPILE_SECONDS * convolutions


def fuses_norm(options: TrainSection, world: World, network: Darknet, images: int) -> bool:
    """Whether to use train.fused_norm; ``auto``: where a GPU was faster with ``images`` at once."""
    if options.fused_norm != AUTO:
        return bool(options.fused_norm)
    is_alone = world.device.type != "cpu" and world.world_size == 1 and options.compile in (AUTO, "off")
    if not is_alone or not can_generate_code() or options.precision not in numerics.DTYPES:
        return False
    size = both_sides(options.image_size)
    values = []  # of each map that is normalised
    for layer, shape in zip(network.layers, network.shapes, strict=True):
        if getattr(layer, "norm", None) is not None:
            values.append(shape.channels * math.prod(shape.size(size)))
    return len(values) > 0 and images * sum(values) >= FUSED_VALUES * len(values)


def can_generate_code() -> bool:
    """Whether Triton and a C++ compiler are there, of which torch.compile needs both for a GPU."""
    return is_installed("triton") and launch.compiler() is not None


def resolve_auto(
    config: TrainConfig, train_set: Annotations, world: World, saved: checkpoint.State | None
) -> tuple[TrainConfig, Darknet, list[str]]:
    """The options without ``auto``, the network with its initial weights, and lines for the log.

    A resumed run has options and network from its checkpoint ``saved``; the caller loads the
    weights. All ranks call this together and get the same. ``optim.flat_fraction`` stays: the
    schedule knows the number of steps.
    """
    notes = []
    if saved is not None:
        config, of_run = resume.resumed_options(config, saved), saved["network"]  # neither .cfg nor weights are read
        model = models.network_of_checkpoint(of_run, f"resume={config.resume}", saved["model"])
        try:
            numerics.autocast_dtype(config.train.precision, world.device)
        except TrainError as error:  # the run began on another machine
            fix = f"resume it on such a machine, or start a new run with model.weights={config.resume}"
            raise CheckpointError(f"resume={config.resume}: {error.sentence}", fix) from error
        model.freeze(config.model.frozen_layers())
    else:
        if config.augment.colour == Colour.auto:
            colour = Colour.device if world.device.type == "cuda" else Colour.cpu
            config = replace(config, augment=replace(config.augment, colour=colour))
        fits_anchors = config.model.anchors == AUTO
        if fits_anchors:
            config, note = fit_anchors(config, world, train_set)
            notes.append(note)
        model, report = build.build_model(
            config.model, len(train_set.names), world=world, fitted=fits_anchors, names=train_set.names
        )
        notes.append(str(report or "initial weights: random"))
        model.freeze(config.model.frozen_layers())
        models.check_frozen(model, report)
        size = models.image_size_of(model.cfg) if "width" in model.cfg.net.options else 0
        if isinstance(size, list) and isinstance(config.train.image_size, int):
            height, width = size
            raise ConfigError(
                f"{model.cfg.source} is for images of {width}x{height}, and train.image_size="
                f"{config.train.image_size} makes squares",
                f"train.image_size=[{height},{width}]",
            )
        if model.cfg.text != build.load_network(config.model).text:
            notes.append("the heads keep the anchors of the weights")
        config = replace(config, loss=build.suitable_loss(model.heads, config.loss))
        notes.append(f"loss: {config.loss.name}")
    if config.train.precision is Precision.auto:
        config = replace(config, train=replace(config.train, precision=numerics.common_precision(world.device)))
    notes += filter(None, [models.warn_of_reach(model.heads, config.train.image_size)])
    build.check_batch_norm(model, config.train, world)
    workers = build.loader_workers(config.data.workers, world)
    return replace(config, data=replace(config.data, workers=workers)), model, notes


def fit_anchors(config: TrainConfig, world: World, train_set: Annotations) -> tuple[TrainConfig, str]:
    """Replace ``auto`` of ``model.anchors`` by what rank 0 finds, and say why in one sentence."""
    without = replace(config.model, anchors=None)
    current, slots = anchors_of(build.build_meta_model(without, len(train_set.names)).heads)
    answer = None
    if world.is_main:
        overlap = getattr(config.loss, "anchor_iou", None)
        fitted, sentence = choose_anchors(train_set, config.train.image_size, current, slots, overlap)
        answer = json.dumps([fitted if fitted is None else fitted.tolist(), f"model.anchors=auto: {sentence}"])
    anchors, note = json.loads(broadcast_text(answer))
    return replace(config, model=replace(without, anchors=anchors)), note


def anchors_of(heads: Sequence[models.Head]) -> tuple[Sizes, list[int]]:
    """The anchors (k, 2) of a .cfg, and the rows that masks select, by mean stride, then area.

    Raises ConfigError if the [yolo] sections list different anchors.
    """
    if len({head.all_anchors for head in heads}) > 1:
        message = "a fit of anchors needs a .cfg whose [yolo] sections all list the same"
        raise ConfigError(message, "another model, or model.anchors=null")
    strides: dict[int, list[int]] = {}
    for head in heads:
        for index in head.mask:
            strides.setdefault(index, []).append(head.stride)
    anchors = np.array(heads[0].all_anchors)
    return anchors, sorted(strides, key=lambda index: (np.mean(strides[index]), anchors[index].prod()))


def describe_run(
    config: TrainConfig, requested: TrainConfig, model: Darknet, train_set: Annotations, val_set: Annotations
) -> checkpoint.State:
    """Everything besides its tensors that makes a checkpoint self-contained."""
    return {
        "network": build.describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        # Each machine resolves data.workers=auto.
        "config": compose.to_dictionary(replace(config, data=requested.data)),
        "weights_version": list(models.WEIGHTS_VERSION),
        # The order of images; an older run had a table.
        "data": content_of(train_set) | ({"order": "computed"} if len(train_set) > TABLE_IMAGES else {}),
        "val": content_of(val_set),
    }


def content_of(annotations: Annotations) -> checkpoint.State:
    """What tells whether a resumed run has the same images and boxes, wherever they lie."""
    return {"images": len(annotations), "boxes": len(annotations.classes), "digest": annotations.digest()}
