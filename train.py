"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from conf.build import build_model, describe_network
from conf.entry import continue_run, layered, run, to_dictionary
from conf.report import announce, finish, save_config, tell_places
from conf.schema import OnNonFinite, TrainConfig
from data import (
    Annotations,
    Batch,
    MultiScale,
    TrainBatchSampler,
    TrainDataset,
    check_same_classes,
    fitting_device_batch_size,
    make_loader,
    repeat_factors,
)
from eval import Evaluator, open_images, open_split
from models import WEIGHTS_VERSION, Darknet, DarknetLoss, DarknetLossConfig, Head, LossConfig, LossSection, YoloLoss
from train_utils.checkpoint_writer import CheckpointWriter
from train_utils.coco_eval import FIGURES
from train_utils.distributed import (
    World,
    barrier,
    broadcast_module,
    choose_fixed_workspace,
    convert_sync_batchnorm,
    init_distributed_mode,
    wrap_ddp,
)
from train_utils.engine import EpochResult, rehearse, train_one_epoch
from train_utils.log import MetricsCsv, Progress, RunLog, log_warnings
from train_utils.nonfinite import NonFiniteGuard
from train_utils.numerics import autocast_dtype, keep_freed_memory, seed_everything, weights_dtype
from train_utils.optim import Schedule, WeightAverage, make_optimizer, make_scheduler
from train_utils.plots import draw_targets
from train_utils.run_folder import open_run_folder
from train_utils.run_state import LOSS_NAMES, RunState, read_run
from train_utils.steps import StepDecisions, StopRequest, ask_for_requeue

COLUMNS = ("epoch", "step", "lr", *LOSS_NAMES, *FIGURES)  # of metrics.csv: the same in every repetition of a run
TIME_COLUMNS = ("epoch", "seconds", "images_per_second", "waiting")  # of times.csv
SHOWN = ("epoch", "step", *LOSS_NAMES, "AP", "AP50", "AP75", "seconds", "images_per_second")  # on the terminal


def train(config: TrainConfig) -> dict[str, float]:
    """Train as configured; the best epoch's figures on the first process, {} on the others."""
    with StopRequest() as stop, warnings.catch_warnings():
        return train_until(config, stop)


