"""Score a checkpoint by COCO's metrics.

    python eval.py ckpt=runs/quickstart/.../checkpoints/best.pt
    python eval.py ckpt=runs/coco/... data=bccd data.root=../other evaluate.image_size=416
    torchrun --nproc-per-node=2 eval.py ckpt=runs/coco/... out=results
    python eval.py ckpt=runs/coco/... plots=true   # precision and recall, confusions
    python eval.py ckpt=runs/coco/... split=test   # the test images of the data set
    python eval.py model_file=best.onnx ckpt=runs/coco/... # a file, on the data of the run
    python eval.py detections=results.json data=coco    # any system's, scored as by pycocotools

The metrics are the same to the last bit on any number of ranks.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.cli.program

    raise SystemExit(conf.cli.program.start("eval"))

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import data
import models
from conf import ConfigError, compose
from conf.cli import program
from conf.schema import EvalConfig, EvaluateConfig, TrainConfig
from conf.train_options import EvalPrecision
from data.progress import Progress, counted
from train_utils import build, coco_eval, numerics, results, run_folder
from train_utils.distributed import World, broadcast_module, gather_arrays, init_distributed_mode
from train_utils.engine import HELP
from train_utils.inference import detect, open_checkpoint
from train_utils.inference.open_checkpoint import TrainedNetwork
from train_utils.report import plots, report_page
from train_utils.train_state import LOSS_NAMES


@program.callable_from_python("eval")
def evaluate(config: EvalConfig) -> program.Outcome:
    """Score ``ckpt``, or Darknet weights of ``model``, or ``model_file``, or ``detections``.

    Returns the metrics, and the folder if there is one. Takes a list of overrides, too:
    ``evaluate(["ckpt=best.pt"])``. Raises an error for a checkpoint or weights that do not fit, for
    data or a results file that cannot be read.
    """
    world = init_distributed_mode(config.device.value, config.timeout_seconds)
    out = run_folder.open_out(world, config.out, "eval") if config.plots or config.out is not None else None
    val_set = build.open_split(config.data, config.split, world)
    if world.is_main:
        print(config.data.line(), flush=True)
        for note in (*val_set.skipped, *val_set.notes):
            print(f"{config.split}: {note}", flush=True)

    if config.detections is not None:
        evaluation = score_detections(config, val_set, world)
    else:
        model, classes, image_size = load_model(config, val_set, world)
        model = model.to(world.device).eval()
        evaluator = Evaluator(
            val_set, config.evaluate, image_size=image_size, model=model, data_options=config.data, world=world,
            timeout_seconds=config.timeout_seconds, classes=classes,
        )  # fmt: skip
        evaluation = evaluator(model, print)
    if evaluation is None:
        return program.Outcome({}, out)
    scored = config.detections or config.model_file or config.ckpt or (config.model and config.model.weights)
    about: dict[str, Any] = {"scored": scored, "split": config.split.value}
    if config.detections is None:
        about["evaluate"] = compose.to_dictionary(config.evaluate)
    evaluation = evaluation._replace(about=about)

    is_scored = len(val_set.classes) > 0
    if not is_scored:
        more = "" if out is not None else "; out=<folder> writes detections.json, for a server that has them"
        print(f"{config.data.name} has no boxes to score against{more}", flush=True)
    if is_scored:
        print(coco_eval.format_table(evaluation), flush=True)
    if out is not None:
        write_results(out, config, val_set, evaluation)
    return program.Outcome(evaluation.metrics, out)


def write_results(out: Path, config: EvalConfig, val_set: data.Annotations, evaluation: coco_eval.Evaluation) -> None:
    """Write the files of an evaluation into the folder ``out``; the scores if there are boxes."""
    if len(val_set.classes):
        results.write_json(out / "metrics.json", {**evaluation.metrics, "about": dict(evaluation.about)})
        results.write_json(out / "per_class.json", evaluation.per_class)
    if config.detections is None:
        rows = results.to_coco_json(evaluation.detections, val_set.category_ids)
        results.write_json(out / "detections.json", rows)
        categories = zip(val_set.category_ids.tolist(), val_set.names, strict=True)
        described = [{"id": number, "name": name} for number, name in categories]
        results.write_json(out / "images.json", {"images": images_of(val_set), "categories": described})
        report_page.keep_best(out, evaluation)
    if config.plots:
        read = data.ImageSource(val_set, config.data.on_error).read
        plots.draw_evaluation(out / plots.FOLDER, evaluation, read, val_set.file_name, print)
        print(f"plots: {out / plots.FOLDER}")


def score_detections(config: EvalConfig, val_set: data.Annotations, world: World) -> coco_eval.Evaluation | None:
    """Score the file ``config.detections``; None on all ranks but 0. Raises TrainError."""
    category_ids, single_class = val_set.category_ids, config.data.single_class
    if single_class:  # the index has the first one only
        category_ids = build.open_split(replace(config.data, single_class=False), config.split, world).category_ids
    if not world.is_main:
        return None
    path, images = Path(str(config.detections)), images_of(val_set)
    known = {row["id"]: (row["file_name"], (row["height"], row["width"])) for row in images}
    results.check_images(path, known, [*zip(val_set.names, val_set.category_ids.tolist(), strict=True)])
    found = results.read_results(path, val_set.image_ids, category_ids, single_class=single_class)
    print(f"{path}: {counted(len(found), 'detection')} on {len(np.unique(found['image_id']))} of {len(images)} images")
    results.warn_of_units(path, found, val_set.image_ids, val_set.sizes)
    return coco_eval.score(ground_truth_of(val_set), found, coco_eval.choose_scorer(config.evaluate.scorer))


def load_model(
    config: EvalConfig, val_set: data.Annotations, world: World
) -> tuple[models.Darknet, list[int] | None, int | list[int]]:
    """The network that ``config`` names, its number of each class of the data, and the image size.

    The numbers are None if the classes are the same. Raises ConfigError if the checkpoint lacks a
    class of the data.
    """
    if config.ckpt is None and config.model_file is None:
        assert config.model is not None  # only detections= needs no model
        names = val_set.names
        built, note = build.build_model(config.model, len(names), whole=True, world=world, names=names)
        if world.is_main:
            print(note)
        return built, None, config.evaluate.image_size or models.image_size_of(built.cfg)
    opened = open_checkpoint.open_checkpoint(str(config.model_file or config.ckpt))
    if world.is_main:
        print(opened.note)
    return opened.model, class_numbers(opened, val_set, world), config.evaluate.image_size or opened.image_size


def class_numbers(opened: TrainedNetwork, val_set: data.Annotations, world: World) -> list[int] | None:
    """The network's number of each class of the data; None if the classes are the same.

    Raises ConfigError if the network lacks a class of the data.
    """
    order, count = models.class_order(opened.names, val_set.names), len(val_set.names)
    if order is None:
        known, given = (", ".join(names[:5]) + ", ..." * (len(names) > 5) for names in (opened.names, val_set.names))
        raise ConfigError(
            f"the network knows {len(opened.names)} classes ({known}), the data has {len(val_set.names)} ({given}): "
            f"{opened.note}. fix: data.classes=[...] with classes that both have, other data, or weights converted "
            "anew with names=<the data's .json>"
        )
    if opened.names == val_set.names:
        return None
    in_order = order == [*range(len(opened.names))]
    if world.is_main:
        by_name = f"scored on {count} of its {len(opened.names)} classes, by name"
        print("names taken as equal: those of one are numbers" if in_order else by_name)
    return None if in_order else order


def images_of(annotations: data.Annotations) -> list[dict[str, Any]]:
    """The images of an index as COCO writes them."""
    rows = zip(annotations.image_ids.tolist(), annotations.sizes.tolist(), strict=True)
    return [
        {"id": number, "file_name": annotations.file_name(index), "height": height, "width": width}
        for index, (number, (height, width)) in enumerate(rows)
    ]


def ground_truth_of(annotations: data.Annotations) -> results.GroundTruth:
    """What detections are scored against."""
    return results.GroundTruth(**{one.name: getattr(annotations, one.name) for one in fields(results.GroundTruth)})


class Evaluator:
    """Score models like ``model`` on one data set; made once, called after every epoch.

    Batches are formed before they are dealt to the ranks, and none is padded. So each image is
    computed once and in the same batch, whatever the number of ranks. ``loss`` adds the validation
    losses. ``classes`` are the model's number of each class of the data; None: they are the same.
    """

    def __init__(
        self,
        val_set: data.Annotations,
        config: EvaluateConfig,
        *,
        image_size: int | list[int],
        model: models.Darknet,
        data_options: data.DataConfig,
        world: World,
        timeout_seconds: float = 0.0,
        loss: models.LossConfig | None = None,
        classes: list[int] | None = None,
    ) -> None:
        open_checkpoint.check_size(model, image_size, "evaluate.image_size")
        open_checkpoint.check_limits(model, config, "evaluate.")
        self.dtype = numerics.evaluation_dtype(config.precision, world.device, "evaluate.precision")
        self.scorer = coco_eval.choose_scorer(config.scorer)
        self.config, self.world, self.truth = config, world, ground_truth_of(val_set)
        batches = data.eval_batches(
            val_set.sizes, image_size, config.batch_size, stride=model.max_stride,
            rect=config.rect and model.takes_any_size, resize=config.resize,
        )[world.rank :: world.world_size]  # fmt: skip
        self.num_images = sum(map(len, batches))
        self.images = build.open_images(val_set, data_options, world)
        self.loader = data.make_loader(
            data.EvalDataset(val_set, self.images, config.resize), batches,
            workers=build.loader_workers(data_options.workers, world), device=world.device,
            timeout_seconds=timeout_seconds, batch_bytes=3 * config.batch_size * math.prod(data.both_sides(image_size)),
        )  # fmt: skip
        self.classes = classes
        self.postprocess = build.build_postprocess(config, model.heads, classes, in_training=loss is not None)
        # A separate instance: tensors it caches under inference_mode cannot be used in training.
        self.loss = build.build_loss(model.heads, loss) if loss is not None else None
        self.refines = False  # see HeadLoss

    @classmethod
    def of_training(cls, config: TrainConfig, val_set: data.Annotations, model: models.Darknet, world: World) -> Self:
        """The evaluator of a training, in the precision of eval.py, since it chooses best.pt."""
        return cls(
            val_set,
            config.evaluate,
            image_size=config.evaluate.image_size or config.train.image_size,
            model=model,
            data_options=config.data,
            world=world,
            timeout_seconds=config.train.timeout_seconds,
            loss=config.loss,
        )

    def __call__(self, model: torch.nn.Module, log_line: Callable[[str], object]) -> coco_eval.Evaluation | None:
        """Score ``model``, which is in eval mode; None on all ranks but 0.

        ``log_line`` reports unreadable images. Losses are means over the batches, weighted by their
        images.
        """
        assert isinstance(model, models.Darknet)
        device = self.world.device
        if self.loss is not None:
            self.loss.refines = self.refines
        broadcast_module(model)  # without SyncBatchNorm the statistics of the ranks differ
        losses: list[tuple[int, torch.Tensor]] = []  # images of a batch, and LOSS_NAMES; read at the end

        def keep_losses(batch: data.Batch, raw_maps: list[torch.Tensor]) -> None:
            if self.loss is not None:
                targets = batch.targets.to(device, non_blocking=True)
                losses.append((len(batch.images), torch.stack(self.loss(raw_maps, targets))))

        of_batches = detect.detect_batches(
            models.for_detection(model, device), self.loader, self.postprocess, device, on_raw_maps=keep_losses,
            dtype=self.dtype, tf32=self.config.precision is EvalPrecision.tf32,
        )  # fmt: skip
        progress = Progress(self.num_images, "evaluate", self.world.is_main)
        found = detect.collect_detections(of_batches, self.to_original, progress)
        if left_out := build.describe_left_out(self.images, "val"):
            log_line(left_out)
        gathered = gather_arrays(found)
        rows_of_ranks = gather_arrays(np.array([(images, *values.tolist()) for images, values in losses]))
        if gathered is None or rows_of_ranks is None:
            return None
        found = np.concatenate(gathered)
        if self.classes is not None:
            found["class"] = np.argsort(self.classes)[np.searchsorted(np.sort(self.classes), found["class"])]
        found["image_id"] = self.truth.image_ids[found["image_id"]]  # in place of positions in the data set
        evaluation = coco_eval.score(self.truth, found, self.scorer)
        if self.loss is None:
            return evaluation
        images, *columns = np.concatenate([rows for rows in rows_of_ranks if len(rows)]).T
        # An image has the loss of its batch. fsum rounds once, so ranks and order do not matter.
        means = [math.fsum(images * column) / images.sum() for column in columns]
        if not all(map(math.isfinite, means)):
            log_line(f"val: the loss is not finite. fix: {HELP}")
        return evaluation._replace(losses=dict(zip(LOSS_NAMES, means, strict=True)))

    def to_original(self, batch: data.Batch, i: int, boxes_xyxy: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = data.Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        height, width = self.truth.sizes[int(batch.indices[i])].tolist()
        return data.cut_at_edges(boxes, (height, width)) if self.config.clip else boxes
