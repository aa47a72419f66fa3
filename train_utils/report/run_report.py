"""What a run reports: its log, its tables, the services it logs to, and the page at its end."""

import contextlib
import csv
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch

import data
import models
from conf import TrainError, compose
from conf.cli import command_line, launch, run_files
from conf.options import flat, option
from conf.schema import TrainConfig
from data import Annotations, TrainBatchSampler, TrainDataset
from data.errors import as_started, from_here, printable
from data.output import LOST
from data.progress import Progress, counted, duration, log, warn
from models.config import AUTO
from train_utils import distributed, engine, run_folder
from train_utils.coco_eval import ABSENT, METRICS, OPERATING_POINT, Evaluation, format_metric, format_table
from train_utils.report import draw, plots, report_page
from train_utils.report.loggers import LoggerThread, start_services
from train_utils.train_state import LOSS_NAMES, TrainState

OF_EVALUATION = *METRICS, *OPERATING_POINT, *(f"val_{name}" for name in LOSS_NAMES)
TABLES = {  # metrics.csv is equal in every repetition of a run
    "metrics": ("epoch", "step", "lr", *LOSS_NAMES, *OF_EVALUATION),
    "times": ("epoch", "seconds", "images_per_second", "waiting"),
    "steps": ("step", "lr", *LOSS_NAMES),
}
# Of the table on the terminal: widths by title.
EPOCH_COLUMNS = {"epoch": 7, **dict.fromkeys("loss box obj cls P R AP AP50 img/s mem".split(), 5), "left": 8}