def train_until(config: TrainConfig, stop: StopRequest) -> dict[str, float]:
    """``train`` until it is over or a stop is requested."""
    if config.train.deterministic:
        choose_fixed_workspace()
    world = init_distributed_mode(config.train.device.value, config.train.timeout_seconds)
    seed_everything(config.train.seed, config.train.deterministic, config.train.cudnn_benchmark)
    if world.device.type == "cpu":
        keep_freed_memory()
    dtype = autocast_dtype(config.train.precision.value, world.device)

    # Data and network: all that can be wrong with them shows before a run folder is made.
    saved, saved_note = read_run(Path(config.resume)) if config.resume is not None else (None, None)
    train_set, val_set = open_split(config.data, "train", world), open_split(config.data, "val", world)
    check_same_classes(train_set, val_set)
    model, weights_note = build_model(config.model, len(train_set.names))
    micro_batch = saved.get("micro_batch") if saved is not None else None
    if config.dry_run:
        tell_places(
            config, world, train_set, val_set, make_sampler(config, train_set, model.max_stride, world, micro_batch)
        )
        return {}
    dataset, sampler, loader = make_train_loader(config, train_set, model.max_stride, world, micro_batch)
    size = config.evaluate.image_size or config.train.image_size
    evaluator = Evaluator(val_set, config.evaluate, size, model, config.data, world, config.logger.lines_per_epoch)
    folder = open_run_folder(world, config.name, config.run_dir, config.resume)
    log = RunLog(folder, world.is_main)
    log_warnings(log, "deterministic")  # where train.deterministic cannot be kept, torch names the operator
    announce(log, folder, config, world, dtype, train_set, val_set, sampler, model.heads)
    if saved is None:
        log.line(weights_note)

    # Optimiser, average and checkpoints hold the plain model; only the training loop sees the wrapper.
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = model.to(world.device, weights_dtype(config.train.precision.value)).to(memory_format=layout)
    broadcast_module(model)
    if config.train.sync_bn:
        convert_sync_batchnorm(model, world)
    schedule = Schedule(config.optim, sampler.steps_per_epoch, sampler.steps_per_epoch * config.train.epochs)
    optimizer = make_optimizer(model, config.optim)
    state = RunState(
        model=model,
        average=WeightAverage(model, schedule),
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, schedule),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        description=describe(config, model, train_set, sampler.device_batch_size * world.world_size),
        seen=model.seen,
    )
    state.loss_sums = state.loss_sums.to(world.device)
    wrapped = wrap_ddp(model, world)
    loss = make_loss(model.heads, config.loss)
    writer = CheckpointWriter(log.line)
    if saved is not None:
        rehearse(wrapped, loss, optimizer, 2 * model.max_stride, world, dtype)
        log.line(saved_note)
        log.line(state.take_up(saved, folder, world, config.resume_force))
        del saved
    elif world.is_main and config.logger.pictures:
        first = dataset.__getitems__(next(iter(sampler)))
        pictures = (first.network_input() * 255).round().byte().numpy()
        draw_targets(pictures, first.targets.numpy(), train_set.names, folder / "train_batch.jpg")
    if world.is_main:  # only now: a resume that was refused leaves the folder's own configuration alone
        save_config(folder / "config.yaml", config)
    metrics = MetricsCsv(folder / "metrics.csv", COLUMNS, world.is_main, state.epoch)
    times = MetricsCsv(folder / "times.csv", TIME_COLUMNS, world.is_main, state.epoch)
    decisions = StepDecisions(stop, config.train.save_every_steps, config.train.save_every_minutes, writer.failed)

    def roll_back() -> str:
        writer.wait()
        barrier()
        state.restore_weights(read_run(folder)[0])
        return "weights and optimiser are those of the last checkpoint again; the training goes on with other images"

    guard = NonFiniteGuard(
        world,
        folder,
        config.train.max_nonfinite_steps,
        log.line,
        train_set.file_name,
        roll_back if config.train.on_nonfinite is OnNonFinite.rollback else None,
    )

    def train_epoch() -> EpochResult:
        """What is left of the epoch under way."""
        steps_done = state.step - state.epoch * sampler.steps_per_epoch
        sampler.set_epoch(state.epoch, steps_done * sampler.accumulate)
        title = f"epoch {state.epoch + 1}/{config.train.epochs}"
        return train_one_epoch(
            model=wrapped,
            loss=loss,
            loader=loader,
            state=state,
            schedule=schedule,
            world=world,
            accumulate=sampler.accumulate,
            autocast_dtype=dtype,
            to_input=Batch.network_input,
            progress=Progress(len(sampler), title, world.is_main, config.logger.lines_per_epoch),
            guard=guard,
            decisions=decisions,
            save=lambda: state.save(writer, folder),
            check_sync_every=config.train.check_sync_every,
        )

    if state.epoch >= config.train.epochs:
        log.line(f"nothing to do: all {config.train.epochs} epochs are done")
    evaluation = stopped_by = None
    patience = config.train.patience or config.train.epochs
    while state.epoch < config.train.epochs and stopped_by is None:
        started = time.perf_counter()
        result = train_epoch()
        stopped_by = result.stopped_by
        if state.step < (state.epoch + 1) * sampler.steps_per_epoch:
            break  # stopped within the epoch
        state.end_epoch()
        evaluation = None
        if is_due(state.epoch, config.evaluate.every, config.train.epochs):
            broadcast_module(state.average.module)  # without SyncBatchNorm each process averaged its own statistics
            evaluation = evaluator(state.average.module)
        figures = evaluation.scores.figures if evaluation is not None else {}
        is_best = state.record(figures)
        # The table first: a run that ends in between repeats the epoch, and its row.
        row = {"epoch": state.epoch, "step": state.step, "lr": result.lr, **result.losses, **figures}
        took = {"seconds": time.perf_counter() - started, "images_per_second": result.images_per_second}
        metrics.write(row)
        times.write({"epoch": state.epoch, **took, "waiting": result.waiting})
        state.save(writer, folder, is_best, config.train.best_only)
        decisions.saved()
        log.line("  ".join(f"{key} {(row | took)[key]:.4g}" for key in SHOWN if key in row | took))
        stopped_by = stopped_by or decisions.decide(True, state.step).stop
        if evaluation is not None and state.epoch - state.best_epoch >= patience:
            log.line(f"no better AP in {patience} epochs: the training ends here (train.patience)")
            stopped_by = None
            break
    writer.close()
    if stopped_by is not None and state.epoch < config.train.epochs:
        log.line(f"stopped at step {state.step} by {stopped_by.name}; resume={folder} goes on from there")
        ask_for_requeue(world, stopped_by)
    elif evaluation is not None:
        finish(log, folder, config, state, val_set, evaluation.scores, evaluation.detections)
    return state.best_figures


