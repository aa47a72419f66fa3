"""What a training reports before it starts, keeps on the way, and shows at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.build.batches import resolved_options
from conf.entry import defaults, to_yaml
from conf.help import version_page
from conf.schema import TrainConfig
from data import Annotations, TrainBatchSampler, TrainDataset, summarise
from data.anchors import Sizes
from eval import Evaluation, draw_plots
from models import Darknet, Head, LossConfig, count_flops, count_parameters
from train_utils.coco_eval import CocoResult, format_table
from train_utils.detections import Detections, GroundTruth
from train_utils.distributed import World
from train_utils.draw import draw_targets
from train_utils.errors import TrainError
from train_utils.files import keep_copy, whole_file
from train_utils.log import RunLog
from train_utils.numerics import precision_name
from train_utils.options import flat, option
from train_utils.plots import FOLDER, Warn, draw_training
from train_utils.progress import duration
from train_utils.report import Best, keep_best, read_best, read_files, write_report
from train_utils.train_state import TrainState

# The first to look at.
LEFT = ("checkpoints/best.pt", "checkpoints/last.pt", "report.html", "metrics.csv", "plots")


def min_iou_of(config: TrainConfig) -> float | None:
    """The overlap that a box needs with an anchor; None where each gets its best."""
    loss = config.loss
    return loss.anchor_iou if isinstance(loss, LossConfig) and loss.positives is None else None


def anchors_of(heads: Sequence[Head]) -> Sizes:
    """The different anchors (k, 2) of all heads in pixels, sorted."""
    return np.array(sorted({anchor for head in heads for anchor in head.anchors}))


def announce(
    log: RunLog,
    folder: Path,
    config: TrainConfig,
    world: World,
    train_set: Annotations,
    val_set: Annotations,
    sampler: TrainBatchSampler,
    model: Darknet,
) -> None:
    """Log what is about to happen: data, network, versions, ranks, precision, length and folder."""
    anchors, size = anchors_of(model.heads), config.train.image_size
    log.line(config.data.line())
    for split, part in (("train", train_set), ("val", val_set)):
        summary = summarise(part, size, anchors, min_iou_of(config))
        log.line(f"{split}: {summary.line()}")
        log.line(summary.warning() if split == "train" else None)
        for note in (*part.skipped, *part.notes):
            log.line(f"{split}: {note}")
    log.line(
        f"{model.cfg.source}: {count_parameters(model):,} parameters, {count_flops(model, (size, size)) / 1e9:.2f} "
        f"GFLOPs for {size} x {size} pixels, a multiply-add counting as two"
    )
    for note in model.notes:
        log.line(note)
    if world.is_main:
        log.line(", ".join(version_page().splitlines()))
    if config.plugins:
        log.line(f"plugins: {', '.join(config.plugins)}")
    log.line(
        f"{world.world_size} process(es) on {world.device.type} ({world.launcher}), forward pass in "
        f"{precision_name(config.train.precision.value, world.device)}"
    )
    log.line(
        f"{config.train.epochs} epochs x {sampler.steps_per_epoch} steps x {config.train.batch_size} images "
        f"({world.world_size} ranks x {sampler.images_per_rank} images x {sampler.accumulate} passes), "
        f"run folder {folder}"
    )
    log.line(resolved_options(config, world))


def draw_first_batch(dataset: TrainDataset, sampler: TrainBatchSampler, names: Sequence[str], path: Path) -> None:
    """Draw this rank's first batch as the network gets it, with its boxes."""
    batch = dataset.__getitems__(next(iter(sampler))).to(torch.device("cpu"))
    pictures = (batch.network_input() * 255).round().byte().numpy()
    draw_targets(pictures, batch.targets.numpy(), names, path)


def save_config(folder: Path, config: TrainConfig) -> None:
    """Write the resolved configuration into a run folder; keep a different old one beside it.

    Raises TrainError if it cannot be written; the old file is unchanged then.
    """
    path, text = folder / "config.yaml", to_yaml(config)
    try:
        if path.exists():
            if path.read_text(encoding="utf-8", errors="replace") == text:
                return
            keep_copy(path)
        with whole_file(path) as file:
            file.write(text)
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}). fix: free some space there") from error


def finish(
    log: RunLog,
    folder: Path,
    config: TrainConfig,
    state: TrainState,
    val_set: Annotations,
    scores: CocoResult,
    detections: Detections,
) -> None:
    """Log the figures of the best epoch by class; draw the plots of the run."""
    shown, of_epoch = scores, state.epoch
    if state.best_epoch != state.epoch:
        with suppress(TrainError):  # they may not have been written, as to a full disk
            shown, of_epoch = read_best(folder).scores, state.best_epoch
    log.line(f"figures of epoch {of_epoch}:")
    log.line(format_table(shown))
    log.line(state.best_sentence())
    if config.logger.pictures:
        plots = folder / FOLDER
        draw_training(plots, folder / "metrics.csv", log.line)
        draw_plots(plots, config.data, val_set, detections, log.line)


def close_run(log: RunLog, folder: Path, seconds: float) -> None:
    """Log how long the training took, what it left and what to type next."""
    found = (name for name in LEFT if (folder / name).exists())
    ckpt = option("ckpt", folder)
    log.line(f"trained for {duration(seconds)}; in {folder}: {', '.join(found)}")
    log.line(f"next:\n  python eval.py {ckpt}\n  python predict.py {ckpt} source=pictures")


def keep_evaluation(folder: Path, truth: GroundTruth, evaluation: Evaluation, say: Warn) -> None:
    """Keep labels and detections of the best epoch so far."""
    best = Best(evaluation.scores, truth, evaluation.detections)
    spare(say, "best_detections.npz", lambda: keep_best(folder, best))


def report_run(folder: Path) -> Path:
    """Write the report of a run into its folder; return the file. Raises TrainError."""
    run = read_files(folder)
    # Of the defaults, only the name stands for another option.
    return write_report(run, _defaults() | {"name": run.options["data.name"]})


@cache  # for the jobs of a sweep
def _defaults() -> dict[str, Any]:
    return flat(defaults("train", TrainConfig))


def spare(say: Warn, what: str, make: Callable[[], object]) -> None:
    """Make something that a training can do without; tell by ``say`` if that fails."""
    try:
        make()
    except Exception as error:  # whatever it is, it is worth a line and not the training
        say(f"warning: {what} was not written ({type(error).__name__}: {error})")
