"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch --gpus-per-node=4 scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.run

    raise SystemExit(conf.run.run("train"))

import time
from contextlib import ExitStack

import torch

import data
from conf import compose, run, schema
from conf.options import option
from data.progress import Progress
from eval import Evaluator
from train_utils import (
    auto,
    build,
    checkpoint,
    compile,
    distributed,
    engine,
    numerics,
    optim,
    run_folder,
    run_report,
    sync_batchnorm,
)
from train_utils.log import RunLog
from train_utils.loggers import Loggers
from train_utils.report_page import keep_best
from train_utils.stop import StopRequest, ask_for_requeue
from train_utils.train_state import TrainState


@run.callable_from_python("train")
def train(requested: schema.TrainConfig) -> run.Outcome:  # noqa: PLR0915 - the story of a training
    """Train as configured; return the best epoch's metrics and the run folder.

    From Python it takes a list of overrides as well: ``train(["data=coco", "train.epochs=2"])``.
    """
    with StopRequest() as stop, ExitStack() as stack:
        world = distributed.init_distributed_mode(requested.train.device.value, requested.train.timeout_seconds)
        numerics.prepare_numerics(requested.train)
        mode = compile.choose_mode(requested.train, world)
        dtype = numerics.autocast_dtype(requested.train.precision.value, world.device)

        # Whatever is wrong with data and network shows before a new run folder is made. An existing
        # one is locked before its checkpoint is read: another run could still write a later one.
        opening = run_folder.open_run_folder(world, requested.name, requested.run_dir, requested.resume)
        folder = stack.enter_context(opening) if requested.resume is not None else None
        saved, saved_note = checkpoint.continue_from(requested.resume)
        train_set, val_set = (build.open_split(requested.data, split, world) for split in ("train", "val"))
        data.check_same_classes(train_set, val_set)

        # What `auto` means for data, network, loss and rates is decided here, once.
        config, model, notes = auto.resolve_auto(requested, train_set, world, saved)
        options = config.train
        loss = build.build_loss(model.heads, config.loss)

        # The global batch is formed, then dealt: more ranks change the speed, not the training.
        sampler = build.build_sampler(config, train_set, model.max_stride, world)
        dataset = build.build_dataset(config, train_set, build.open_images(train_set, config.data, world))
        size, timeout = config.evaluate.image_size or options.image_size, options.timeout_seconds
        loader = data.make_loader(dataset, sampler, config.data.workers, world.device, timeout, sampler.batch_bytes)
        evaluator = Evaluator(
            val_set, config.evaluate, image_size=size, model=model, data_options=config.data, world=world,
            timeout_seconds=timeout, training_dtype=dtype, loss=config.loss,
        )  # fmt: skip

        folder = folder or stack.enter_context(opening)
        log = RunLog(folder, world.is_main)
        stack.enter_context(run_report.errors_kept(log))
        run_report.announce(log, folder, config, world, train_set, val_set, sampler, model)
        for note in (saved_note, *notes):
            log.line(note)

        # All that training changes and a checkpoint holds; of the model the plain one, without DDP.
        precision, steps = numerics.weights_dtype(options.precision.value), sampler.steps_per_epoch
        model = model.to(world.device, precision).to(memory_format=torch.channels_last)
        distributed.broadcast_module(model)
        if options.sync_bn:
            sync_batchnorm.convert_sync_batchnorm(model, world)
        state = TrainState(
            model=model,
            average=optim.WeightAverage(model, optim.Schedule(config.optim, steps, steps * options.epochs)),
            optimizer=optim.make_optimizer(model, config.optim),
            scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
            description=auto.describe_run(config, requested, model, train_set),
            seen=model.seen,
        )
        step_loss, to_input = compile.compile_step(model, loss, data.Batch.network_input, mode, sampler.sizes.count)
        forward = engine.ForwardPass(distributed.wrap_ddp(model, world), step_loss, to_input, dtype, world)
        if saved is not None:
            engine.rehearse(forward, state, 2 * model.max_stride)
            log.line(state.resume(saved, folder, world))
            del saved
        elif world.is_main and config.logger.pictures:
            run_report.draw_first_batch(dataset, sampler, train_set.names, folder / "train_batch.jpg")
        run_folder.on_main(world, lambda: run_report.save_config(folder, requested))  # a refused resume changes nothing

        guard = engine.NonFiniteGuard(model, options.max_nonfinite_steps, log.line)
        writer = checkpoint.CheckpointWriter(folder, log.line, options.save_every_steps, options.save_every_minutes)
        loggers = Loggers(folder, config.logger, state, options.epochs, log)
        stack.callback(loggers.close)
        run_folder.on_main(world, lambda: loggers.start(compose.to_dictionary(config)))
        loggers.pictures("train_batch.jpg")

        is_evaluated, evaluation, over = False, None, state.why_over(options, world)
        log.line(over and f"nothing to train: {over}")
        while over is None and stop.agreed is None:
            started, steps_done = time.perf_counter(), state.step - state.epoch * steps
            loss.refines = state.epoch >= dataset.first_plain_epoch
            sampler.set_epoch(state.epoch, steps_done * sampler.accumulate)
            images, title = (steps - steps_done) * options.batch_size, f"epoch {state.epoch + 1}/{options.epochs}"
            with Progress(images, title, world.is_main) as progress, engine.explain_out_of_memory(sampler, world):
                result = engine.train_one_epoch(
                    forward, loader, state, guard, stop, writer, loggers.step, progress, sampler.accumulate
                )
            if state.step < (state.epoch + 1) * steps:
                break  # stopped within the epoch
            state.end_epoch()
            log.line(build.describe_left_out(dataset.images, f"epoch {state.epoch}, train"))
            is_evaluated = config.evaluate.is_due(state.epoch, options.epochs)
            is_exact = dtype is None or state.epoch >= options.epochs  # the last one is in float32, as eval.py's
            evaluation = evaluator(state.average.module, log.line, is_final=is_exact) if is_evaluated else None
            is_best = state.record(evaluation.metrics if evaluation is not None else {})
            # The tables first: a run that ends in between repeats the epoch, and its row.
            loggers.epoch(result, evaluation, time.perf_counter() - started, is_best)
            if is_best and evaluation is not None:
                with run_report.log_failure("best_detections.npz", log):
                    keep_best(folder, evaluation)
            writer.save(state.to_plain(), is_best)
            stop.agree()
            over = state.why_over(options, world)
            if over is not None and state.epoch < options.epochs:
                log.line(f"the training ends here: {over}")

        run_folder.on_main(world, writer.close)  # all ranks fail if the last checkpoint was not written
        if stop.agreed is not None and over is None:
            again = option("resume", folder)
            log.line(f"stopped at step {state.step} by {stop.agreed.name}; {again} continues from there")
            ask_for_requeue(world, stop.agreed)
            return run.Outcome(state.best_metrics, folder)
        if not (is_evaluated and is_exact):  # not exact: it stopped early
            evaluation = evaluator(state.average.module, log.line, is_final=True)
        if evaluation is not None:
            run_report.finish_run(log, loggers, folder, config, state, val_set, evaluation)
        return run.Outcome(state.best_metrics, folder)
