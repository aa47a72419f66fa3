"""Train a detector: one process, several on one machine, or many machines, by the same code.

    python train.py experiment=quickstart
    torchrun --nproc-per-node=2 train.py data=coco
    sbatch --gpus-per-node=4 scripts/slurm/train.sbatch data=coco

What a run leaves is in runs/<name>/<date_time>/.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.cli.program

    raise SystemExit(conf.cli.program.start("train"))  # tab completion asks for: @hydra.main

from contextlib import ExitStack

import data
from conf import schema
from conf.cli import program
from train_utils import auto, build, checkpoint, distributed, engine, numerics, run_folder, sync_batchnorm
from train_utils.evaluator import Evaluator
from train_utils.report.run_report import RunReport
from train_utils.train_state import TrainState


@program.callable_from_python("train")
def train(requested: schema.TrainConfig) -> program.Outcome:  # noqa: PLR0915 - the story of a training
    """Train as configured; return the best epoch's metrics and the run folder.

    From Python it takes a list of overrides as well: ``train(["data=coco", "train.epochs=2"])``.
    """
    with distributed.StopRequest(term_ends=True) as stop, ExitStack() as stack:
        world = distributed.init_distributed_mode(requested.device, requested.train.timeout_seconds)
        numerics.prepare_numerics(requested.train)
        compile_mode = auto.choose_mode(requested.train, world)

        # Whatever is wrong with data and network shows before a new run folder is made.
        make_folder = stack.enter_context(run_folder.reserve_run_folder(world, requested))
        saved, saved_note = checkpoint.continue_from(make_folder() if requested.resume is not None else None)
        train_set, val_set = build.open_splits(requested.data, world)

        # What `auto` means for data, network, loss and precision is decided here, once.
        config, model, notes = auto.resolve_auto(requested, train_set, world, saved)
        loss = build.build_loss(model.heads, config.loss)

        # The global batch is formed, then dealt: more ranks change the speed, not the training.
        train_sampler = build.build_sampler(config, train_set, model.max_stride, world)
        batches = data.TrainBatchSampler(train_sampler)
        dataset = build.build_dataset(config, train_set, build.open_images(train_set, config.data, world))
        loader = build.build_loader(dataset, batches, config, world)
        evaluator = Evaluator(config, val_set, model, world, config.train.image_size)

        report = stack.enter_context(RunReport(make_folder(), config, world))
        report.announce(train_set, val_set, batches, model, saved_note, *notes)

        # All that training changes and a checkpoint holds; of the model the plain one, without DDP.
        model = build.to_device(model, config.train, world)
        sync_batchnorm.convert_batch_norm(model, config.train, world, batches.images_per_rank)
        description = auto.describe_run(config, requested, model, train_set, val_set)
        state = TrainState.create(model, config, train_sampler.steps_per_epoch, description)
        forward = engine.ForwardPass.create(
            model, loss, config.train, compile_mode, batches=batches, world=world, log_line=report.line
        )
        if saved is not None:
            engine.rehearse(forward, state, 2 * model.max_stride)
            report.line(state.resume(saved, report.folder, world))
            saved = None  # its memory is for the training
        report.start(requested, state, dataset, batches)
        guard = engine.NonFiniteGuard(model, engine.MAX_NONFINITE_STEPS, report.line)
        writer = checkpoint.CheckpointWriter(report.folder, report.line, config.train, config.run_mirror)
        stop.handle_term()
        is_scored, stop_reason = False, state.stop_reason(config.train, world)
        while stop_reason is None and stop.agreed is None:
            train_sampler.set_epoch(state.epoch, state.steps_of_epoch)
            with report.progress(state) as progress, engine.explain_out_of_memory(batches, world):
                result = engine.train_one_epoch(
                    forward, state, loader, guard, stop, accumulate=batches.accumulate, writer=writer,
                    log_step=report.step, progress=progress, refines=state.epoch >= dataset.first_plain_epoch,
                )  # fmt: skip
            if state.steps_of_epoch < train_sampler.steps_per_epoch:
                break  # stopped within the epoch
            state.end_epoch()
            report.line(build.describe_left_out(dataset.images, f"epoch {state.epoch}, train"))
            is_scored, evaluation = config.evaluate.is_due(state.epoch, config.train.epochs), None
            if is_scored:  # None off rank 0
                evaluation = evaluator(state.average.module, report.line, state.epoch > dataset.first_plain_epoch)
            is_best = state.record(evaluation)
            # The tables first: a run that ends in between repeats the epoch, and its row.
            report.epoch(state, result, evaluation, is_best)
            writer.save(state.to_plain(), is_best)
            stop.agree()
            stop_reason = state.stop_reason(config.train, world)

        if stop_reason is not None and not is_scored:  # a resume found nothing left to train
            evaluation = evaluator(state.average.module, report.line, state.epoch > dataset.first_plain_epoch)
            if state.best_epoch == 0:  # not scored yet, or not on this validation set
                is_best = state.record(evaluation)
                report.keep_best(state, evaluation)
                writer.save(state.to_plain(), is_best)
        run_folder.on_main(world, writer.close)  # all ranks fail if the last checkpoint was not written
        if stop.agreed is not None and stop_reason is None:
            report.stopped(state, stop.agreed)
            distributed.ask_for_requeue(world, stop.agreed)
        else:
            report.finish(state, val_set, evaluation, stop_reason)
        return program.Outcome(state.best_metrics, report.folder)
