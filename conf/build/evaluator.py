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
    Request,
    cut_at_edges,
    eval_batches,
    make_loader,
)
from models import AnyNetwork, for_detection
from train_utils.coco_eval import CocoResult, score
from train_utils.config import EvalPrecision
from train_utils.detect import detect
from train_utils.detections import MAX_CLASSES, Detections, GroundTruth, pack, unpack
from train_utils.distributed import World, gather_arrays
from train_utils.numerics import autocast_dtype
from train_utils.progress import Progress


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
        self.dataset = EvalDataset(annotations, images, config.upscale, config.resize)
        self.num_images = sum(len(batch) for batch in batches)
        workers = loader_workers(data.workers, world)
        self.loader = make_loader(self.dataset, batches, workers, world.device, timeout_seconds)
        self.postprocess = suppression(config, model.heads)

    def batches(self, batch_size: int) -> list[list[Request]]:
        """All images in batches of at most ``batch_size``, each of one shape."""
        config = self.config
        return eval_batches(
            self.ground_truth.sizes,
            self.image_size,
            batch_size,
            self.stride,
            config.rect,
            upscale=config.upscale,
            pad=config.rect_pad,
            resize=config.resize,
        )

    def __call__(self, model: torch.nn.Module) -> Evaluation | None:
        """Score ``model``; None on all ranks but 0."""
        progress = Progress(self.num_images, "evaluate", self.world.is_main)
        assert isinstance(model, AnyNetwork)
        network, tf32 = for_detection(model, self.world.device), self.config.precision is EvalPrecision.tf32
        place = self.to_original, self.world.device
        found = detect(network, self.loader, self.postprocess, *place, progress, self.dtype, tf32)
        gathered = gather_arrays(pack(found))
        if gathered is None:
            return None
        detections = unpack(np.concatenate(gathered), self.ground_truth.image_ids)
        return Evaluation(score(self.ground_truth, detections, self.config.backend), detections)

    def to_original(self, batch: Batch, i: int, boxes_xyxy: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        if self.config.clip:
            height, width = self.ground_truth.sizes[int(batch.indices[i])].tolist()
            boxes = cut_at_edges(boxes, (height, width))
        return np.rint(boxes) if self.config.round_boxes else boxes