def make_sampler(
    config: TrainConfig, train_set: Annotations, stride: int, world: World, micro_batch: int | None = None
) -> TrainBatchSampler:
    """The images of each step of this process. The global batch is decided first, then dealt to the processes.

    ``micro_batch``, of a run that goes on, is its number of images in one forward pass over all processes: it is kept
    where ``train.device_batch_size`` leaves a choice, since batch norm depends on it.
    """
    device_batch_size = config.train.device_batch_size
    if device_batch_size is None:
        limit = config.train.max_device_batch_size
        if micro_batch is not None and micro_batch % world.world_size == 0:
            limit = micro_batch // world.world_size
        device_batch_size = fitting_device_batch_size(config.train.batch_size, world.world_size, limit)
    low, high = config.train.multi_scale
    return TrainBatchSampler(
        num_images=len(train_set),
        batch_size=config.train.batch_size,
        device_batch_size=device_batch_size,
        world_size=world.world_size,
        rank=world.rank,
        seed=config.train.seed,
        sizes=MultiScale(config.train.image_size, low, high, stride, config.train.seed),
        factors=repeat_factors(train_set, config.train.repeat_threshold) if config.train.repeat_threshold else None,
        image_sizes=train_set.sizes if config.train.rect else None,
        tile_pool=config.augment.tile_pool,
    )


def make_train_loader(
    config: TrainConfig, train_set: Annotations, stride: int, world: World, micro_batch: int | None = None
) -> tuple[TrainDataset, TrainBatchSampler, DataLoader[Batch]]:
    """The training batches of this process, as ``make_sampler`` deals them."""
    sampler = make_sampler(config, train_set, stride, world, micro_batch)
    images = open_images(train_set, config.data, world)
    dataset = TrainDataset(train_set, config.augment, config.train.seed, config.train.epochs, images)
    return dataset, sampler, make_loader(dataset, sampler, config.data.workers, world.device.type == "cuda")


def make_loss(heads: Sequence[Head], config: LossSection) -> YoloLoss | DarknetLoss:
    """The loss that ``loss=`` chose."""
    if isinstance(config, DarknetLossConfig):
        return DarknetLoss(heads, config)
    assert isinstance(config, LossConfig)
    return YoloLoss(heads, config)


def is_due(epoch: int, every: int, epochs: int) -> bool:
    """Whether to evaluate after ``epoch`` (from 1): every ``every`` epochs (0: never) and always after the last."""
    return epoch == epochs or (every > 0 and epoch % every == 0)


def describe(config: TrainConfig, model: Darknet, train_set: Annotations, micro_batch: int) -> dict[str, Any]:
    """What a checkpoint says about itself, so that nothing else is needed to use it."""
    return {
        "network": describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": to_dictionary(config),
        "weights_version": list(WEIGHTS_VERSION),
        "micro_batch": micro_batch,
        "data": {"images": len(train_set), "boxes": len(train_set.classes)},
    }


def complete(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The whole configuration: with ``resume`` that run's own; folders absolute, so that it holds elsewhere too."""
    whole = continue_run(given, named)
    folders = [key for key in ("root", "index_dir") if key in whole["data"]]
    return layered(whole, {"data": {key: str(Path(whole["data"][key]).absolute()) for key in folders}})


if __name__ == "__main__":
    run("train", TrainConfig, train, complete)
