"""The epochs of a training: what each leaves behind, and how the training ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import DataLoader

from conf.build.report import close_run, finish, keep_evaluation, report_run, spare
from conf.entry import to_dictionary
from conf.schema import TrainConfig
from data import Batch, TrainBatchSampler
from eval import Evaluation, Evaluator
from models import Darknet
from train_utils.checkpoint import CheckpointWriter
from train_utils.coco_eval import ABSENT, FIGURES
from train_utils.distributed import World, broadcast_module, max_over_ranks
from train_utils.engine import EpochResult
from train_utils.log import MetricsCsv, RunLog
from train_utils.loggers import open_loggers
from train_utils.options import option
from train_utils.progress import Progress, epoch_row, epoch_titles, memory
from train_utils.run_folder import on_main
from train_utils.stop import StopRequest, ask_for_requeue
from train_utils.train_state import LOSS_NAMES, TrainState

COLUMNS = ("epoch", "step", "lr", *LOSS_NAMES, *FIGURES)  # of metrics.csv: equal in every repetition of a run
TIME_COLUMNS = ("epoch", "seconds", "images_per_second", "waiting")  # of times.csv


@dataclass
class Training:
    """A training that is ready to run."""

    config: TrainConfig
    world: World
    folder: Path
    log: RunLog
    state: TrainState
    train: Callable[..., EpochResult]  # engine.train_one_epoch with all that lasts
    stop: StopRequest
    writer: CheckpointWriter
    sampler: TrainBatchSampler
    loader: DataLoader[Batch]
    evaluator: Evaluator

    def __post_init__(self) -> None:
        is_main = self.world.is_main
        self.metrics = MetricsCsv(self.folder / "metrics.csv", COLUMNS, is_main, self.state.epoch)
        self.times = MetricsCsv(self.folder / "times.csv", TIME_COLUMNS, is_main, self.state.epoch)
        self.images = self.sampler.steps_per_epoch * self.config.train.batch_size
        assert isinstance(self.state.model, Darknet)
        self.heads_kept = self.state.model.heads_kept
        self.started, self.first_epoch = time.monotonic(), self.state.epoch

    def run(self) -> dict[str, float]:
        """Train the remaining epochs; return the best epoch's figures on rank 0, {} elsewhere."""
        run = self.folder, self.state.step, to_dictionary(self.config)
        with open_loggers(self.config.logger, self.world, *run, self.log.line) as self.loggers:
            self.loggers.pictures(self.state.step, "train_batch.jpg")
            self.score_start()
            return self.run_epochs()

    def run_epochs(self) -> dict[str, float]:
        """Train the remaining epochs and show the result, or say why the training stopped."""
        state = self.state
        over = self.why_over()
        evaluation = None
        if over is not None:
            self.log.line(f"nothing to train: {over}")
        while over is None and self.stop.agreed is None:
            started = time.perf_counter()
            result = self.train_epoch()
            if state.step < (state.epoch + 1) * self.sampler.steps_per_epoch:
                break  # stopped within the epoch
            state.end_epoch()
            evaluation = self.score() if self.config.evaluate.is_due(state.epoch, self.config.train.epochs) else None
            self.write_epoch(result, evaluation, started)
            self.stop.agree()
            over = self.why_over()
            if over is not None and state.epoch < self.config.train.epochs:
                self.log.line(f"the training ends here: {over}")
        on_main(self.world, self.writer.close)  # all ranks fail if the last checkpoint was not written
        if self.stop.agreed is not None and over is None:
            self.log.line(
                f"stopped at step {state.step} by {self.stop.agreed.name}; {option('resume', self.folder)} continues"
                " from there"
            )
            ask_for_requeue(self.world, self.stop.agreed)
        else:
            self.finish(evaluation)
        return state.best_figures

    def why_over(self) -> str | None:
        """Why training is over, the same on all ranks; None if it is not."""
        config, state = self.config.train, self.state
        if state.epoch >= config.epochs:
            return f"all {config.epochs} epochs are done"
        since = max(state.best_epoch, *config.extended_after, 0)  # an extension has its own patience
        waited = state.epoch - since if state.evaluated_epoch == state.epoch else 0
        # Only rank 0 has the figures.
        if max_over_ranks([self.world.is_main and 0 < config.patience <= waited])[0]:
            return f"no better AP in {config.patience} epochs (train.patience)"
        return None

    def train_epoch(self) -> EpochResult:
        """Train the rest of the current epoch."""
        config, state, sampler = self.config, self.state, self.sampler
        steps_done = state.step - state.epoch * sampler.steps_per_epoch
        sampler.set_epoch(state.epoch, steps_done * sampler.accumulate)
        epoch, rest = state.epoch + 1, self.images - steps_done * config.train.batch_size
        progress = Progress(rest, f"epoch {epoch}/{config.train.epochs}", self.world.is_main)
        return self.train(progress=progress, log_step=self.log_step)

    def log_step(self, figures: Mapping[str, float]) -> None:
        """Log the step just made, if it is one of each ``logger.every_steps``."""
        step, every = self.state.step, self.config.logger.every_steps
        if every > 0 and step % every == 0:
            self.loggers.step(step, figures)

    def score(self) -> Evaluation | None:
        """Score the averaged weights; None off rank 0."""
        average = self.state.average.module
        broadcast_module(average)  # without SyncBatchNorm each rank averaged its own statistics
        return self.evaluator(average)

    def score_start(self) -> None:
        """Say what initial weights score whose heads are kept: the training has to beat it."""
        if self.state.step > 0 or not self.heads_kept:
            return
        evaluation = self.score()
        figures = evaluation.scores.figures if evaluation is not None else {}
        if figures.get("AP", ABSENT) != ABSENT:
            self.log.line(f"the initial weights score AP {figures['AP']:.4f}, AP50 {figures['AP50']:.4f}")

    def write_epoch(self, result: EpochResult, evaluation: Evaluation | None, started: float) -> None:
        """Write the epoch's row of each table, then its checkpoint, and log a line."""
        state, figures = self.state, evaluation.scores.figures if evaluation is not None else {}
        is_best = state.record(figures)
        # The tables first: a run that ends in between repeats the epoch, and its row.
        row = {"epoch": state.epoch, "step": state.step, "lr": result.lr, **result.losses, **figures}
        took = {"seconds": time.perf_counter() - started, "images_per_second": result.images_per_second}
        self.metrics.write(row)
        self.times.write({"epoch": state.epoch, **took, "waiting": result.waiting})
        self.loggers.epoch(state.step, row, took | {"waiting": result.waiting})
        if is_best and evaluation is not None:
            keep_evaluation(self.folder, self.evaluator.ground_truth, evaluation, self.log.line)
        self.writer.save(state.to_plain(), is_best)
        epochs = self.config.train.epochs
        pace = (time.monotonic() - self.started) / (state.epoch - self.first_epoch)  # evaluations included
        about = {"epoch": f"{state.epoch}/{epochs}", "memory": memory(), "left": pace * (epochs - state.epoch)}
        if state.epoch == self.first_epoch + 1:
            self.log.line(epoch_titles())
        self.log.line(epoch_row(row | took | about, is_best))

    def finish(self, evaluation: Evaluation | None) -> None:
        """Show the result of the training, after rank 0's last ``evaluation`` or a new one."""
        if not max_over_ranks([evaluation is not None])[0]:
            evaluation = self.score()
        if evaluation is not None:
            found = evaluation.scores, evaluation.detections
            finish(self.log, self.folder, self.config, self.state, self.evaluator.annotations, *found)
            spare(self.log.line, "report.html", lambda: report_run(self.folder))
            self.loggers.result(self.state.step, self.state.best_figures, evaluation.scores)
            close_run(self.log, self.folder, time.monotonic() - self.started)
