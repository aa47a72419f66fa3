"""What a checkpoint says about its training, and the extension of a finished run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conf.entry import to_dictionary
from conf.failures import ConfigError
from conf.network import describe_network
from conf.schema import TrainConfig
from data import Annotations
from models import WEIGHTS_VERSION, Darknet
from train_utils.optim import Schedule


def describe(config: TrainConfig, model: Darknet, train_set: Annotations) -> dict[str, Any]:
    """Everything that a checkpoint needs, besides its values, to be used on its own."""
    return {
        "network": describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": to_dictionary(config),
        "weights_version": list(WEIGHTS_VERSION),
        "heads_kept": model.heads_kept,
        "data": {"images": len(train_set), "boxes": len(train_set.classes), "digest": train_set.digest()},
    }


def extend_run(config: TrainConfig, saved: dict[str, Any] | None) -> TrainConfig:
    """With ``extend``, the options of the longer run; ``saved`` is the checkpoint it goes on from.

    If this extension was interrupted, it goes on: a requeued job repeats its command. Raises
    ConfigError if the run is not finished.
    """
    more, done = config.extend, saved["epoch"] if saved is not None else 0
    if more is None:
        return config
    planned, ends = config.train.epochs, config.train.extended_after
    if done < planned and [planned - more] != ends[-1:]:
        raise ConfigError(
            f"extend={more} is for a finished run, and the last checkpoint of {config.resume} is of epoch {done} of "
            f"{planned}. fix: leave extend out to finish it (train.patience=0 if that ended it)"
        )
    if done == planned:
        planned, ends = planned + more, [*ends, planned]
    return replace(config, extend=None, train=replace(config.train, epochs=planned, extended_after=ends))


def tell_extension(config: TrainConfig, schedule: Schedule, saved: dict[str, Any] | None) -> str | None:
    """A line about the rates of the extension that begins after the checkpoint, if one does."""
    if saved is None or saved["epoch"] not in config.train.extended_after[-1:]:
        return None
    step, epochs = schedule.ends[-1], config.train.epochs
    join = schedule.join_steps(step, schedule.total_steps)
    at = (step - 1, step + join - 1, schedule.total_steps - 1)
    low, joined, last = (f"{schedule.config.lr * schedule.lr_factor(each):.3g}" for each in at)
    return (
        f"extends the run from epoch {config.train.extended_after[-1]} to {epochs}: learning rate from {low}, where it "
        f"ended, to {joined} in {join} steps, then as in a training of {epochs} epochs to {last}"
    )
