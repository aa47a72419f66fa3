"""What a training starts from: its options without ``auto``, and its network."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import models
from conf import CheckpointError, ConfigError, TrainError, compose
from conf.cli.resume import resumed_options
from conf.schema import Precision, TrainConfig
from data import Annotations, Colour
from data.anchors import Sizes, choose_anchors
from data.samplers import TABLE_IMAGES
from models import Darknet
from models.config import AUTO
from train_utils import build, numerics
from train_utils.distributed import World, broadcast_text


def resolve_auto(
    config: TrainConfig, train_set: Annotations, world: World, saved: dict[str, Any] | None
) -> tuple[TrainConfig, Darknet, list[str]]:
    """The options without ``auto``, the network with its initial weights, and lines for the log.

    A resumed run has options and network from its checkpoint ``saved``; the caller loads the
    weights. In a new one they follow from the training set and the initial weights. All ranks call
    this together and get the same. What only becomes known later stays: ``optim.flat_fraction`` is
    for the schedule, which knows the number of steps.
    """
    notes: list[str] = []
    if saved is not None:
        config, of_run = resumed_options(config, saved), saved["network"]  # neither .cfg nor weights are read
        model = models.network_of_checkpoint(of_run, f"resume={config.resume}", saved["model"])
        check_precision_of_run(config, world)
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
                f"{config.train.image_size} makes squares. fix: train.image_size=[{height},{width}]"
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


def check_precision_of_run(config: TrainConfig, world: World) -> None:
    """Raise CheckpointError unless the device has the precision in which a resumed run began."""
    try:
        numerics.autocast_dtype(config.train.precision.value, world.device)
    except TrainError as error:
        lacking = str(error).partition(". fix: ")[0]
        raise CheckpointError(
            f"resume={config.resume}: {lacking}. fix: resume it on such a machine, or start a new run with "
            f"model.weights={config.resume}"
        ) from error


def fit_anchors(config: TrainConfig, world: World, train_set: Annotations) -> tuple[TrainConfig, str]:
    """Replace ``auto`` of ``model.anchors`` by what rank 0 finds, and say why in one sentence.

    All ranks call this together. Raises ConfigError if the [yolo] sections list different anchors.
    """
    without = replace(config.model, anchors=None)
    current, slots = anchors_of(build.build_meta_model(without, len(train_set.names)).heads)
    answer = None
    if world.is_main:
        fitted, sentence = choose_anchors(train_set, config.train.image_size, current, slots, min_iou_of(config))
        answer = json.dumps([fitted.tolist() if fitted is not None else None, f"model.anchors=auto: {sentence}"])
    anchors, note = json.loads(broadcast_text(answer))
    return replace(config, model=replace(without, anchors=anchors)), note


def anchors_of(heads: Sequence[models.Head]) -> tuple[Sizes, list[int]]:
    """The anchors (k, 2) of a .cfg, and the rows that masks select; some .cfg have more.

    The rows are in order of the mean stride of the heads that use them, then of area. Raises
    ConfigError if the [yolo] sections list different anchors.
    """
    if len({head.all_anchors for head in heads}) > 1:
        message = "a fit of anchors needs a .cfg whose [yolo] sections all list the same"
        raise ConfigError(f"{message}. fix: another model, or model.anchors=null")
    strides: dict[int, list[int]] = {}
    for head in heads:
        for index in head.mask:
            strides.setdefault(index, []).append(head.stride)
    anchors = np.array(heads[0].all_anchors)
    return anchors, sorted(strides, key=lambda index: (np.mean(strides[index]), anchors[index].prod()))


def min_iou_of(config: TrainConfig) -> float | None:
    """The overlap that a box needs with an anchor; None where each gets its best."""
    return getattr(config.loss, "anchor_iou", None)


def describe_run(
    config: TrainConfig, requested: TrainConfig, model: Darknet, train_set: Annotations, val_set: Annotations
) -> dict[str, Any]:
    """Everything besides its tensors that makes a checkpoint self-contained.

    Its options of the data are those ``requested``: each machine resolves ``data.workers=auto``.
    """
    return {
        "network": build.describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": compose.to_dictionary(replace(config, data=requested.data)),
        "weights_version": list(models.WEIGHTS_VERSION),
        # The order of images; an older run had a table.
        "data": content_of(train_set) | ({"order": "computed"} if len(train_set) > TABLE_IMAGES else {}),
        "val": content_of(val_set),
    }


def content_of(annotations: Annotations) -> dict[str, Any]:
    """What tells whether a resumed run has the same images and boxes, wherever they lie."""
    return {"images": len(annotations), "boxes": len(annotations.classes), "digest": annotations.digest()}