class RunReport(contextlib.AbstractContextManager["RunReport"]):
    """Reports the run in ``folder``: lines, tables and pictures, and the same to the services.

    All ranks have one and call its methods together; only rank 0 writes. As a context it writes the
    error that ends the run into ``train.log``, too, and lets the services take what waits.
    """

    def __init__(self, folder: Path, config: TrainConfig, world: distributed.World) -> None:
        self.folder = folder
        self._config = config
        self._world = world
        self._log = GrowingFile(folder / "train.log")
        self._lock = threading.Lock()
        self._tables: dict[str, csv.DictWriter[str]] = {}  # these and the services: on rank 0
        self._services: list[LoggerThread] = []
        self._is_complete = False
        self._told: set[str] = set()  # of the streams that cannot be written
        self._first_epoch = self._first_step = 0
        self._started = self._epoch_started = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        known = command_line.for_user(error, TrainConfig) if isinstance(error, Exception) else None
        if known is not None:
            self.line(f"error: {known}", on_terminal=False)  # the program prints it
        for service in self._services:
            service.close(self._is_complete)

    def line(self, *texts: str | None, on_terminal: bool = True) -> None:
        """Write ``texts`` to train.log, with the time, and to the terminal; skip None and ""."""
        for text in filter(None, texts if self._world.is_main else ()):
            lines = list(map(printable, text.split("\n")))
            if on_terminal:
                log.info("\n".join(lines))
            lines += [f"warning: {LOST[name]}: this file has all lines" for name in LOST.keys() - self._told]
            self._told |= LOST.keys()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with self._lock:  # loggers and mirror warn from their threads
                for line in lines:
                    self._log.write(f"{stamp} {line}".rstrip() + "\n")

    def announce(
        self,
        train_set: Annotations,
        val_set: Annotations,
        batches: TrainBatchSampler,
        model: models.Darknet,
        *notes: str | None,
    ) -> None:
        """Log what is about to happen: data, network, versions, ranks, precision, length, notes."""
        config, world = self._config, self._world
        height, width = data.both_sides(config.train.image_size)
        anchors = np.concatenate(list(map(attrgetter("anchors"), model.heads)))
        self.line(config.data.line())
        for split, annotations in (("train", train_set), ("val", val_set)):
            about, warning = data.describe_set(
                annotations, (height, width), anchors, getattr(config.loss, "anchor_iou", None)
            )
            self.line(f"{split}: {about}", warning if split == "train" else None)
            for note in (*annotations.skipped, *annotations.notes):
                self.line(f"{split}: {note}")
        if config.data.split is not None:
            total = counted(len(train_set) + len(val_set), "image")
            self.line(f"data.split={config.data.split:g} holds out {len(val_set)} of {total}, by name")
        gigaflops = models.count_flops(model, (height, width)) / 1e9
        size = f"{models.count_parameters(model):,} parameters, {gigaflops:.2f} GFLOPs for {height}x{width}"
        self.line(f"{from_here(model.cfg.source)}:\n  {size} (a multiply-add is two)", *model.notes)
        if world.is_main:
            versions = ", ".join(launch.versions())
            shared = data.warn_of_shared_images(train_set, val_set)
            self.line(shared, textwrap.fill(versions, 80, subsequent_indent="  "))
        if config.plugins:
            self.line(f"plugins: {', '.join(config.plugins)}")
        ranks = f"{counted(world.world_size, 'process')} on {world.device.type} ({world.launcher})"
        self.line(f"{ranks}, forward pass in {config.train.precision}")
        cores, load = os.cpu_count() or 1, os.getloadavg()[0]
        if world.device.type == "cpu" and torch.get_num_threads() > 1 and load > 1.5 * cores:
            fix = "OMP_NUM_THREADS=1 before the command may be many times as fast"
            self.line(f"the {cores} cores are busy (load {load:.0f}):\n  {fix}")
        self.line(
            f"{counted(config.train.epochs, 'epoch')} x {counted(batches.steps_per_epoch, 'step')} x "
            f"{counted(config.train.batch_size, 'image')} ({counted(world.world_size, 'rank')} x "
            f"{counted(batches.images_per_rank, 'image')} x {counted(batches.accumulate, 'pass')})"
        )
        self.line(f"run folder {from_here(self.folder)}")
        self.line(
            f"data.workers={config.data.workers}, augment.colour={config.augment.colour}, "
            f"evaluate.every={config.evaluate.every}"
        )
        self.line(*notes)

    def start(
        self, requested: TrainConfig, state: TrainState, dataset: TrainDataset, batches: TrainBatchSampler
    ) -> None:
        """Save the options, draw the first batch of a new run, start tables and services.

        If a service cannot start, a new run raises TrainError on all ranks; a resumed run warns: a
        job that is requeued at night must not end because a service is away.
        """
        self._started, self._first_epoch = time.monotonic(), state.epoch
        self._first_step = state.step
        picture = self.folder / "train_batch.jpg"
        if self._world.is_main and self._config.logger.pictures and state.step == 0:
            requests = next(iter(batches))
            draw.draw_targets(dataset.__getitems__(requests), dataset.annotations.names, picture)
        run_folder.on_main(self._world, partial(self._start_outputs, requested, state))
        self._send_pictures(state.step, picture.name)
        self._epoch_started = time.monotonic()

    def _start_outputs(self, requested: TrainConfig, state: TrainState) -> None:
        options = compose.to_dictionary(self._config)
        asked, decided = flat(compose.to_dictionary(requested)), flat(options)
        meant = [f"# {key}: auto is {decided[key]} here\n" for key in asked if asked[key] == AUTO != decided[key]]
        save_config(self.folder, requested, "".join(meant))
        for name, columns in TABLES.items():
            done = state.step if columns[0] == "step" else state.epoch
            self._tables[name] = open_table(self.folder / f"{name}.csv", columns, done)
        self._services = start_services(self._config.logger.services, self.folder, state.step, options, self.line)

    def progress(self, state: TrainState) -> Progress:
        """A progress bar of the images that the epoch still has."""
        options = self._config.train
        left = (state.schedule.steps_per_epoch - state.steps_of_epoch) * options.batch_size
        return Progress(left, f"epoch {state.epoch + 1}/{options.epochs}", self._world.is_main)

    def stopped(self, state: TrainState, by: signal.Signals) -> None:
        """Report that a signal stopped the run, and how to continue it."""
        again = option("resume", self.folder)
        self.line(f"stopped at step {state.step} by {by.name}; {again} continues from there")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report rate and losses of a step, if it is one of each ``logger.every_steps``."""
        every = self._config.logger.every_steps
        if self._tables and every > 0 and step % every == 0:
            self._tables["steps"].writerow({"step": step, **metrics})
            self._send(step, "train", metrics)

    def epoch(
        self, state: TrainState, result: engine.EpochResult, evaluation: Evaluation | None, is_best: bool
    ) -> None:
        """Report the epoch that ``state`` has just counted; keep the detections of the best one."""
        now = time.monotonic()
        seconds = now - self._epoch_started
        self._epoch_started = now
        if not self._tables:
            return
        metrics, losses = dict[str, float](), dict[str, float]()
        if evaluation is not None:
            metrics, losses = evaluation.metrics | evaluation.at_best_f1, evaluation.losses
        training = {"epoch": state.epoch, "lr": result.lr, **result.losses}
        speed = {"seconds": seconds, "images_per_second": result.images_per_second, "waiting": result.waiting}
        row = {"step": state.step, **training, **speed, **metrics}
        for name, loss in losses.items():
            row[f"val_{name}"] = loss
        self._tables["metrics"].writerow(row)
        self._tables["times"].writerow(row)
        self._send(state.step, "train_epoch", training)
        self._send(state.step, "val", metrics | losses)
        self._send(state.step, "train_speed", speed)
        epochs = self._config.train.epochs
        done = max(1, state.step - self._first_step)  # a resume may only have had to record the epoch
        left = (now - self._started) / done * (state.schedule.total_steps - state.step)  # evaluations included
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}G" if torch.cuda.is_initialized() else "-"
        shown = map(metrics.get, ("precision", "recall", "AP", "AP50"))
        cells: list[str | float] = [f"{state.epoch}/{epochs}", *list(result.losses.values())[:4]]
        cells += [*map(format_metric, shown), result.images_per_second, memory, duration(left)]
        if state.epoch == self._first_epoch + 1:
            self.line(epoch_row(list(EPOCH_COLUMNS)))
        self.line(epoch_row(cells) + (" *" if is_best else ""))
        if is_best:
            self.keep_best(state, evaluation)

    def keep_best(self, state: TrainState, evaluation: Evaluation | None) -> None:
        """Keep the detections of the best epoch, before its checkpoint is written and mirrored."""
        if evaluation is None:
            return
        about = {"epoch": state.epoch, "split": "val", "evaluate": compose.to_dictionary(self._config.evaluate)}
        about["trained_on"] = state.description["data"]
        with self.failure_logged("best_detections.npz"):
            report_page.keep_best(self.folder, evaluation._replace(about=about))

    def finish(
        self, state: TrainState, val_set: Annotations, evaluation: Evaluation | None, reason: str | None
    ) -> None:
        """Report the result of a training: metrics by class, plots, page, next steps.

        ``evaluation`` is that of the last epoch, on rank 0; table and plots are of the best epoch.
        ``reason`` says why the training ends.
        """
        if evaluation is None:
            return
        has_trained = state.epoch > self._first_epoch
        if state.epoch < self._config.train.epochs or not has_trained:
            self.line(f"the training ends here: {reason}")
        best, of_epoch = evaluation, state.epoch
        if state.best_epoch != state.epoch:
            with contextlib.suppress(TrainError):  # a full disk may have kept them from being written
                best = report_page.read_best(self.folder)  # on a full disk perhaps an earlier one
                of_epoch = best.about.get("epoch", state.best_epoch)
        self.line(f"metrics of epoch {of_epoch}:", format_table(best), state.best_sentence())
        if self._config.logger.pictures:
            folder = self.folder / plots.FOLDER
            table = self.folder / "metrics.csv"
            plots.save_plot(folder / "curves.png", self.line, plots.draw_curves, table, state.best_epoch)
            read = data.ImageSource(val_set, self._config.data.on_error).read
            plots.draw_evaluation(folder, best, read, val_set.file_name, self.line)
        with self.failure_logged("report.html"):
            report_page.write_report(self.folder)
        self._send(state.step, "val_best", state.best_metrics)
        self._send_pictures(state.step, "plots/*.[jp][pn]g")
        self._is_complete = True
        page = from_here(self.folder / "report.html")
        since = f" since step {self._first_step}" if self._first_step > 0 else ""
        self.line(f"trained for {duration(time.monotonic() - self._started)}{since}; see {page}")
        ckpt = option("ckpt", from_here(self.folder))
        source = printable(option("source", from_here(val_set.path(0))))
        self.line(as_started(f"next:\n  python eval.py {ckpt}\n  python predict.py {ckpt} \\\n      {source}"))

    @contextlib.contextmanager
    def failure_logged(self, what: str) -> Iterator[None]:
        """Log errors of an optional output instead of raising them."""
        try:
            yield
        except Exception as error:  # whatever it is, it is worth a line and not the training
            self.line(f"warning: {what} was not written ({type(error).__name__}: {error})")

    def _send(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        for service in self._services:
            present = {name: metric for name, metric in metrics.items() if metric != ABSENT}
            if present:
                service.send("scalars", step, group, present)

    def _send_pictures(self, step: int, pattern: str) -> None:
        for service in self._services:
            for path in sorted(self.folder.glob(pattern)):
                name = path.relative_to(self.folder).with_suffix("").as_posix()
                name = name.replace("plots/", "val_plots/")  # below the curves, since names are in order
                service.send("picture", step, name, path)


def save_config(folder: Path, config: TrainConfig, comment: str = "") -> None:
    """Write ``config.yaml`` of a run folder, whole or not at all; then it raises TrainError."""
    path = folder / "config.yaml"
    try:
        with run_files.whole_file(path) as file:
            file.write(comment + compose.to_yaml(config))
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror})", "free some space there") from error


@dataclass
class GrowingFile:
    """A text file, opened for each addition: a kill loses nothing, and it may be moved away.

    While it cannot be written, as on a full disk, additions wait; the first failure is a warning.
    """

    path: Path
    waiting: bytes = b""

    def write(self, text: str) -> None:
        """Append whole lines, after those that wait."""
        has_failed = bool(self.waiting)
        self.waiting += text.encode(errors="backslashreplace")
        try:
            # A pipe without a reader is an error, not a wait; so is a link to another place.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
            with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
                while self.waiting:
                    self.waiting = self.waiting[os.write(file.fileno(), self.waiting) :]
        except OSError as error:
            if not has_failed:
                warn(f"cannot write {self.path} ({error.strerror}): its lines wait until it can")


def open_table(path: Path, columns: Sequence[str], done: int = 0) -> "csv.DictWriter[str]":
    """A table such as ``metrics.csv``, to which each row is appended at once.

    Rows whose first column is at most ``done`` are kept, to resume there, with values under their
    names if an older version wrote other columns. Raises TrainError if it cannot be written.
    """
    rows = []
    if done > 0 and path.is_file():
        text = path.read_bytes().decode(errors="surrogateescape")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a kill may have cut the last
        for line in lines[1:]:
            row = dict(zip(lines[0].split(","), line.split(","), strict=False))
            number = row.get(columns[0], "")
            if number.isdecimal() and int(number) <= done:
                rows.append(row)
    try:
        with run_files.whole_file(path) as file:
            table = csv.DictWriter(file, columns, extrasaction="ignore")
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror})", "choose another run_dir") from error
    return csv.DictWriter(GrowingFile(path), columns, extrasaction="ignore")


def epoch_row(cells: Sequence[str | float]) -> str:
    """A row below the titles EPOCH_COLUMNS: texts whole, of numbers up to four digits that fit."""
    texts = []
    for cell, width in zip(cells, EPOCH_COLUMNS.values(), strict=True):
        for digits in (4, 3, 2, 1):
            text = cell if isinstance(cell, str) else f"{cell:.{digits}g}"
            if len(text) <= width:
                break
        texts.append(text.rjust(width))
    return " ".join(texts)
