"""Score a checkpoint with pycocotools.

    python eval.py ckpt=runs/quickstart/.../checkpoints/best.pt
    python eval.py ckpt=runs/coco/... data=bccd data.root=../other evaluate.image_size=416
    torchrun --nproc-per-node=2 eval.py ckpt=runs/coco/...

The figures are the same to the last bit on any number of processes.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from conf.build import build_model, complete_from_checkpoint, image_size_of, model_from_checkpoint
from conf.entry import ConfigError, run
from conf.schema import EvalConfig, EvaluateConfig
from data import (
    Annotations,
    Batch,
    CachedImages,
    DataConfig,
    EvalBatchSampler,
    EvalDataset,
    ImageCache,
    ImageSource,
    Letterbox,
    build_image_cache,
    cut_at_edges,
    eval_batches,
    kept_cache_name,
    make_loader,
    open_annotations,
)
from models import Darknet, Postprocess
from train_utils.checkpoint import load_checkpoint
from train_utils.coco_eval import CocoResult, Detections, GroundTruth, format_table, score
from train_utils.distributed import (
    World,
    barrier,
    broadcast_text,
    gather_arrays,
    init_distributed_mode,
    torch_distributed_zero_first,
)
from train_utils.engine import detect
from train_utils.log import Progress
from train_utils.run_folder import open_folder

MEMORY_FILES = Path("/dev/shm")


def evaluate(config: EvalConfig) -> dict[str, float]:
    """Score ``config.ckpt`` (or Darknet weights of ``config.model``); the figures on the first process, else {}.

    Raises the errors of the parts: a checkpoint or weights that do not fit, data that cannot be read.
    """
    world = init_distributed_mode(config.device.value, config.timeout_seconds)
    out = open_folder(world, Path(config.out), "out") if config.out is not None else None
    annotations = open_split(config.data, "val", world)
    if config.ckpt is not None:
        model, names = model_from_checkpoint(load_checkpoint(Path(config.ckpt)))
        numbered = [str(index) for index in range(len(annotations.names))]  # converted without names
        if names not in (annotations.names, numbered):
            raise ConfigError(
                f"ckpt={config.ckpt} knows the classes {_short(names)}, data={config.data.name} has "
                f"{_short(annotations.names)}. fix: evaluate on data with the checkpoint's classes, or convert weights "
                "anew with names=<the data's .json>"
            )
    else:
        model, note = build_model(config.model, len(annotations.names), whole=True)
        if world.is_main:
            print(note)
    image_size = config.evaluate.image_size or image_size_of(model.cfg)
    evaluator = Evaluator(annotations, config.evaluate, image_size, model, config.data, world)
    result = evaluator(model.to(world.device))
    if result is None:
        return {}
    print(format_table(result.scores), flush=True)
    if out is not None:
        (out / "figures.json").write_text(json.dumps(result.scores.figures, indent=1) + "\n")
        (out / "per_class.json").write_text(json.dumps(result.scores.per_class, indent=1) + "\n")
    return result.scores.figures


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation gave on the first process."""

    scores: CocoResult
    detections: Detections


class Evaluator:
    """Scores any model of one shape on one data set; made once, called after every epoch.

    Batches are formed before they are dealt to the processes, and none is padded, so that each image is computed once
    and in the same company whatever the number of processes.
    """

    def __init__(
        self,
        annotations: Annotations,
        config: EvaluateConfig,
        image_size: int,
        model: Darknet,
        data: DataConfig,
        world: World,
        lines: int = 5,
    ) -> None:
        if image_size % model.max_stride:
            nearest = max(1, round(image_size / model.max_stride)) * model.max_stride
            raise ConfigError(
                f"evaluate.image_size={image_size} is no multiple of the network's largest stride "
                f"{model.max_stride}. fix: evaluate.image_size={nearest}"
            )
        self.world, self.lines, self.clip = world, lines, config.clip
        batches = eval_batches(
            annotations.sizes,
            image_size,
            config.batch_size,
            model.max_stride,
            config.rect,
            upscale=True,
            resize=config.resize,
        )
        sampler = EvalBatchSampler(batches, world.rank, world.world_size)
        dataset = EvalDataset(annotations, open_images(annotations, data, world), True, config.resize)
        self.num_images = sum(len(batch) for batch in sampler)
        self.loader = make_loader(dataset, sampler, data.workers, world.device.type == "cuda")
        self.postprocess = Postprocess(
            model.heads,
            confidence=config.confidence,
            nms_iou=config.nms_iou,
            max_detections=config.max_detections,
            multi_label=config.multi_label,
        )
        self.ground_truth = GroundTruth(
            image_ids=annotations.image_ids,
            sizes=annotations.sizes,
            offsets=annotations.offsets,
            boxes_xywh=annotations.boxes_xywh,
            classes=annotations.classes,
            crowd=annotations.crowd,
            areas=annotations.areas,
            names=annotations.names,
        )

    def __call__(self, model: torch.nn.Module) -> Evaluation | None:
        """Scores of ``model`` on the first process, None on the others."""
        progress = Progress(self.num_images, "evaluate", self.world.is_main, self.lines)
        found = detect(model, self.loader, self.postprocess, self.to_original, self.world.device, progress)
        found["image_id"] = self.ground_truth.image_ids[found["image_id"]]
        gathered = gather_arrays(found)
        if gathered is None:
            return None
        detections = np.concatenate(gathered)
        return Evaluation(score(self.ground_truth, detections), detections)

    def to_original(self, batch: Batch, i: int, boxes_xyxy: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        if not self.clip:
            return boxes
        height, width = self.ground_truth.sizes[int(batch.indices[i])].tolist()
        return cut_at_edges(boxes, (height, width))


def open_split(config: DataConfig, split: str, world: World) -> Annotations:
    """The index of one split; the first process of each node builds it if need be, the others wait and map the same."""
    with torch_distributed_zero_first(world):
        return open_annotations(config, split)


def open_images(annotations: Annotations, config: DataConfig, world: World) -> ImageSource:
    """The images of a split, read from their files, or with ``data.cache`` decoded once for all processes of a node.

    In memory the cache's file has a name of this run's own and is unlinked as soon as everyone has it open, so that
    nothing stays when the run ends in whatever way. On a disk it stays for the next run.
    """
    images = ImageSource(annotations, config.on_error)
    if config.cache == ImageCache.none:
        return images
    on_disk = config.cache == ImageCache.disk
    if on_disk:
        path = Path(config.index_dir).absolute() / kept_cache_name(annotations, config.on_error)
    else:
        path = MEMORY_FILES / f"hydra-yolov3-spp-{broadcast_text(uuid.uuid4().hex)}"
    try:
        with torch_distributed_zero_first(world):
            build_image_cache(images, path, config.cache)
            cache = CachedImages(path, annotations)
        barrier()
    finally:
        if world.is_local_main and not on_disk:
            path.unlink(missing_ok=True)
    return ImageSource(annotations, config.on_error, cache)


def _short(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"


if __name__ == "__main__":
    run("eval", EvalConfig, evaluate, complete_from_checkpoint)
