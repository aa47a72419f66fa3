"""The loss of a training: what its options leave to the set and the weights, and making it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from conf.schema import TrainConfig
from data import Annotations
from data.anchors import class_weights, few_large_objects
from models import Darknet, DarknetLoss, Head, LossConfig, LossSection, YoloLoss
from models.config import AUTO, PUBLISHED_LOSS, Balance, PositivesBy
from models.heads import with_scale_x_y
from models.loss import HeadLoss
from train_utils.distributed import World, max_over_ranks

# What auto becomes where the training images hold few large objects. There the published values
# leave classes unlearnt; where objects are smaller this weight costs boxes their place
# (docs/results/notebook.md).
FOR_FEW_LARGE: dict[str, Any] = {
    "classification": 200,
    "balance": Balance.damped,
    "positives_by": PositivesBy.cost,
    "positives": 10,
}
REACH = 2.0  # scale_x_y for these positives: half a cell past the edges
LOSSES: dict[str, Callable[..., HeadLoss]] = {"yolov3": YoloLoss, "darknet": DarknetLoss}  # and those of plugins


def fit_loss(
    config: TrainConfig, world: World, model: Darknet, train_set: Annotations
) -> tuple[TrainConfig, list[str]]:
    """Replace each ``auto`` of ``loss``, and say how in sentences for the log.

    The reach of box centres is set in ``model``, too. All ranks call this together and get the
    same: the weights of rank 0, which all get, decide. The options of a resumed run hold no
    ``auto``.
    """
    kept = bool(max_over_ranks([model.heads_kept and world.is_main])[0])
    reach = min(head.scale_x_y for head in model.heads) if kept else None
    config, note = suit_loss(config, train_set, reach)
    if config.model.scale_x_y is not None:
        model.cfg = with_scale_x_y(model.cfg, config.model.scale_x_y)
        model.heads = [replace(head, scale_x_y=config.model.scale_x_y) for head in model.heads]
    config, weights_note = weigh_classes(config, train_set)
    make_loss(model.heads, config.loss)  # refuses what does not suit, while there is no run folder
    return config, [line for line in (note, weights_note) if line is not None]


def suit_loss(
    config: TrainConfig, train_set: Annotations, kept_reach: float | None = None
) -> tuple[TrainConfig, str | None]:
    """Replace each ``auto`` of ``loss=yolov3``, and say so if it is not the published value.

    ``kept_reach`` is the scale_x_y of heads that the weights brought. Such heads stand for boxes,
    so they keep it, and an object its cell if it is less than REACH.
    """
    loss, model = config.loss, config.model
    few_large = few_large_objects(train_set)
    if not isinstance(loss, LossConfig):
        return config, None
    keys, changes = [key for key in ("classification", "balance") if getattr(loss, key) == AUTO], []
    if loss.positives_by == PositivesBy.auto:
        may_reach = kept_reach is None or kept_reach >= REACH
        if few_large and loss.positives is None and may_reach:
            keys += ["positives_by", "positives"]
            if model.scale_x_y is None and kept_reach is None:
                model, changes = replace(model, scale_x_y=REACH), [f"model.scale_x_y={REACH:g}"]
        else:
            loss = replace(loss, positives_by=loss.ranked_by)
    values = {key: (FOR_FEW_LARGE if few_large else PUBLISHED_LOSS)[key] for key in keys}
    text = " ".join([f"loss.{key}={value}" for key, value in values.items()] + changes)
    note = f"auto chose {text} instead of the published values, because {few_large}" if few_large and text else None
    return replace(config, model=model, loss=replace(loss, **values)), note


def weigh_classes(config: TrainConfig, train_set: Annotations) -> tuple[TrainConfig, str | None]:
    """Replace ``auto`` of ``loss.class_weights`` by numbers, and tell the least and the largest."""
    loss, names = config.loss, train_set.names
    if not isinstance(loss, LossConfig) or loss.class_weights != AUTO:
        return config, None
    weights = class_weights(train_set)
    low, high = (f"{value:g} for {names[weights.index(value)]}" for value in (min(weights), max(weights)))
    note = f"loss.class_weights=auto: from {low} to {high}"
    return replace(config, loss=replace(loss, class_weights=weights)), note


def make_loss(heads: Sequence[Head], config: LossSection) -> HeadLoss:
    """The loss that ``loss=`` selects."""
    make = LOSSES[config.name]
    return make(heads, config) if isinstance(config, LossConfig) else make(heads)
