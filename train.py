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

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conf.build.batches import MEMORY_FILES, make_train_loader, open_sets
from conf.build.checkpoints import extend_run, tell_extension
from conf.build.loss import fit_loss, make_loss
from conf.build.report import announce, draw_first_batch, save_config
from conf.build.start import fit_anchors, prepare_numerics, resolve, spare_heads, start_state
from conf.build.training import Training
from conf.network import build_model, build_resumed_model
from conf.programs import Outcome, callable_from_python
from conf.resume import check_options
from conf.schema import TrainConfig
from data import Annotations, Batch, TrainBatchSampler, shared_memory_note
from eval import Evaluator
from models import Darknet
from models.config import AUTO
from train_utils.checkpoint import CheckpointWriter, continue_from
from train_utils.compiled import compile_step
from train_utils.distributed import World, init_distributed_mode, wrap_ddp
from train_utils.engine import Loss, NonFiniteGuard, rehearse, train_one_epoch
from train_utils.launch import fix_cublas_workspace
from train_utils.log import RunLog, log_warnings
from train_utils.numerics import autocast_dtype
from train_utils.optim import Schedule
from train_utils.run_folder import on_main, open_run_folder
from train_utils.stop import StopRequest
from train_utils.train_state import TrainState


@callable_from_python("train")
def train(config: TrainConfig) -> Outcome:
    """Train as configured; return the best epoch's figures and the run folder.

    From Python it takes a list of overrides as well: ``train(["data=coco", "train.epochs=2"])``.
    """
    with StopRequest() as stop, warnings.catch_warnings(), ExitStack() as stack:
        return train_until(config, stop, stack)


def train_until(config: TrainConfig, stop: StopRequest, stack: ExitStack) -> Outcome:
    """Train until the last epoch or until ``stop``; ``stack`` holds the run folder."""
    options = config.train
    if options.deterministic:
        fix_cublas_workspace()
    world = init_distributed_mode(options.device.value, options.timeout_seconds)
    prepare_numerics(config, world)
    dtype = autocast_dtype(options.precision.value, world.device)

    # Data and network: whatever is wrong with them shows before a run folder is made. An existing
    # folder is locked before its checkpoint is read: another run could still write a later one.
    opening = open_run_folder(world, config.name, config.run_dir, config.resume)
    folder = stack.enter_context(opening) if config.resume is not None else None
    saved, saved_note = continue_from(config.resume)
    if saved is not None:
        check_options(config)
    config = extend_run(config, saved)
    given, config = config, resolve(config, world, saved)
    train_set, val_set = open_sets(config, world)
    config, anchors_note = fit_anchors(config, world, train_set)
    if saved is None:
        fitted = given.model.anchors == AUTO
        model, weights_note = build_model(config.model, len(train_set.names), world=world, fitted=fitted)
    else:
        model, weights_note = build_resumed_model(config.model, len(train_set.names), saved), None
    config, loss_notes = fit_loss(config, world, model, train_set)
    dataset, sampler, loader = make_train_loader(config, train_set, model.max_stride, world)
    size = config.evaluate.image_size or options.image_size
    seconds = options.timeout_seconds
    evaluator = Evaluator(val_set, config.evaluate, size, model, config.data, world, seconds)

    # Run folder and log. A job that restarts finds its folder by the options saved there.
    folder = folder or stack.enter_context(opening)
    log = RunLog(folder, world.is_main)
    if saved is None:
        on_main(world, lambda: save_config(folder, given))
    log_warnings(log, "deterministic")  # torch names each operator that is not deterministic
    announce(log, folder, config, world, train_set, val_set, sampler, model)
    train_pixels = sampler.images_per_rank * sampler.sizes.most_pixels(1, 1)
    pixels = max(train_pixels, config.evaluate.batch_size * size**2)
    memory_note = shared_memory_note(loader, pixels, world.local_world_size, MEMORY_FILES)
    for note in (saved_note, anchors_note, *loss_notes, weights_note, memory_note):
        log.line(note)

    state, schedule, ddp_model, loss, to_input = build_state(
        config, world, model, train_set, sampler, dtype, log, saved
    )
    if saved is not None:
        rehearse(ddp_model, loss, state, world, dtype, 2 * model.max_stride)
        log.line(state.resume(saved, folder, world))
        del saved
        on_main(world, lambda: save_config(folder, given))  # not before: a refused resume changes nothing
    elif world.is_main and config.logger.pictures:
        draw_first_batch(dataset, sampler, train_set.names, folder / "train_batch.jpg")
    writer = CheckpointWriter(folder, log.line, options.save_every_steps, options.save_every_minutes)
    train_rest = partial(
        train_one_epoch,
        ddp_model,
        loss,
        loader,
        state,
        schedule,
        world,
        NonFiniteGuard(options.max_nonfinite_steps, log.line),
        stop,
        writer,
        accumulate=sampler.accumulate,
        autocast_dtype=dtype,
        to_input=to_input,
    )
    training = Training(config, world, folder, log, state, train_rest, stop, writer, sampler, loader, evaluator)
    return Outcome(training.run(), folder)


def build_state(
    config: TrainConfig,
    world: World,
    model: Darknet,
    train_set: Annotations,
    sampler: TrainBatchSampler,
    dtype: torch.dtype | None,
    log: RunLog,
    saved: dict[str, Any] | None,
) -> tuple[TrainState, Schedule, torch.nn.Module, Loss, Callable[[Any], Tensor]]:
    """The state, its schedule, the wrapped model, the loss, and what makes floats of a batch."""
    options, steps = config.train, sampler.steps_per_epoch
    optim, rates_note = spare_heads(config, world, model, options.epochs * len(train_set))
    schedule = Schedule(optim, steps, steps * options.epochs, tuple(steps * at for at in options.extended_after))
    log.line(rates_note)
    log.line(tell_extension(config, schedule, saved))
    state = start_state(config, world, model, train_set, sampler, schedule, dtype)
    loss: Loss = make_loss(model.heads, config.loss)
    to_input: Callable[[Any], Tensor] = Batch.network_input
    if options.compile.value != "off":
        sizes, mode = sampler.sizes.largest - sampler.sizes.smallest + 1, options.compile.value
        loss, to_input = compile_step(state.model, loss, to_input, mode, sizes, log.line)
    return state, schedule, wrap_ddp(state.model, world), loss, to_input
