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

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
import torch

from conf.batches import loader_workers, open_images, open_split
from conf.failures import ConfigError
from conf.network import build_model, build_postprocess, open_checkpoint
from conf.programs import Outcome, callable_from_python
from conf.schema import EvalConfig, EvalTask, EvaluateConfig
from data import (
    Annotations,
    Batch,
    DataConfig,
    EvalDataset,
    ImageSource,
    Letterbox,
    Request,
    cut_at_edges,
    eval_batches,
    make_loader,
)
from models import AnyNetwork, Darknet, OnnxNetwork, for_detection, image_size_of
from train_utils.coco_eval import ABSENT, OPERATING_POINT, CocoResult, format_table, score
from train_utils.config import EvalPrecision
from train_utils.curves import class_curves
from train_utils.detect import detect
from train_utils.detections import (
    MAX_CLASSES,
    Detections,
    GroundTruth,
    pack,
    read_results,
    to_coco_json,
    unpack,
    write_json,
)
from train_utils.distributed import World, gather_arrays, init_distributed_mode
from train_utils.numerics import allow_tf32, autocast_dtype
from train_utils.plots import FOLDER, draw_evaluation
from train_utils.progress import Progress
from train_utils.report import Best, keep_best
from train_utils.run_folder import dated_folder, open_folder

STAGES = ("preprocessing", "network", "suppression")  # that task=speed times
WARM_UP, COUNTED = 3, 30  # batches, if there are that many


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
        return Outcome(score_file(config, annotations, out) if world.is_main else {}, out)

    model = load_model(config, annotations, world).to(world.device)
    image_size = config.evaluate.image_size
    if image_size is None:  # of Darknet weights: checkpoints and exported files have filled it in
        assert isinstance(model, Darknet)
        image_size = image_size_of(model.cfg)
    evaluator = Evaluator(annotations, config.evaluate, image_size, model, config.data, world, config.timeout_seconds)
    if config.task == EvalTask.speed:
        return Outcome(time_stages(evaluator, model.eval(), config.evaluate.batch_size), out)
    evaluation = evaluator(model)
    if evaluation is None:
        return Outcome({}, out)
    if out is not None:
        write_json(out / "detections.json", to_coco_json(evaluation.detections, annotations.category_ids))
        keep_best(out, Best(evaluation.scores, evaluator.ground_truth, evaluation.detections))
    return Outcome(report(evaluation, config, annotations, out), out)


def load_model(config: EvalConfig, annotations: Annotations, world: World) -> AnyNetwork:
    """Build the network that ``config`` names.

    Raises ConfigError if the checkpoint's classes are not those of the data.
    """
    if config.ckpt is None:
        assert config.model is not None  # only detections= needs no model
        built, report = build_model(config.model, len(annotations.names), whole=True, world=world)
        if world.is_main:
            print(report)
        return built
    opened = open_checkpoint(config.ckpt)
    numbered = [str(index) for index in range(len(annotations.names))]  # converted without names
    if opened.names not in (annotations.names, numbered):
        raise ConfigError(
            f"ckpt={config.ckpt} knows the classes {_in_short(opened.names)}, data={config.data.name} has "
            f"{_in_short(annotations.names)}. fix: evaluate on data with the checkpoint's classes, or convert weights "
            "anew with names=<the data's .json>"
        )
    if isinstance(opened.model, OnnxNetwork) and world.is_main:
        print(opened.note)
    return opened.model


