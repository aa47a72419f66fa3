"""Score a checkpoint by COCO's metrics.

    python eval.py ckpt=runs/quickstart/.../checkpoints/best.pt
    python eval.py ckpt=runs/coco/... data=bccd data.root=../other evaluate.image_size=416
    torchrun --nproc-per-node=2 eval.py ckpt=runs/coco/... out=results
    python eval.py ckpt=runs/coco/... plots=true   # precision and recall, confusions
    python eval.py ckpt=runs/coco/... split=test   # the test images of the data set, or train
    python eval.py model_file=best.onnx ckpt=runs/coco/... # a file, on the data of the run
    python eval.py detections=results.json data=coco    # any system's, scored as by pycocotools

The metrics are the same to the last bit on any number of ranks.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.cli.program

    raise SystemExit(conf.cli.program.start("eval"))  # tab completion asks for: @hydra.main

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import data
from conf import compose
from conf.cli import program
from conf.schema import EvalConfig
from data import Annotations
from data.progress import counted, log
from train_utils import auto, build, coco_eval, distributed, results, run_folder
from train_utils.distributed import World
from train_utils.evaluator import score_network
from train_utils.inference import open_checkpoint
from train_utils.report import plots, report_page


@program.callable_from_python("eval")
def evaluate(config: EvalConfig) -> program.Outcome:
    """Score ``ckpt``, or Darknet weights of ``model``, or ``model_file``, or ``detections``.

    Returns the metrics with those at the best F1, and the folder if there is one. Takes a list of
    overrides, too: ``evaluate(["ckpt=best.pt"])``.
    """
    world = distributed.init_distributed_mode(config.device.value, config.timeout_seconds)
    out = run_folder.open_out(world, config.out, "eval") if config.plots or config.out is not None else None
    val_set = build.open_split(config.data, config.split, world)
    log.info(config.data.line())
    for note in (*val_set.skipped, *val_set.notes):
        log.info(f"{config.split}: {note}")
    scored = config.detections or config.model_file or config.ckpt or (config.model and config.model.weights)
    about: dict[str, Any] = {"scored": scored, "split": config.split.value}
    if config.detections is not None:
        evaluation = score_detections(config, val_set, world)
    else:
        about["evaluate"] = compose.to_dictionary(config.evaluate)
        network = open_network(config, val_set, world)
        about["trained_on"] = network.trained_on
        log.info(network.note)
        now = repr(auto.content_of(val_set))
        if config.split == "val" and network.val not in ("None", now):
            log.info(f"the validation set is another one than in the training ({network.val} -> {now})")
        evaluation = score_network(config, network, val_set, world)
    if evaluation is None:
        return program.Outcome({}, out)
    evaluation = evaluation._replace(about=about)
    if len(val_set.classes) > 0:
        log.info(coco_eval.format_table(evaluation))
    else:
        more = "" if out is not None else "; out=<folder> writes detections.json, for a server that has them"
        log.info(f"{config.data.name} has no boxes to score against{more}")
    if out is not None:
        write_results(out, config, val_set, evaluation)
    return program.Outcome(evaluation.metrics, out, evaluation.per_class, evaluation.at_best_f1)


def score_detections(config: EvalConfig, val_set: Annotations, world: World) -> coco_eval.Evaluation | None:
    """Score the file ``config.detections``; None on all ranks but 0. Raises TrainError."""
    category_ids, single_class = val_set.category_ids, config.data.single_class
    if single_class:  # the index has the first one only
        category_ids = build.open_split(replace(config.data, single_class=False), config.split, world).category_ids
    if not world.is_main:
        return None
    path = Path(str(config.detections))
    results.check_images(path, results.images_json(val_set))
    found = results.read_results(path, val_set.image_ids, category_ids, single_class=single_class)
    images = len(np.unique(found["image_id"]))
    log.info(f"{path}: {counted(len(found), 'detection')} on {images} of {len(val_set)} images")
    results.warn_of_units(path, found, val_set.image_ids, val_set.sizes)
    truth = results.GroundTruth.of(val_set)
    return coco_eval.score(truth, found, coco_eval.choose_scorer(config.evaluate.scorer))


def open_network(config: EvalConfig, val_set: Annotations, world: World) -> open_checkpoint.TrainedNetwork:
    """The network of ``ckpt`` or ``model_file``, else of Darknet weights for the data."""
    file = config.model_file or config.ckpt
    if file is not None:
        return open_checkpoint.open_checkpoint(file)
    assert config.model is not None  # only detections= needs no model
    return open_checkpoint.open_weights(config.model, list(val_set.names), val_set.category_ids.tolist(), world)


def write_results(out: Path, config: EvalConfig, val_set: Annotations, evaluation: coco_eval.Evaluation) -> None:
    """Write the files of an evaluation into the folder ``out``; the scores if there are boxes."""
    if len(val_set.classes) > 0:
        results.write_json(out / "metrics.json", {**evaluation.metrics, "about": dict(evaluation.about)})
        results.write_json(out / "per_class.json", evaluation.per_class)
    if config.detections is None:
        rows = results.to_coco_json(evaluation.detections, val_set.category_ids)
        results.write_json(out / "detections.json", rows)
        results.write_json(out / "images.json", results.images_json(val_set))
        report_page.keep_best(out, evaluation)
    if config.plots:
        read = data.ImageSource(val_set, config.data.on_error).read
        plots.draw_evaluation(out / plots.FOLDER, evaluation, read, val_set.file_name, log.info)
        log.info(f"plots: {out / plots.FOLDER}")
