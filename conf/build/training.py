"""The epochs of a training, what is written after each, and how it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from conf.build.evaluator import Evaluation, Evaluator
from conf.build.report import finish
from conf.schema import OnNonFinite, TrainConfig
from data import Annotations, Batch, TrainBatchSampler
from models import DarknetLoss, YoloLoss
from train_utils.distributed import (
    World,
    barrier,
    broadcast_module,
    max_over_ranks,
)
from train_utils.loop.nonfinite import NonFiniteGuard
from train_utils.loop.stop_and_save import StepDecisions, StopRequest, ask_for_requeue
from train_utils.loop.stragglers import RankTable
from train_utils.loop.train_epoch import EpochResult, train_one_epoch
from train_utils.optim import Schedule
from train_utils.parallel.wait_clock import WaitClock
from train_utils.parallel.wrap import time_waiting
from train_utils.run.checkpoint_writer import CheckpointWriter
from train_utils.run.log import MetricsCsv, Progress, RunLog
from train_utils.run.run_folder import RunFolder, on_main
from train_utils.run.run_state import LOSS_NAMES, RunState, read_run
from train_utils.scores.coco_eval import ABSENT, FIGURES
from train_utils.shell import option

COLUMNS = ("epoch", "step", "lr", *LOSS_NAMES, *FIGURES)  # of metrics.csv: the same in every repetition of a run
TIME_COLUMNS = ("epoch", "seconds", "images_per_second", "waiting")  # of times.csv
SHOWN = ("epoch", "step", *LOSS_NAMES, "AP", "AP50", "AP75", "seconds", "images_per_second")  # on the terminal


@dataclass
class Training:
    """A training that is ready to run: its epochs, what is written after each, and how it ends."""

    config: TrainConfig
    world: World
    folder: RunFolder
    log: RunLog
    state: RunState
    wrapped: nn.Module  # state.model as the loop calls it
    loss: YoloLoss | DarknetLoss
    schedule: Schedule
    sampler: TrainBatchSampler
    loader: DataLoader[Batch]
    evaluator: Evaluator
    train_set: Annotations
    dtype: torch.dtype | None  # of autocast
    stop: StopRequest

    def __post_init__(self) -> None:
        config, self.path = self.config.train, self.folder.path
        self.ended_after = max_over_ranks([self.folder.ended_after])[0]  # known to the first process
        # With train.best_only the checkpoint is an earlier one.
        epochs_done = max(self.state.epoch, self.ended_after)
        self.over = self.why_over(epochs_done)
        if self.over is None:
            epochs_done, self.ended_after, self.folder.ended_after = self.state.epoch, 0, 0
        self.metrics = MetricsCsv(self.path / "metrics.csv", COLUMNS, self.world.is_main, epochs_done)
        self.times = MetricsCsv(self.path / "times.csv", TIME_COLUMNS, self.world.is_main, epochs_done)
        self.ranks = RankTable(self.path / "ranks.csv", self.world.is_main, epochs_done, self.log.line)
        self.clock = WaitClock(self.world.device)
        time_waiting(self.wrapped, self.clock)
        self.writer = CheckpointWriter(self.log.line)
        self.decisions = StepDecisions(
            self.stop, config.save_every_steps, config.save_every_minutes, self.writer.failed
        )
        self.guard = NonFiniteGuard(
            self.world,
            self.path,
            config.max_nonfinite_steps,
            self.log.line,
            self.train_set.file_name,
            self.roll_back if config.on_nonfinite is OnNonFinite.rollback else None,
        )

    def run(self) -> dict[str, float]:
        """Train the epochs that are left; the best epoch's figures on the first process, {} on the
        others.
        """
        state, over = self.state, self.over
        evaluation = stopped_by = None
        if over is not None:
            self.log.line(f"nothing to do: {over}" if self.ended_after else f"{over}, but the figures were not shown")
        while over is None and stopped_by is None:
            started = time.perf_counter()
            result = self.train_epoch()
            stopped_by = result.stopped_by
            if state.step < (state.epoch + 1) * self.sampler.steps_per_epoch:
                break  # stopped within the epoch
            state.end_epoch()
            evaluation = self.evaluate()
            self.write_epoch(result, evaluation.scores.figures if evaluation is not None else {}, started)
            stopped_by = stopped_by or self.decisions.decide(True, state.step).stop
            over = self.why_over(state.epoch)
            if over is not None and state.epoch < self.config.train.epochs:
                self.log.line(f"the training ends here: {over}")
        on_main(self.world, self.close_writer)  # where the last checkpoint is missing, all processes fail
        if stopped_by is not None and over is None:
            self.log.line(
                f"stopped at step {state.step} by {stopped_by.name}; {option('resume', self.path)} goes on from there"
            )
            ask_for_requeue(self.world, stopped_by)
        elif self.ended_after == 0:
            self.finish(evaluation)
        return state.best_figures

    def why_over(self, epochs_done: int) -> str | None:
        """Why there is nothing to train after so many epochs, the same on all processes; None where
        there is.
        """
        config, state = self.config.train, self.state
        if epochs_done >= config.epochs:
            return f"all {config.epochs} epochs are done"
        waited = epochs_done - state.best_epoch if state.evaluated_epoch == state.epoch else 0
        # Only the first process has the figures.
        if max_over_ranks([self.world.is_main and 0 < config.patience <= waited])[0]:
            return f"no better AP in {config.patience} epochs (train.patience)"
        return None

    def finish(self, evaluation: Evaluation | None) -> None:
        """Show what the training gave, after the ``evaluation`` of the first process or, without
        one, a new one.
        """
        if not max_over_ranks([evaluation is not None])[0]:
            evaluation = self.score()
        if evaluation is not None:
            val_set = self.evaluator.annotations
            finish(self.log, self.path, self.config, self.state, val_set, evaluation.scores, evaluation.detections)
        self.folder.ended_after = self.state.epoch

    def close_writer(self) -> None:
        """End the thread that writes; raises CheckpointError if its last write failed."""
        self.writer.close()

    def train_epoch(self) -> EpochResult:
        """Train what is left of the epoch under way."""
        config, state, sampler = self.config, self.state, self.sampler
        steps_done = state.step - state.epoch * sampler.steps_per_epoch
        sampler.set_epoch(state.epoch, steps_done * sampler.accumulate)
        title = f"epoch {state.epoch + 1}/{config.train.epochs}"
        return train_one_epoch(
            model=self.wrapped,
            loss=self.loss,
            loader=self.loader,
            state=state,
            schedule=self.schedule,
            world=self.world,
            accumulate=sampler.accumulate,
            autocast_dtype=self.dtype,
            to_input=Batch.network_input,
            progress=Progress(len(sampler), title, self.world.is_main, config.logger.lines_per_epoch),
            guard=self.guard,
            decisions=self.decisions,
            save=self.save,
            check_sync_every=config.train.check_sync_every,
            clock=self.clock,
        )

    def save(self, is_best: bool = False, best_only: bool = False) -> None:
        """Have checkpoints written; not where another run has the folder by now."""
        self.folder.check()
        self.state.save(self.writer, self.path, is_best, best_only)

    def evaluate(self) -> Evaluation | None:
        """Score the averaged weights where that is due after this epoch."""
        return self.score() if self.config.evaluate.is_due(self.state.epoch, self.config.train.epochs) else None

    def score(self) -> Evaluation | None:
        """Score the averaged weights; None on all processes but the first."""
        average = self.state.average.module
        broadcast_module(average)  # without SyncBatchNorm each process averaged its own statistics
        return self.evaluator(average)

    def write_epoch(self, result: EpochResult, figures: dict[str, float], started: float) -> None:
        """Write the epoch's row of the tables, then its checkpoint, and show a line."""
        state = self.state
        is_best = state.record(figures)
        # The table first: a run that ends in between repeats the epoch, and its row.
        row = {"epoch": state.epoch, "step": state.step, "lr": result.lr, **result.losses, **figures}
        took = {"seconds": time.perf_counter() - started, "images_per_second": result.images_per_second}
        self.metrics.write(row)
        self.times.write({"epoch": state.epoch, **took, "waiting": result.waiting})
        self.ranks.write(state.epoch, result.times)
        self.save(is_best, self.config.train.best_only)
        self.decisions.saved()
        shown = {key: value for key, value in (row | took).items() if key not in FIGURES or value != ABSENT}
        self.log.line("  ".join(f"{key} {shown[key]:.4g}" for key in SHOWN if key in shown))

    def roll_back(self) -> str:
        """Take weights and optimiser from the last checkpoint; what was done, for the log."""
        self.writer.wait()
        barrier()
        self.state.restore_weights(read_run(self.path)[0])
        return "weights and optimiser are those of the last checkpoint again; the training goes on with other images"