def _in_short(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"


def score_file(config: EvalConfig, annotations: Annotations, out: Path | None) -> dict[str, float]:
    """Score a COCO results file with its numbers unrounded. Raises TrainError if it is none."""
    path = Path(str(config.detections))
    detections, ignored = read_results(path, annotations.image_ids, annotations.category_ids)
    more = f", {ignored} of categories that the data does not have" if ignored else ""
    print(f"{path}: {len(detections)} detections{more}")
    scores = score(ground_truth_of(annotations), detections, config.evaluate.backend)
    return report(Evaluation(scores, detections), config, annotations, out)


def report(evaluation: Evaluation, config: EvalConfig, annotations: Annotations, out: Path | None) -> dict[str, float]:
    """Print the figures with the best F1 of each class, write them to ``out``, and return them."""
    scores = evaluation.scores
    curves = class_curves(ground_truth_of(annotations), evaluation.detections)
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


def draw_plots(
    folder: Path, data: DataConfig, val_set: Annotations, detections: Detections, warn: Callable[[str], object]
) -> None:
    """Draw an evaluation into ``folder``; ``warn`` of what could not be drawn."""
    read = ImageSource(val_set, data.on_error).read
    draw_evaluation(folder, ground_truth_of(val_set), detections, read, val_set.file_name, warn)


def ground_truth_of(annotations: Annotations) -> GroundTruth:
    """The part of an index that detections are scored against."""
    return GroundTruth(**{field.name: getattr(annotations, field.name) for field in fields(GroundTruth)})


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, on rank 0."""

    scores: CocoResult
    detections: Detections


class Evaluator:
    """Score any model of one shape on one data set; made once, called after every epoch.

    Batches are formed before they are dealt to the ranks, and none is padded. So each image is
    computed once and in the same batch, whatever the number of ranks.
    """

    def __init__(
        self,
        annotations: Annotations,
        config: EvaluateConfig,
        image_size: int,
        model: AnyNetwork,
        data: DataConfig,
        world: World,
        timeout_seconds: float = 0.0,
    ) -> None:
        if (nearest := model.nearest_size(image_size, image_size)[0]) != image_size:
            raise ConfigError(
                f"evaluate.image_size={image_size} is not a multiple of the network's largest stride "
                f"{model.max_stride}. fix: evaluate.image_size={nearest}"
            )
        self.annotations, self.world, self.config = annotations, world, config
        self.dtype = autocast_dtype(config.precision.value, world.device, "evaluate.precision")
        self.image_size, self.stride = image_size, model.max_stride
        assert len(annotations.names) <= MAX_CLASSES, "a packed detection has two bytes for its class"
        self.ground_truth = ground_truth_of(annotations)
        batches = self.batches(config.batch_size)[world.rank :: world.world_size]
        images = open_images(annotations, data, world)
        self.dataset = EvalDataset(annotations, images, config.resize)
        self.num_images = sum(len(batch) for batch in batches)
        workers = loader_workers(data.workers, world)
        self.loader = make_loader(self.dataset, batches, workers, world.device, timeout_seconds)
        self.postprocess = build_postprocess(config, model.heads)

    def batches(self, batch_size: int) -> list[list[Request]]:
        """All images in batches of at most ``batch_size``, each of one shape."""
        config = self.config
        return eval_batches(
            self.ground_truth.sizes,
            self.image_size,
            batch_size,
            self.stride,
            config.rect,
            resize=config.resize,
        )

    def __call__(self, model: torch.nn.Module) -> Evaluation | None:
        """Score ``model``; None on all ranks but 0."""
        assert isinstance(model, AnyNetwork)
        own = detect(
            for_detection(model, self.world.device),
            self.loader,
            self.postprocess,
            self.to_original,
            self.world.device,
            Progress(self.num_images, "evaluate", self.world.is_main),
            self.dtype,
            tf32=self.config.precision is EvalPrecision.tf32,
        )
        gathered = gather_arrays(pack(own))
        if gathered is None:
            return None
        detections = unpack(np.concatenate(gathered), self.ground_truth.image_ids)
        return Evaluation(score(self.ground_truth, detections, self.config.backend), detections)

    def to_original(self, batch: Batch, i: int, boxes_xyxy: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        if self.config.clip:
            height, width = self.ground_truth.sizes[int(batch.indices[i])].tolist()
            return cut_at_edges(boxes, (height, width))
        return boxes


@torch.inference_mode()
def time_stages(evaluator: Evaluator, model: AnyNetwork, batch_size: int) -> dict[str, float]:
    """Print and return the ms per image of each stage, for single images and for batches.

    Stages run one after another, from files to the network's input on the device, through the
    network, to detections on the CPU; each ends with a GPU synchronisation. They are medians over
    batches of the largest size; the first WARM_UP also run once uncounted.
    """
    device, dtype = evaluator.world.device, evaluator.dtype
    network = torch.autocast(device.type, dtype, enabled=dtype is not None)(for_detection(model, device))

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    figures: dict[str, float] = {}
    for wanted in sorted({1, batch_size}):
        batches = evaluator.batches(wanted)
        size = max(map(len, batches))
        whole = [batch for batch in batches if len(batch) == size][:COUNTED]
        rows = []
        for requests in [*whole[:WARM_UP], *whole]:
            times = [now()]
            images = evaluator.dataset.__getitems__(requests).to(device).network_input()
            times.append(now())
            raw_maps = network(images)
            times.append(now())
            evaluator.postprocess(raw_maps)
            times.append(now())
            rows.append(np.diff(times) / size * 1e3)
        of_stages = zip(*rows[min(WARM_UP, len(whole)) :], strict=True)
        medians = {stage: float(median(values)) for stage, values in zip(STAGES, of_stages, strict=True)}
        parts = ", ".join(f"{stage} {value:.2f}" for stage, value in medians.items())
        together = f"together {sum(medians.values()):.2f} ms per image (median of {len(whole)} batches)"
        print(f"batch {size}: {parts}, {together}", flush=True)
        figures |= {f"{stage}_ms_batch{wanted}": value for stage, value in medians.items()}
    return figures
