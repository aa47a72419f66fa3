"""What a training reports before it starts, keeps on the way, and shows at its end."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import data
import models
from conf import compose, errors, from_checkpoint, help, run, run_files
from conf.options import flat, option
from conf.schema import TrainConfig
from data import progress
from train_utils import auto, coco_eval, distributed, draw, numerics, plots, report_page
from train_utils.log import RunLog
from train_utils.loggers import Loggers
from train_utils.train_state import TrainState


def announce(
    log: RunLog,
    folder: Path,
    config: TrainConfig,
    world: distributed.World,
    train_set: data.Annotations,
    val_set: data.Annotations,
    sampler: data.TrainBatchSampler,
    model: models.Darknet,
) -> None:
    """Log what is about to happen: data, network, versions, ranks, precision, length and folder."""
    size = config.train.image_size
    anchors = np.array(sorted({anchor for head in model.heads for anchor in head.anchors}))
    log.line(config.data.line())
    for split, part in (("train", train_set), ("val", val_set)):
        about, warning = data.describe_set(part, size, anchors, auto.min_iou_of(config))
        log.line(f"{split}: {about}")
        log.line(warning if split == "train" else None)
        for note in (*part.skipped, *part.notes):
            log.line(f"{split}: {note}")
    if config.data.split is not None:
        total = len(train_set) + len(val_set)
        log.line(f"data.split={config.data.split:g} holds out {len(val_set)} of {total} images, by name")
    parameters, flops = models.count_parameters(model), models.count_flops(model, (size, size))
    log.line(
        f"{model.cfg.source}: {parameters:,} parameters, {flops / 1e9:.2f} GFLOPs for {size} x {size} pixels, a "
        "multiply-add counting as two"
    )
    for note in model.notes:
        log.line(note)
    if world.is_main:
        log.line(data.warn_of_shared_images(train_set, val_set))
        log.line(", ".join(help.version_page().splitlines()))
    if config.plugins:
        log.line(f"plugins: {', '.join(config.plugins)}")
    log.line(
        f"{world.world_size} process(es) on {world.device.type} ({world.launcher}), forward pass in "
        f"{numerics.precision_name(config.train.precision.value, world.device)}"
    )
    log.line(
        f"{config.train.epochs} epochs x {sampler.steps_per_epoch} steps x {config.train.batch_size} images "
        f"({world.world_size} ranks x {sampler.images_per_rank} images x {sampler.accumulate} passes), "
        f"run folder {folder}"
    )
    log.line(f"data.workers={config.data.workers}, augment.colour={config.augment.colour}")


def draw_first_batch(
    dataset: data.TrainDataset, sampler: data.TrainBatchSampler, names: Sequence[str], path: Path
) -> None:
    """Draw this rank's first batch as the network gets it, with its boxes."""
    batch = dataset.__getitems__(next(iter(sampler))).to(torch.device("cpu"))
    pictures = (batch.network_input() * 255).round().byte().numpy()
    draw.draw_targets(pictures, batch.targets.numpy(), names, path)


@contextlib.contextmanager
def errors_kept(log: RunLog) -> Iterator[None]:
    """Write the sentence of an error that ends the run into its log, too; the program prints it."""
    try:
        yield
    except Exception as error:
        log.line((sentence := run.in_one_sentence(error, TrainConfig)) and f"error: {sentence}", shown=False)
        raise


def save_config(folder: Path, config: TrainConfig) -> None:
    """Write the resolved configuration into a run folder.

    Raises TrainError if it cannot be written; an old file is unchanged then.
    """
    path = folder / "config.yaml"
    try:
        with run_files.whole_file(path) as file:
            file.write(compose.to_yaml(config))
    except OSError as error:
        raise errors.TrainError(f"cannot write {path} ({error.strerror}). fix: free some space there") from error


def finish_run(
    log: RunLog,
    loggers: Loggers,
    folder: Path,
    config: TrainConfig,
    state: TrainState,
    val_set: data.Annotations,
    evaluation: coco_eval.Evaluation,
) -> None:
    """Show the result of a training: metrics by class, plots, report, next steps.

    ``evaluation`` is that of the last epoch; the metrics are those of the best one.
    """
    shown, of_epoch = evaluation, state.epoch
    if state.best_epoch != state.epoch:
        with contextlib.suppress(errors.TrainError):  # they may not have been written, as to a full disk
            shown, of_epoch = report_page.read_best(folder), state.best_epoch
    log.line(f"metrics of epoch {of_epoch}:")
    log.line(coco_eval.format_table(shown))
    log.line(state.best_sentence())
    if config.logger.pictures:
        plots.draw_training(folder / plots.FOLDER, folder / "metrics.csv", log.line)
        read = data.ImageSource(val_set, config.data.on_error).read
        plots.draw_evaluation(folder / plots.FOLDER, evaluation, read, val_set.file_name, log.line)
    with log_failure("report.html", log):
        report_run(folder)
    loggers.result()
    ckpt = option("ckpt", folder)
    log.line(f"trained for {progress.duration(loggers.seconds)}; see {folder / 'report.html'}")
    log.line(f"next:\n  python eval.py {ckpt}\n  python predict.py {ckpt} {option('source', val_set.path(0))}")


def report_run(folder: Path) -> Path:
    """Write the report of a run into its folder; return the file. Raises TrainError."""
    options, defaults = flat(from_checkpoint.read_config(folder, "")), flat(compose.defaults("train", TrainConfig))
    # Of the defaults, only the name stands for another option.
    return report_page.write_report(folder, options, defaults | {"name": options["data.name"]})


@contextlib.contextmanager
def log_failure(what: str, log: RunLog) -> Iterator[None]:
    """Write something in the body that a training can do without; log it if that fails."""
    try:
        yield
    except Exception as error:  # whatever it is, it is worth a line and not the training
        log.line(f"warning: {what} was not written ({type(error).__name__}: {error})")
