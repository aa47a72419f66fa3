"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch --gpus-per-node=4 scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from conf.build.agreement import check_agreement
from conf.build.batches import make_sampler, make_train_loader, open_split
from conf.build.device_batch import probed_micro_batch
from conf.build.network import build_model, build_resumed_model, describe, make_loss
from conf.build.report import announce, finish, save_config, tell_places
from conf.entry import layered, run
from conf.resume import continue_run
from conf.schema import AUTO, OnNonFinite, TrainConfig
from data import Annotations, Batch, TrainBatchSampler, TrainDataset, check_same_classes
from eval import Evaluation, Evaluator
from models import Darknet, DarknetLoss, YoloLoss
from train_utils.distributed import (
    World,
    barrier,
    broadcast_module,
    choose_fixed_workspace,
    convert_sync_batchnorm,
    init_distributed_mode,
    max_over_ranks,
    wrap_model,
)
from train_utils.loop.nonfinite import NonFiniteGuard
from train_utils.loop.stop_and_save import StepDecisions, StopRequest, ask_for_requeue
from train_utils.loop.stragglers import RankTable
from train_utils.loop.train_epoch import EpochResult, rehearse, train_one_epoch
from train_utils.numerics import (
    autocast_dtype,
    check_same_bits,
    choose_benchmark,
    keep_freed_memory,
    seed_everything,
    weights_dtype,
)
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.parallel.wait_clock import WaitClock
from train_utils.parallel.wrap import time_waiting
from train_utils.pictures.plots import draw_targets
from train_utils.run.checkpoint_writer import CheckpointWriter
from train_utils.run.log import MetricsCsv, Progress, RunLog, log_warnings
from train_utils.run.run_folder import RunFolder, on_main, open_run_folder
from train_utils.run.run_state import LOSS_NAMES, RunState, continue_from, read_run
from train_utils.scores.coco_eval import ABSENT, FIGURES
from train_utils.shell import option

COLUMNS = ("epoch", "step", "lr", *LOSS_NAMES, *FIGURES)  # of metrics.csv: the same in every repetition of a run
TIME_COLUMNS = ("epoch", "seconds", "images_per_second", "waiting")  # of times.csv
SHOWN = ("epoch", "step", *LOSS_NAMES, "AP", "AP50", "AP75", "seconds", "images_per_second")  # on the terminal


def train(config: TrainConfig) -> dict[str, float]:
    """Train as configured; the best epoch's figures on the first process, {} on the others."""
    with StopRequest() as stop, warnings.catch_warnings(), ExitStack() as stack:
        return train_until(config, stop, stack)


def train_until(config: TrainConfig, stop: StopRequest, stack: ExitStack) -> dict[str, float]:
    """``train`` until it is over or a stop is requested; ``stack`` holds the run folder."""
    if config.train.deterministic:
        choose_fixed_workspace()
    world = init_distributed_mode(config.train.device.value, config.train.timeout_seconds)
    deterministic, sizes = config.train.deterministic, config.train.multi_scale
    check_same_bits(world.device, deterministic, config.train.sync_bn, config.train.device_batch_size == AUTO)
    sizes_change = config.train.rect or sizes[0] != sizes[1]
    benchmark, note = choose_benchmark(config.train.cudnn_benchmark, world.device, deterministic, sizes_change)
    seed_everything(config.train.seed, deterministic, benchmark)
    keep_freed_memory()
    dtype = autocast_dtype(config.train.precision.value, world.device)

    # Data and network: all that can be wrong with them shows before a run folder is made. One that is there is claimed
    # before its checkpoint is read: else it might not be the last one.
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
    wrapped = wrap_model(state.model, world, config.train.seed if deterministic else None)
    loss = make_loss(model.heads, config.loss)
    if saved is not None:
        rehearse(wrapped, loss, state.optimizer, 2 * model.max_stride, world, dtype)
        log.line(state.take_up(saved, folder.path, world, config.resume_force))
        del saved
        on_main(world, lambda: save_config(folder.path, config))  # only now: a resume that was refused leaves it alone
    elif world.is_main and config.logger.pictures:
        draw_first_batch(dataset, sampler, train_set.names, folder.path / "train_batch.jpg")
    return Training(
        config, world, folder, log, state, wrapped, loss, schedule, sampler, loader, evaluator, train_set, dtype, stop
    ).run()


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

    Optimiser, average and checkpoints hold the plain model; only the training loop sees the wrapper.
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
        """Train the epochs that are left; the best epoch's figures on the first process, {} on the others."""
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
        """Why there is nothing to train after so many epochs, the same on all processes; None where there is."""
        config, state = self.config.train, self.state
        if epochs_done >= config.epochs:
            return f"all {config.epochs} epochs are done"
        waited = epochs_done - state.best_epoch if state.evaluated_epoch == state.epoch else 0
        # Only the first process has the figures.
        if max_over_ranks([self.world.is_main and 0 < config.patience <= waited])[0]:
            return f"no better AP in {config.patience} epochs (train.patience)"
        return None

    def finish(self, evaluation: Evaluation | None) -> None:
        """Show what the training gave, after the ``evaluation`` of the first process or, without one, a new one."""
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


def draw_first_batch(dataset: TrainDataset, sampler: TrainBatchSampler, names: Sequence[str], path: Path) -> None:
    """The first batch of this process as the network gets it, with its boxes."""
    batch = dataset.__getitems__(next(iter(sampler)))
    pictures = (batch.network_input() * 255).round().byte().numpy()
    draw_targets(pictures, batch.targets.numpy(), names, path)


def complete(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The whole configuration: with ``resume`` that run's own; folders absolute, so that it holds elsewhere too."""
    whole = continue_run(given, named)
    folders = [key for key in ("root", "index_dir") if key in whole["data"]]
    return layered(whole, {"data": {key: str(Path(whole["data"][key]).absolute()) for key in folders}})


if __name__ == "__main__":
    run("train", TrainConfig, train, complete)
