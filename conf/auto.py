"""What a training starts from: its options without ``auto``, and its network."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

import models
from conf import ConfigError, build, entry
from conf.saved import resumed_options
from conf.schema import TrainConfig
from data import Annotations, Colour
from data.anchors import choose_anchors, class_weights, few_large_objects
from models.config import AUTO, PUBLISHED_LOSS, Balance, LossConfig, PositivesBy
from train_utils.distributed import World, broadcast_text

# What auto becomes where the training images hold few large objects. There the published values
# leave classes unlearnt; where objects are smaller this weight costs boxes their place
# (docs/results/notebook.md).
FOR_FEW_LARGE: dict[str, Any] = {"classification": 200, "balance": Balance.damped}
POSITIVES_FOR_FEW_LARGE: dict[str, Any] = {"positives_by": PositivesBy.cost, "positives": 10}
REACH = 2.0  # scale_x_y for these positives: half a cell past the edges


def resolve_auto(
    config: TrainConfig, train_set: Annotations, world: World, saved: dict[str, Any] | None
) -> tuple[TrainConfig, models.Darknet, list[str]]:
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
    else:
        if config.augment.colour == Colour.auto:
            colour = Colour.device if world.device.type == "cuda" else Colour.cpu
            config = replace(config, augment=replace(config.augment, colour=colour))
        fits_anchors = config.model.anchors == AUTO
        if fits_anchors:
            config, note = fit_anchors(config, world, train_set)
            notes.append(note)
        model, report = build.build_model(config.model, len(train_set.names), world=world, fitted=fits_anchors)
        notes.append(str(report or "initial weights: random"))
        if model.cfg.text != build.load_network(config.model).text:
            notes.append("the heads keep anchors and scale_x_y of the weights")
        keeps_heads = report is not None and report.is_whole
        reach = min(head.scale_x_y for head in model.heads) if keeps_heads else None
        config, loss_notes = choose_loss(config, train_set, reach)
        notes += loss_notes
        if config.model.scale_x_y is not None:
            model.cfg = models.with_scale_x_y(model.cfg, config.model.scale_x_y)
            model.heads = [replace(head, scale_x_y=config.model.scale_x_y) for head in model.heads]
    model.freeze(config.model.frozen_layers())
    workers = build.loader_workers(config.data.workers, world)
    return replace(config, data=replace(config.data, workers=workers)), model, notes


def fit_anchors(config: TrainConfig, world: World, train_set: Annotations) -> tuple[TrainConfig, str]:
    """Replace ``auto`` of ``model.anchors`` by what rank 0 finds, and say why in one sentence.

    All ranks call this together. Raises ConfigError if the [yolo] sections list different anchors.
    """
    without = replace(config.model, anchors=None)
    heads = build.build_meta_model(without, len(train_set.names)).heads
    if len({head.all_anchors for head in heads}) > 1:
        raise ConfigError("model.anchors=auto needs a .cfg whose [yolo] sections all list the same. fix: leave it out")
    answer = None
    if world.is_main:
        # The anchors that masks select, by mean stride of the heads that use them, then by area.
        strides: dict[int, list[int]] = {}
        for head in heads:
            for index in head.mask:
                strides.setdefault(index, []).append(head.stride)
        current = np.array(heads[0].all_anchors)
        slots = sorted(strides, key=lambda index: (np.mean(strides[index]), current[index].prod()))
        fitted, sentence = choose_anchors(train_set, config.train.image_size, current, slots, min_iou_of(config))
        answer = json.dumps([fitted.tolist() if fitted is not None else None, f"model.anchors=auto: {sentence}"])
    anchors, note = json.loads(broadcast_text(answer))
    return replace(config, model=replace(without, anchors=anchors)), note


def min_iou_of(config: TrainConfig) -> float | None:
    """The overlap that a box needs with an anchor; None where each gets its best."""
    loss = config.loss
    return loss.anchor_iou if isinstance(loss, LossConfig) and loss.positives is None else None


def choose_loss(
    config: TrainConfig, train_set: Annotations, heads_reach: float | None = None
) -> tuple[TrainConfig, list[str]]:
    """Replace each ``auto`` of ``loss=yolov3``, and say where it is not the published value.

    ``heads_reach`` is the scale_x_y of heads that the weights brought. Such heads stand for boxes,
    so they keep it, and an object its cell if it is less than REACH.
    """
    loss, model, names = config.loss, config.model, train_set.names
    if not isinstance(loss, LossConfig):
        return config, []
    few_large, notes, changes = few_large_objects(train_set), list[str](), list[str]()
    values: dict[str, Any] = {}
    for key in ("classification", "balance"):
        if getattr(loss, key) == AUTO:
            values[key] = (FOR_FEW_LARGE if few_large else PUBLISHED_LOSS)[key]
    if loss.positives_by == PositivesBy.auto:
        may_reach = heads_reach is None or heads_reach >= REACH
        if few_large and loss.positives is None and may_reach:
            values |= POSITIVES_FOR_FEW_LARGE
            if model.scale_x_y is None and heads_reach is None:
                model, changes = replace(model, scale_x_y=REACH), [f"model.scale_x_y={REACH:g}"]
        else:
            loss = replace(loss, positives_by=loss.ranked_by)
    text = " ".join([f"loss.{key}={value}" for key, value in values.items()] + changes)
    if few_large and text:
        notes.append(f"auto chose {text} instead of the published values, because {few_large}")
    if loss.class_weights == AUTO:
        weights = values["class_weights"] = class_weights(train_set)
        low, high = (f"{value:g} for {names[weights.index(value)]}" for value in (min(weights), max(weights)))
        notes.append(f"loss.class_weights=auto: from {low} to {high}")
    return replace(config, model=model, loss=replace(loss, **values)), notes


def describe_run(
    config: TrainConfig, given: TrainConfig, model: models.Darknet, train_set: Annotations
) -> dict[str, Any]:
    """Everything that a checkpoint needs, besides its values, to be used on its own.

    Options of the data are those ``given``: ``data.workers=auto`` is for each machine to resolve.
    """
    return {
        "network": build.describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": entry.to_dictionary(replace(config, data=given.data)),
        "weights_version": list(models.WEIGHTS_VERSION),
        "data": {"images": len(train_set), "boxes": len(train_set.classes), "digest": train_set.digest()},
    }
