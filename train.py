"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from conf.build import build_model, describe_network
from conf.entry import continue_run, layered, run, to_dictionary, to_yaml
from conf.schema import TrainConfig
from data import (
    Annotations,
    Batch,
    ImageSource,
    MultiScale,
    TrainBatchSampler,
    TrainDataset,
    check_same_classes,
    fitting_device_batch_size,
    make_loader,
    repeat_factors,
    summarise,
)
from eval import Evaluation, Evaluator, open_images, open_split
from models import (
    WEIGHTS_VERSION,
    Darknet,
    DarknetLoss,
    DarknetLossConfig,
    Head,
    LossConfig,
    LossSection,
    YoloLoss,
)
from train_utils.coco_eval import FIGURES, format_table
from train_utils.distributed import World, broadcast_module, convert_sync_batchnorm, init_distributed_mode, wrap_ddp
from train_utils.engine import LOSS_NAMES, train_one_epoch
from train_utils.log import MetricsCsv, Progress, RunLog
from train_utils.numerics import autocast_dtype, keep_freed_memory, seed_everything
from train_utils.optim import Schedule, WeightAverage, make_optimizer, make_scheduler
from train_utils.plots import draw_curves, draw_detections, draw_targets
from train_utils.run_folder import open_run_folder
from train_utils.run_state import RunState

COLUMNS = ("epoch", "step", "lr", *LOSS_NAMES, *FIGURES, "seconds", "images_per_second")
SHOWN = ("epoch", "step", *LOSS_NAMES, "AP", "AP50", "AP75", "seconds", "images_per_second")  # on the terminal


def train(config: TrainConfig) -> dict[str, float]:
    """Train as configured; the best epoch's figures on the first process, {} on the others."""
    world = init_distributed_mode(config.train.device.value, config.train.timeout_seconds)
    seed_everything(config.train.seed, config.train.deterministic, config.train.cudnn_benchmark)
    if world.device.type == "cpu":
        keep_freed_memory()
    dtype = autocast_dtype(config.train.precision.value, world.device)

    # Data and network: all that can be wrong with them shows before a run folder is made.
    train_set, val_set = open_split(config.data, "train", world), open_split(config.data, "val", world)
    check_same_classes(train_set, val_set)
    model, weights_note = build_model(config.model, len(train_set.names))
    dataset, sampler, loader = make_train_loader(config, train_set, model.max_stride, world)
    size = config.evaluate.image_size or config.train.image_size
    evaluator = Evaluator(val_set, config.evaluate, size, model, config.data, world, config.logger.lines_per_epoch)
    folder = open_run_folder(world, config.name, config.run_dir, config.resume)
    log = RunLog(folder, world.is_main)
    announce(log, folder, config, world, dtype, train_set, val_set, sampler, model.heads)
    if config.resume is None:
        log.line(weights_note)

    # Optimiser, average and checkpoints hold the plain model; only the training loop sees the wrapper.
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = model.to(world.device).to(memory_format=layout)
    if config.train.sync_bn:
        log.line(convert_sync_batchnorm(model, world)[1])
    schedule = Schedule(config.optim, sampler.steps_per_epoch, sampler.steps_per_epoch * config.train.epochs)
    optimizer = make_optimizer(model, config.optim)
    state = RunState(
        model=model,
        average=WeightAverage(model, schedule),
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, schedule),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        description=describe(config, model, train_set),
        seen=model.seen,
    )
    if config.resume is not None:
        log.line(state.resume(folder, world))
    elif world.is_main and config.logger.pictures:
        first = dataset.__getitems__(next(iter(sampler)))
        pictures = (first.network_input() * 255).round().byte().numpy()
        draw_targets(pictures, first.targets.numpy(), train_set.names, folder / "train_batch.jpg")
    if world.is_main:  # only now: a resume that was refused leaves the folder's own configuration alone
        save_config(folder / "config.yaml", config)
    wrapped = wrap_ddp(model, world)
    loss = make_loss(model.heads, config.loss)
    metrics = MetricsCsv(folder / "metrics.csv", COLUMNS, world.is_main, state.epoch)

    if state.epoch >= config.train.epochs:
        log.line(f"nothing to do: all {config.train.epochs} epochs are done; a larger train.epochs goes on")
    evaluation = None
    for epoch in range(state.epoch, config.train.epochs):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        result = train_one_epoch(
            model=wrapped,
            loss=loss,
            loader=loader,
            optimizer=optimizer,
            scheduler=state.scheduler,
            scaler=state.scaler,
            average=state.average,
            schedule=schedule,
            world=world,
            accumulate=sampler.accumulate,
            step=state.step,
            autocast_dtype=dtype,
            to_input=Batch.network_input,
            progress=Progress(
                len(sampler), f"epoch {epoch + 1}/{config.train.epochs}", world.is_main, config.logger.lines_per_epoch
            ),
        )
        state.seen += (result.step - state.step) * config.train.batch_size
        state.epoch, state.step = epoch + 1, result.step
        if is_due(state.epoch, config.evaluate.every, config.train.epochs):
            broadcast_module(state.average.module)  # without SyncBatchNorm each process averaged its own statistics
            evaluation = evaluator(state.average.module)
        else:
            evaluation = None
        figures = evaluation.scores.figures if evaluation is not None else {}
        state.save(folder, is_best=state.record(figures), best_only=config.train.best_only)
        row = {"epoch": state.epoch, "step": state.step, "lr": result.lr, **result.losses, **figures}
        row |= {"seconds": time.perf_counter() - started, "images_per_second": result.images_per_second}
        metrics.write(row)
        log.line("  ".join(f"{key} {row[key]:.4g}" for key in SHOWN if key in row))

    if evaluation is not None:
        finish(log, folder, config, state, val_set, evaluation)
    return state.best_figures


