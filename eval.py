"""Score a checkpoint by COCO's figures, or time it.

    python eval.py ckpt=runs/quickstart/.../checkpoints/best.pt
    python eval.py ckpt=runs/coco/... data=bccd data.root=../other evaluate.image_size=416
    torchrun --nproc-per-node=2 eval.py ckpt=runs/coco/... out=results
    python eval.py ckpt=runs/coco/... plots=true   # precision and recall, confusions
    python eval.py ckpt=runs/coco/... task=speed
    python eval.py detections=results.json data=coco    # any system's, scored as by pycocotools

The figures are the same to the last bit on any number of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("eval")
    raise SystemExit

from pathlib import Path

import torch
from torch import Tensor

from conf.build.batches import open_split
from conf.build.evaluator import Evaluation, Evaluator, ground_truth_of
from conf.build.network import build_model, open_checkpoint
from conf.build.report import draw_plots
from conf.failures import ConfigError
from conf.programs import Outcome, callable_from_python
from conf.schema import EvalConfig, EvalTask
from data import Annotations, Request
from models import AnyNetwork, Darknet, OnnxNetwork, for_detection, image_size_of
from train_utils.coco_eval import ABSENT, OPERATING_POINT, format_table, score
from train_utils.config import EvalPrecision
from train_utils.curves import class_curves
from train_utils.detections import read_results, to_coco_json, write_json
from train_utils.distributed import World, init_distributed_mode
from train_utils.numerics import allow_tf32
from train_utils.plots import FOLDER
from train_utils.report import Best, keep_best
from train_utils.run_folder import dated_folder, open_folder
from train_utils.speed import measure_speed


@callable_from_python("eval")
def evaluate(config: EvalConfig) -> Outcome:
    """Score ``config.ckpt``, or Darknet weights of ``config.model``; time it with ``task=speed``.

    Returns the figures, and the folder if there is one. From Python it takes a list of overrides as
    well: ``evaluate(["ckpt=best.pt"])``. Raises the errors of the parts: a checkpoint or weights
    that do not fit, data that cannot be read.
    """
    world = init_distributed_mode(config.device.value, config.timeout_seconds)
    allow_tf32(config.evaluate.precision is EvalPrecision.tf32)  # speed is timed in the format of the figures
    if config.task == EvalTask.speed and world.world_size > 1:
        raise ConfigError("task=speed times one process. fix: start it without a launcher")
    place = Path(config.out) if config.out is not None else dated_folder("eval") if config.plots else None
    out = open_folder(world, place, "out") if place is not None else None
    annotations = open_split(config.data, "val", world)
    if world.is_main:
        print(config.data.line(), flush=True)
        for note in (*annotations.skipped, *annotations.notes):
            print(f"val: {note}", flush=True)
    if config.detections is not None:
        figures = score_file(Path(config.detections), config, annotations, out) if world.is_main else {}
        return Outcome(figures, out)
    model = load_model(config, annotations, world).to(world.device)
    image_size = config.evaluate.image_size
    if image_size is None:  # of Darknet weights: checkpoints and exported files have filled it in
        assert isinstance(model, Darknet)
        image_size = image_size_of(model.cfg)
    evaluator = Evaluator(
        annotations, config.evaluate, image_size, model, config.data, world, timeout_seconds=config.timeout_seconds
    )
    if config.task == EvalTask.speed:
        figures = time_stages(evaluator, for_detection(model.eval(), world.device), config.evaluate.batch_size)
        return Outcome(figures, out)
    evaluation = evaluator(model)
    if evaluation is None:
        return Outcome({}, out)
    if out is not None:
        write_json(out / "detections.json", to_coco_json(evaluation.detections, annotations.category_ids))
        keep_best(out, Best(evaluation.scores, evaluator.ground_truth, evaluation.detections))
    return Outcome(report(evaluation, config, annotations, out), out)


def score_file(path: Path, config: EvalConfig, annotations: Annotations, out: Path | None) -> dict[str, float]:
    """Score a COCO results file with its numbers unrounded. Raises TrainError if it is none."""
    detections, ignored = read_results(path, annotations.image_ids, annotations.category_ids)
    more = f", {ignored} of categories that the data does not have" if ignored else ""
    print(f"{path}: {len(detections)} detections{more}")
    truth = ground_truth_of(annotations)
    scores = score(truth, detections, config.evaluate.backend)
    return report(Evaluation(scores, detections), config, annotations, out)


def report(evaluation: Evaluation, config: EvalConfig, annotations: Annotations, out: Path | None) -> dict[str, float]:
    """Print the figures with the best F1 of each class, write them to ``out``, and return them."""
    scores, truth = evaluation.scores, ground_truth_of(annotations)
    curves = class_curves(truth, evaluation.detections)
    for row, curve in zip(scores.per_class.values(), curves, strict=True):
        row.update(curve.best() or dict.fromkeys(OPERATING_POINT, ABSENT))
    print(format_table(scores), flush=True)
    if out is not None:
        write_json(out / "figures.json", scores.figures)
        write_json(out / "per_class.json", scores.per_class)
        if config.plots:
            draw_plots(out / FOLDER, config.data, annotations, evaluation.detections, print)
            print(f"plots: {out / FOLDER}")
    return scores.figures


def load_model(config: EvalConfig, annotations: Annotations, world: World) -> AnyNetwork:
    """Build the network that ``config`` names.

    Raises ConfigError if the checkpoint's classes are not those of the data.
    """
    if config.ckpt is None:
        assert config.model is not None  # only detections= needs no model
        built, note = build_model(config.model, len(annotations.names), whole=True, world=world)
        if world.is_main:
            print(note)
        return built
    opened = open_checkpoint(config.ckpt)
    model, names = opened.model, opened.names
    numbered = [str(index) for index in range(len(annotations.names))]  # converted without names
    if names not in (annotations.names, numbered):
        raise ConfigError(
            f"ckpt={config.ckpt} knows the classes {_short(names)}, data={config.data.name} has "
            f"{_short(annotations.names)}. fix: evaluate on data with the checkpoint's classes, or convert weights "
            "anew with names=<the data's .json>"
        )
    if isinstance(model, OnnxNetwork) and world.is_main:
        print(opened.note)
    return model


def time_stages(evaluator: Evaluator, model: torch.nn.Module, batch_size: int) -> dict[str, float]:
    """Print and return ms per image of each stage, for single images and for batches."""
    device, dtype = evaluator.world.device, evaluator.dtype
    network = torch.autocast(device.type, dtype, enabled=dtype is not None)(model)

    def prepare(requests: list[Request]) -> Tensor:
        return evaluator.dataset.__getitems__(requests).to(device).network_input()

    figures: dict[str, float] = {}
    for size in sorted({1, batch_size}):
        speed = measure_speed(evaluator.batches(size), prepare, network, evaluator.postprocess, device)
        print(speed.line(), flush=True)
        figures |= {f"{stage}_ms_batch{size}": value for stage, value in speed.milliseconds.items()}
    return figures


def _short(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
