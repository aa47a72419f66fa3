"""Score any model of one shape on one data set."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from conf.build.batches import loader_workers, open_images
from conf.build.predictor import suppression
from conf.failures import ConfigError
from conf.schema import EvaluateConfig
from data import (
    Annotations,
    Batch,
    DataConfig,
    EvalDataset,
    Letterbox,
    Looks,
    Request,
    cut_at_edges,
    eval_batches,
    make_loader,
)
from models import AnyNetwork, Fusion, Seen, for_detection
from train_utils.config import EvalPrecision
from train_utils.distributed import World, gather_arrays
from train_utils.loop.detect import detect
from train_utils.numerics import autocast_dtype
from train_utils.scores.coco_eval import CocoResult, score
from train_utils.scores.detections import MAX_CLASSES, Detections, GroundTruth, make_detections, pack, unpack
from train_utils.terminal.progress import Progress


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, on rank 0."""

    scores: CocoResult
    detections: Detections


def ground_truth_of(annotations: Annotations) -> GroundTruth:
    """The part of an index that detections are scored against."""
    return GroundTruth(**{field.name: getattr(annotations, field.name) for field in fields(GroundTruth)})


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
        lines: int = 5,
        timeout_seconds: float = 0.0,
    ) -> None:
        if (nearest := model.nearest_size(image_size, image_size)[0]) != image_size:
            raise ConfigError(
                f"evaluate.image_size={image_size} is not a multiple of the network's largest stride "
                f"{model.max_stride}. fix: evaluate.image_size={nearest}"
            )
        self.annotations, self.world, self.lines, self.config = annotations, world, lines, config
        self.dtype = autocast_dtype(config.precision.value, world.device, "evaluate.precision")
        self.image_size, self.stride = image_size, model.max_stride
        assert len(annotations.names) <= MAX_CLASSES, "a packed detection has two bytes for its class"
        self.ground_truth = ground_truth_of(annotations)
        self.looks = Looks.of(config, image_size, self.stride)
        sizes = [(height, width) for height, width in self.ground_truth.sizes.tolist()]
        self.views = [(index, view) for index, size in enumerate(sizes) for view in self.looks.views(size)]
        batches = self.batches(config.batch_size)[world.rank :: world.world_size]
        images = open_images(annotations, data, world)
        self.dataset = EvalDataset(annotations, images, config.upscale, config.resize, self.views)
        self.num_images = sum(len(batch) for batch in batches)
        workers = loader_workers(data.workers, world)
        self.loader = make_loader(self.dataset, batches, workers, world.device, timeout_seconds)
        self.postprocess, self.fusion = suppression(config, self.looks, model.heads)

    def batches(self, batch_size: int) -> list[list[Request]]:
        """All views of images in batches of at most ``batch_size``, each of one shape."""
        config = self.config
        return eval_batches(
            np.array([view.size for _, view in self.views]),
            [view.image_size for _, view in self.views],
            batch_size,
            self.stride,
            config.rect,
            upscale=config.upscale,
            pad=config.rect_pad,
            resize=config.resize,
        )

    def __call__(self, model: torch.nn.Module) -> Evaluation | None:
        """Score ``model``; None on all ranks but 0."""
        progress = Progress(self.num_images, "evaluate", self.world.is_main, self.lines)
        assert isinstance(model, AnyNetwork)
        network, tf32 = for_detection(model, self.world.device), self.config.precision is EvalPrecision.tf32
        place = self.to_original, self.world.device
        found = detect(network, self.loader, self.postprocess, *place, progress, self.dtype, tf32)
        gathered = gather_arrays(pack(found))
        if gathered is None:
            return None
        packed = np.concatenate(gathered)
        if self.fusion is not None:
            packed = self.merged(packed, self.fusion)
        detections = unpack(packed, self.ground_truth.image_ids)
        return Evaluation(score(self.ground_truth, detections, self.config.backend), detections)

    def merged(self, packed: np.ndarray, fusion: Fusion) -> np.ndarray:
        """Objects in images from detections in views, of all ranks; both as ``pack`` makes them."""
        packed = packed[np.argsort(packed["image"], kind="stable")]  # each view is from one rank
        views = packed["image"]
        images = np.array([index for index, _ in self.views])
        windows = np.concatenate(
            [self.looks.seen((height, width)) for height, width in self.ground_truth.sizes.tolist()]
        )
        numbers = packed["box_xywh"].astype(np.float64)  # in which neither sum nor difference rounds
        boxes = np.concatenate((numbers[:, :2], numbers[:, :2] + numbers[:, 2:]), axis=1)
        scores, classes = packed["score"].astype(np.float64), packed["class"].astype(np.int64)
        seen = Seen(boxes, scores, classes, images[views], windows[views])
        alone = (np.bincount(images) == 1)[seen.images]  # with one view: nothing to merge
        found = []
        for objects in (seen.rows(alone), fusion(seen.rows(~alone))):
            boxes = np.rint(objects.boxes_xyxy) if self.config.round_boxes else objects.boxes_xyxy
            found.append(make_detections(0, objects.classes, objects.scores, boxes))
            found[-1]["image_id"] = objects.images
        return pack(np.concatenate(found))

    def to_original(self, batch: Batch, i: int, boxes_xyxy: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) of the batch's i-th view from network pixels to original pixels."""
        boxes = Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        if self.config.clip:
            height, width = self.ground_truth.sizes[self.views[int(batch.indices[i])][0]].tolist()
            boxes = cut_at_edges(boxes, (height, width))
        return np.rint(boxes) if self.config.round_boxes and self.fusion is None else boxes