def make_train_loader(
    config: TrainConfig, train_set: Annotations, stride: int, world: World
) -> tuple[TrainDataset, TrainBatchSampler, DataLoader[Batch]]:
    """The training batches of this process. The global batch is decided first, then dealt to the processes."""
    device_batch_size = config.train.device_batch_size
    if device_batch_size is None:
        limit = config.train.max_device_batch_size
        device_batch_size = fitting_device_batch_size(config.train.batch_size, world.world_size, limit)
    low, high = config.train.multi_scale
    sampler = TrainBatchSampler(
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


def describe(config: TrainConfig, model: Darknet, train_set: Annotations) -> dict[str, Any]:
    """What a checkpoint says about itself, so that nothing else is needed to use it."""
    return {
        "network": describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": to_dictionary(config),
        "weights_version": list(WEIGHTS_VERSION),
    }


def announce(
    log: RunLog,
    folder: Path,
    config: TrainConfig,
    world: World,
    dtype: torch.dtype | None,
    train_set: Annotations,
    val_set: Annotations,
    sampler: TrainBatchSampler,
    heads: Sequence[Head],
) -> None:
    """Say what is about to happen: the facts that follow from the configuration."""
    anchors = np.array(sorted({anchor for head in heads for anchor in head.anchors}))
    # Darknet's loss gives every box its best anchor, so there is no overlap below which one is lost.
    min_iou = config.loss.anchor_iou if isinstance(config.loss, LossConfig) else None
    for split, part in (("train", train_set), ("val", val_set)):
        summary = summarise(part, config.train.image_size, anchors, min_iou)
        log.line(f"{split}: {summary.line()}")
        log.line(summary.warning() if split == "train" else None)
        for skipped in part.skipped:
            log.line(f"{split}: {skipped}")
    log.line(
        f"{world.world_size} process(es) on {world.device.type} ({world.launcher}, {world.backend}), forward pass in "
        f"{str(dtype or torch.float32).removeprefix('torch.')}"
    )
    log.line(
        f"{config.train.epochs} epochs x {sampler.steps_per_epoch} steps x {config.train.batch_size} images "
        f"({world.world_size} processes x {sampler.device_batch_size} images x {sampler.accumulate} passes), "
        f"run folder {folder}"
    )


def save_config(path: Path, config: TrainConfig) -> None:
    """Write the resolved configuration; one that was there and differs is kept beside it under the time of now."""
    text = to_yaml(config)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(path.with_name(f"config_until_{time.strftime('%Y-%m-%d_%H-%M-%S')}.yaml"))
    path.write_text(text, encoding="utf-8")


def finish(
    log: RunLog, folder: Path, config: TrainConfig, state: RunState, val_set: Annotations, evaluation: Evaluation
) -> None:
    """Show what the training gave: the table of the last evaluation, the curves, detections beside the labels."""
    log.line(format_table(evaluation.scores))
    log.line(
        f"best AP {state.best:.4f} after epoch {state.best_epoch}: python eval.py ckpt={folder}/checkpoints/best.pt"
    )
    if config.logger.pictures:
        draw_curves(folder / "metrics.csv", folder / "curves.png")
        draw_detections(detection_pairs(config, val_set, evaluation), val_set.names, folder / "val_detections.jpg")


def detection_pairs(
    config: TrainConfig, val_set: Annotations, evaluation: Evaluation, count: int = 8
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The first images of the validation set with labels and detections, as plots.draw_detections takes them."""
    images = ImageSource(val_set, config.data.on_error)
    for i in range(min(count, len(val_set))):
        image = images.read(i)
        if image is None:  # left out by data.on_error=skip
            continue
        classes, boxes_xyxy = val_set.training_boxes(i)
        found = evaluation.detections[evaluation.detections["image_id"] == val_set.image_ids[i]]
        boxes = np.concatenate([found["box_xywh"][:, :2], found["box_xywh"][:, :2] + found["box_xywh"][:, 2:]], axis=1)
        yield (
            image,
            np.concatenate([boxes_xyxy, classes[:, None]], axis=1),
            np.concatenate([boxes, found["score"][:, None], found["class"][:, None]], axis=1),
        )


def complete(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The whole configuration: with ``resume`` that run's own; folders absolute, so that it holds elsewhere too."""
    whole = continue_run(given, named)
    folders = [key for key in ("root", "index_dir") if key in whole["data"]]
    return layered(whole, {"data": {key: str(Path(whole["data"][key]).absolute()) for key in folders}})


if __name__ == "__main__":
    run("train", TrainConfig, train, complete)
