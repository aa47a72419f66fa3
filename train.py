"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch --gpus-per-node=4 scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from conf.build.agreement import check_agreement
from conf.build.batches import make_sampler, make_train_loader, open_split
from conf.build.device_batch import probed_micro_batch
from conf.build.evaluator import Evaluator
from conf.build.network import build_model, build_resumed_model, describe, make_loss
from conf.build.report import announce, save_config, tell_places
from conf.build.training import Training
from conf.entry import layered, run
from conf.resume import continue_run
from conf.schema import AUTO, TrainConfig
from data import Annotations, TrainBatchSampler, TrainDataset, check_same_classes
from models import Darknet
from train_utils.distributed import (
    World,
    broadcast_module,
    convert_sync_batchnorm,
    init_distributed_mode,
    wrap_model,
)
from train_utils.launch.environment import fix_cublas_workspace
from train_utils.loop.stop_and_save import StopRequest
from train_utils.loop.train_epoch import rehearse
from train_utils.numerics import (
    autocast_dtype,
    check_same_bits,
    choose_benchmark,
    keep_freed_memory,
    seed_everything,
    weights_dtype,
)
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.pictures.plots import draw_targets
from train_utils.run.log import RunLog, log_warnings
from train_utils.run.run_folder import on_main, open_run_folder
from train_utils.run.run_state import RunState, continue_from


def train(config: TrainConfig) -> dict[str, float]:
    """Train as configured; the best epoch's figures on the first process, {} on the others."""
    with StopRequest() as stop, warnings.catch_warnings(), ExitStack() as stack:
        return train_until(config, stop, stack)


def train_until(config: TrainConfig, stop: StopRequest, stack: ExitStack) -> dict[str, float]:
    """``train`` until it is over or a stop is requested; ``stack`` holds the run folder."""
    if config.train.deterministic:
        fix_cublas_workspace()
    world = init_distributed_mode(config.train.device.value, config.train.timeout_seconds)
    note = prepare_numerics(config, world)
    dtype = autocast_dtype(config.train.precision.value, world.device)

    # Data and network: all that can be wrong with them shows before a run folder is made. One that
    # is there is claimed before its checkpoint is read: else it might not be the last one.
    opening = open_run_folder(world, config.name, config.run_dir, config.resume)
    folder = stack.enter_context(opening) if config.resume is not None and not config.dry_run else None
    saved, saved_note = continue_from(config.resume)
    train_set, val_set = open_split(config.data, "train", world), open_split(config.data, "val", world)
    check_same_classes(train_set, val_set)
    check_agreement(world, config, saved, train_set, val_set)
    weights_note: str | None
    if saved is None:
        micro_batch = None
        model, weights_note = build_model(config.model, len(train_set.names))
    else:
        micro_batch = saved.get("micro_batch")
        model, weights_note = build_resumed_model(config.model, len(train_set.names), saved)
    micro_batch, batch_note = probed_micro_batch(config, model, world, dtype, micro_batch)
    if config.dry_run:
        tell_places(
            config, world, train_set, val_set, make_sampler(config, train_set, model.max_stride, world, micro_batch)
        )
        return {}
    dataset, sampler, loader = make_train_loader(config, train_set, model.max_stride, world, micro_batch)
    size = config.evaluate.image_size or config.train.image_size
    lines, seconds = config.logger.lines_per_epoch, config.train.timeout_seconds
    evaluator = Evaluator(val_set, config.evaluate, size, model, config.data, world, lines, seconds)
    folder = folder or stack.enter_context(opening)
    log = RunLog(folder.path, world.is_main)
    if saved is None:  # at once: by its options a job that is started again knows its own folder
        on_main(world, lambda: save_config(folder.path, config))
    log_warnings(log, "deterministic")  # where train.deterministic cannot be kept, torch names the operator
    announce(log, folder.path, config, world, dtype, train_set, val_set, sampler, model.heads)
    for line in (saved_note, weights_note, batch_note, note):
        log.line(line)

    schedule = Schedule(config.optim, sampler.steps_per_epoch, sampler.steps_per_epoch * config.train.epochs)
    state = start_state(config, world, model, train_set, sampler, schedule, dtype)
    wrapped = wrap_model(state.model, world, config.train.seed if config.train.deterministic else None)
    loss = make_loss(model.heads, config.loss)
    if saved is not None:
        rehearse(wrapped, loss, state.optimizer, 2 * model.max_stride, world, dtype)
        log.line(state.resume(saved, folder.path, world, config.resume_force))
        del saved
        on_main(world, lambda: save_config(folder.path, config))  # only now: a resume that was refused leaves it alone
    elif world.is_main and config.logger.pictures:
        draw_first_batch(dataset, sampler, train_set.names, folder.path / "train_batch.jpg")
    return Training(
        config, world, folder, log, state, wrapped, loss, schedule, sampler, loader, evaluator, train_set, dtype, stop
    ).run()


def prepare_numerics(config: TrainConfig, world: World) -> str | None:
    """Set seeds, determinism and cuDNN's benchmark; a line about the benchmark where there is one
    to say.
    """
    deterministic, sizes = config.train.deterministic, config.train.multi_scale
    check_same_bits(world.device, deterministic, config.train.sync_bn, config.train.device_batch_size == AUTO)
    sizes_change = config.train.rect or sizes[0] != sizes[1]
    benchmark, note = choose_benchmark(config.train.cudnn_benchmark, world.device, deterministic, sizes_change)
    seed_everything(config.train.seed, deterministic, benchmark)
    keep_freed_memory()
    return note


def start_state(
    config: TrainConfig,
    world: World,
    model: Darknet,
    train_set: Annotations,
    sampler: TrainBatchSampler,
    schedule: Schedule,
    dtype: torch.dtype | None,
) -> RunState:
    """What the training changes, at its start, on the device of this process and the same on all.

    Optimiser, average and checkpoints hold the plain model; only the training loop sees the
    wrapper.
    """
    micro_batch = sampler.device_batch_size * world.world_size
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = model.to(world.device, weights_dtype(config.train.precision.value)).to(memory_format=layout)
    broadcast_module(model)
    if config.train.sync_bn:
        convert_sync_batchnorm(model, world)
    state = RunState(
        model=model,
        average=WeightAverage(model, schedule),
        optimizer=make_optimizer(model, config.optim),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        description=describe(config, model, train_set, micro_batch, sampler.steps_per_epoch),
        seen=model.seen,
    )
    state.loss_sums = state.loss_sums.to(world.device)
    return state


def draw_first_batch(dataset: TrainDataset, sampler: TrainBatchSampler, names: Sequence[str], path: Path) -> None:
    """The first batch of this process as the network gets it, with its boxes."""
    batch = dataset.__getitems__(next(iter(sampler)))
    pictures = (batch.network_input() * 255).round().byte().numpy()
    draw_targets(pictures, batch.targets.numpy(), names, path)


def complete(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The whole configuration: with ``resume`` that run's own; folders absolute, so that it holds
    elsewhere too.
    """
    whole = continue_run(given, named)
    folders = [key for key in ("root", "index_dir") if key in whole["data"]]
    return layered(whole, {"data": {key: str(Path(whole["data"][key]).absolute()) for key in folders}})


if __name__ == "__main__":
    run("train", TrainConfig, train, complete)
