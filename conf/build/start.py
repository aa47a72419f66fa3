"""What a training starts from: the numerics of the process and the state that training changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from conf.build.checkpoints import describe
from conf.build.report import min_iou_of
from conf.failures import ConfigError
from conf.network import load_network
from conf.resume import resumed_options
from conf.schema import TrainConfig
from data import Annotations, Colour, TrainBatchSampler
from data.anchors import choose_anchors
from models import Darknet, Head
from train_utils.compiled import check_compiling
from train_utils.config import AUTO, OptimConfig, Precision
from train_utils.distributed import World, broadcast_module, broadcast_text, max_over_ranks
from train_utils.numerics import (
    allow_tf32,
    keep_freed_memory,
    seed_everything,
    weights_dtype,
)
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.sync_batchnorm import convert_sync_batchnorm
from train_utils.train_state import TrainState

MANY_TIMES = 10  # the images of a training must weights have seen to be spared: docs/develop/decisions.md


def prepare_numerics(config: TrainConfig, world: World) -> None:
    """Set seeds, determinism, TF32 and cuDNN's benchmark."""
    deterministic, sizes = config.train.deterministic, config.train.multi_scale
    if (mode := config.train.compile.value) != "off":
        check_compiling(mode, world, config.train.rect)
    # The benchmark picks algorithms by speed, and times them anew for each image size.
    benchmark = not (deterministic or config.train.rect or sizes[0] != sizes[1])
    seed_everything(config.train.seed, deterministic, benchmark)
    allow_tf32(config.train.precision is Precision.tf32)
    keep_freed_memory()


def resolve(config: TrainConfig, world: World, saved: dict[str, Any] | None) -> TrainConfig:
    """The options with ``auto`` of ``augment.colour`` replaced; a resumed run's are in ``saved``.

    That is its checkpoint, whose options hold no ``auto``.
    """
    if saved is not None:
        return resumed_options(config, saved)
    augment = config.augment
    if augment.colour == Colour.auto:
        augment = replace(augment, colour=Colour.device if world.device.type == "cuda" else Colour.cpu)
    return replace(config, augment=augment)


def spare_heads(config: TrainConfig, world: World, model: Darknet, images: int) -> tuple[OptimConfig, str | None]:
    """The optimiser's options with lower rates if the weights brought the heads, and what to say.

    The first layers are frozen, too, if ``model.freeze`` is auto. Neither if the weights are known
    to have seen few images, next to the ``images`` that all epochs show. All ranks call this
    together; the weights of rank 0, which all get, decide.
    """
    knows_little = 0 < model.seen < MANY_TIMES * images  # 0: unknown, or resumed, when it is decided
    model.heads_kept = bool(max_over_ranks([model.heads_kept and not knows_little and world.is_main])[0])
    frozen = config.model.frozen_layers(model.heads_kept) if config.model.freeze == AUTO else 0
    if frozen > 0:
        model.freeze(frozen)
    optim, factor, notes = config.optim, config.optim.kept_heads_factor, []
    if model.heads_kept and factor != 1:
        slow = replace(optim, lr=optim.lr * factor, burn_in_bias_lr=optim.burn_in_bias_lr * factor)
        why = f"the heads of the initial weights are kept, so the learning rate is {slow.lr:g} instead of {optim.lr:g}"
        notes, optim = [f"optim.kept_heads_factor={factor:g}: {why}"], slow
    if frozen:
        notes.append(f"model.freeze=auto: the first {frozen} layers stay as they are")
    return optim, "; ".join(notes) or None


def fit_anchors(config: TrainConfig, world: World, train_set: Annotations) -> tuple[TrainConfig, str | None]:
    """Replace ``auto`` of ``model.anchors`` by what rank 0 finds, and say why in one sentence.

    All ranks call this together. Raises ConfigError if the [yolo] sections list different anchors.
    """
    if config.model.anchors != AUTO:
        return config, None
    network = replace(config.model, anchors=None)
    with torch.device("meta"):  # neither memory nor random numbers
        heads = Darknet(load_network(network), len(train_set.names), config.model.width).heads
    if len({head.all_anchors for head in heads}) > 1:
        raise ConfigError("model.anchors=auto needs a .cfg whose [yolo] sections all list the same. fix: leave it out")
    answer = None
    if world.is_main:
        current = np.array(heads[0].all_anchors)
        least = min_iou_of(config)
        found, sentence = choose_anchors(train_set, config.train.image_size, current, _slots(heads), least)
        answer = json.dumps([found.tolist() if found is not None else None, f"model.anchors=auto: {sentence}"])
    anchors, note = json.loads(broadcast_text(answer))
    return replace(config, model=replace(network, anchors=anchors)), note


def _slots(heads: Sequence[Head]) -> list[int]:
    """The anchors that masks select, by mean stride of the heads that use them, then by area."""
    strides: dict[int, list[int]] = {}
    for head in heads:
        for index in head.mask:
            strides.setdefault(index, []).append(head.stride)
    areas = np.array(heads[0].all_anchors).prod(axis=1)
    return sorted(strides, key=lambda index: (np.mean(strides[index]), areas[index]))


def start_state(
    config: TrainConfig,
    world: World,
    model: Darknet,
    train_set: Annotations,
    sampler: TrainBatchSampler,
    schedule: Schedule,
    dtype: torch.dtype | None,
) -> TrainState:
    """The state before the first step, on this rank's device and equal on all ranks.

    ``dtype`` is that of autocast. Optimiser, average and checkpoints hold the plain model; only the
    loop sees the wrapper.
    """
    model = model.to(world.device, weights_dtype(config.train.precision.value)).to(memory_format=torch.channels_last)
    broadcast_module(model)
    if config.train.sync_bn:
        convert_sync_batchnorm(model, world)
    state = TrainState(
        model=model,
        average=WeightAverage(model, schedule),
        optimizer=make_optimizer(model, config.optim),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        description=describe(config, model, train_set),
        seen=model.seen,
    )
    state.loss_sums = state.loss_sums.to(world.device)
    return state
