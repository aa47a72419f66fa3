"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch --gpus-per-node=4 scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("train")
    raise SystemExit

import time
from contextlib import ExitStack

import torch

from conf.auto import describe_run, resolve_auto
from conf.batches import build_dataset, build_sampler, open_images, open_split
from conf.entry import to_dictionary
from conf.network import build_loss
from conf.programs import Outcome, callable_from_python
from conf.report import announce, draw_first_batch, finish_run, save_config, write_best
from conf.schema import TrainConfig
from data import Batch, check_same_classes, make_loader
from eval import Evaluator
from train_utils.checkpoint import CheckpointWriter, continue_from
from train_utils.coco_eval import Evaluation
from train_utils.compiled import check_compiling, compile_step
from train_utils.distributed import broadcast_module, init_distributed_mode, max_over_ranks, wrap_ddp
from train_utils.engine import ForwardPass, NonFiniteGuard, explain_out_of_memory, rehearse, train_one_epoch
from train_utils.log import RunLog
from train_utils.loggers import Loggers
from train_utils.numerics import autocast_dtype, prepare_numerics, weights_dtype
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.options import option
from train_utils.progress import Progress
from train_utils.run_folder import on_main, open_run_folder
from train_utils.stop import StopRequest, ask_for_requeue
from train_utils.sync_batchnorm import convert_sync_batchnorm
from train_utils.train_state import TrainState


@callable_from_python("train")
def train(config: TrainConfig) -> Outcome:
    """Train as configured; return the best epoch's figures and the run folder.

    From Python it takes a list of overrides as well: ``train(["data=coco", "train.epochs=2"])``.
    """
    with StopRequest() as stop, ExitStack() as stack:
        return train_until(config, stop, stack)


def train_until(config: TrainConfig, stop: StopRequest, stack: ExitStack) -> Outcome:  # noqa: PLR0915 - the story
    """Train until the last epoch or until ``stop``; ``stack`` holds the run folder and loggers."""
    world = init_distributed_mode(config.train.device.value, config.train.timeout_seconds)
    prepare_numerics(config.train)
    check_compiling(config.train.compile.value, world, config.train.rect)
    dtype = autocast_dtype(config.train.precision.value, world.device)

    # Whatever is wrong with data and network shows before a new run folder is made. An existing one
    # is locked before its checkpoint is read: another run could still write a later one.
    opening = open_run_folder(world, config.name, config.run_dir, config.resume)
    folder = stack.enter_context(opening) if config.resume is not None else None
    saved, saved_note = continue_from(config.resume)
    given = config
    train_set, val_set = open_split(given.data, "train", world), open_split(given.data, "val", world)
    check_same_classes(train_set, val_set)

    # What `auto` means for data, network, loss and rates is decided here, once.
    config, model, notes = resolve_auto(given, train_set, world, saved)
    loss = build_loss(model.heads, config.loss)

    # The global batch is formed first, then dealt: more ranks change the speed, not the training.
    options, size = config.train, config.evaluate.image_size or config.train.image_size
    sampler = build_sampler(config, train_set, model.max_stride, world)
    dataset = build_dataset(config, train_set, open_images(train_set, config.data, world))
    loader = make_loader(dataset, sampler, config.data.workers, world.device, options.timeout_seconds)
    evaluator = Evaluator(val_set, config.evaluate, size, model, config.data, world, options.timeout_seconds)

    folder = folder or stack.enter_context(opening)
    log = RunLog(folder, world.is_main)
    announce(log, folder, config, world, train_set, val_set, sampler, model)
    for note in (saved_note, *notes):
        log.line(note)

    # All that training changes and a checkpoint holds. It holds the plain model; DDP wraps it last.
    model = model.to(world.device, weights_dtype(options.precision.value)).to(memory_format=torch.channels_last)
    broadcast_module(model)
    if options.sync_bn:
        convert_sync_batchnorm(model, world)
    steps = sampler.steps_per_epoch
    schedule = Schedule(config.optim, steps, steps * options.epochs)
    state = TrainState(
        model=model,
        average=WeightAverage(model, schedule),
        optimizer=make_optimizer(model, config.optim),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        description=describe_run(config, given, model, train_set),
        seen=model.seen,
    )
    sizes = sampler.sizes.largest - sampler.sizes.smallest + 1
    loss, to_input = compile_step(model, loss, Batch.network_input, options.compile.value, sizes)
    forward = ForwardPass(wrap_ddp(model, world), loss, to_input, dtype, world)
    if saved is not None:
        rehearse(forward, state, 2 * model.max_stride)
        log.line(state.resume(saved, folder, world))
        del saved
    elif world.is_main and config.logger.pictures:
        draw_first_batch(dataset, sampler, train_set.names, folder / "train_batch.jpg")
    on_main(world, lambda: save_config(folder, given))  # not before: a refused resume changes nothing

    guard = NonFiniteGuard(model, options.max_nonfinite_steps, log.line)
    writer = CheckpointWriter(folder, log.line, options.save_every_steps, options.save_every_minutes)
    loggers = Loggers(folder, config.logger, state, options.epochs, log)
    stack.callback(loggers.close)
    on_main(world, lambda: loggers.start(to_dictionary(config)))
    loggers.pictures("train_batch.jpg")

    evaluation, over = None, state.why_over(options, world)
    log.line(over and f"nothing to train: {over}")
    while over is None and stop.agreed is None:
        started, steps_done = time.perf_counter(), state.step - state.epoch * steps
        sampler.set_epoch(state.epoch, steps_done * sampler.accumulate)
        images, title = (steps - steps_done) * options.batch_size, f"epoch {state.epoch + 1}/{options.epochs}"
        with (
            Progress(images, title, world.is_main) as progress,
            explain_out_of_memory(sampler.images_per_rank, sampler.accumulate, world.world_size),
        ):
            result = train_one_epoch(
                forward, loader, state, guard, stop, writer, loggers.step, progress, sampler.accumulate
            )
        if state.step < (state.epoch + 1) * steps:
            break  # stopped within the epoch
        state.end_epoch()
        is_due = config.evaluate.is_due(state.epoch, options.epochs)
        evaluation = evaluate_average(evaluator, state) if is_due else None
        figures = evaluation.figures if evaluation is not None else {}
        is_best = state.record(figures)
        # The tables first: a run that ends in between repeats the epoch, and its row.
        loggers.epoch(result, figures, time.perf_counter() - started, is_best)
        if is_best and evaluation is not None:
            write_best(folder, evaluation, log.line)
        writer.save(state.to_plain(), is_best)
        stop.agree()
        over = state.why_over(options, world)
        if over is not None and state.epoch < options.epochs:
            log.line(f"the training ends here: {over}")

    on_main(world, writer.close)  # all ranks fail if the last checkpoint was not written
    if stop.agreed is not None and over is None:
        again = option("resume", folder)
        log.line(f"stopped at step {state.step} by {stop.agreed.name}; {again} continues from there")
        ask_for_requeue(world, stop.agreed)
        return Outcome(state.best_figures, folder)
    if not max_over_ranks([evaluation is not None])[0]:
        evaluation = evaluate_average(evaluator, state)
    if evaluation is not None:
        finish_run(log, loggers, folder, config, state, val_set, evaluation)
    return Outcome(state.best_figures, folder)


def evaluate_average(evaluator: Evaluator, state: TrainState) -> Evaluation | None:
    """Score the averaged weights; None off rank 0."""
    average = state.average.module
    broadcast_module(average)  # without SyncBatchNorm each rank averaged its own statistics
    return evaluator(average)
