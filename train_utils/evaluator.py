"""Scores of a network on a data set, for train.py, eval.py and export.py."""

import math

import numpy as np
import torch
from numpy import ndarray

import data
import models
from conf import ConfigError
from conf.schema import EvalConfig, ExportConfig, TrainConfig
from data import Annotations, Batch
from data.progress import LogLine, Progress, counted, log
from models import Darknet
from train_utils import build, coco_eval, distributed, engine, numerics, results
from train_utils.distributed import World
from train_utils.inference import detect
from train_utils.inference.open_checkpoint import TrainedNetwork
from train_utils.train_state import LOSS_NAMES


class Evaluator:
    """Score models like ``model`` on one data set; made once, called after every epoch.

    Batches are formed before they are dealt to the ranks, so each image is computed in the same
    batch on any number of ranks. ``image_size`` is for a ``config`` that leaves it open.
    ``classes`` are the model's number of each class of the data; None: they are the same.
    """

    def __init__(
        self,
        config: TrainConfig | EvalConfig | ExportConfig,
        val_set: Annotations,
        model: Darknet,
        world: World,
        image_size: int | list[int],
        *,
        classes: list[int] | None = None,
    ) -> None:
        options, data_options = config.evaluate, config.data
        assert data_options is not None
        timeout = config.timeout_seconds if isinstance(config, EvalConfig) else 0.0
        self.loss = None
        if isinstance(config, TrainConfig):
            timeout = config.train.timeout_seconds
            # A separate instance: what it caches under inference_mode cannot be used in training.
            self.loss = build.build_loss(model.heads, config.loss)
        size = options.image_size or image_size
        build.check_size(model, size, "evaluate.image_size")
        self.options = options
        self.world = world
        self.classes = classes
        self.truth = results.GroundTruth.of(val_set)
        numerics.autocast_dtype(options.precision, world.device, "evaluate.precision")  # TrainError if it has none
        self.scorer = coco_eval.choose_scorer(options.scorer)
        self.postprocess = build.build_postprocess(options, model, classes, in_training=self.loss is not None)
        rect = options.rect and model.takes_any_size
        of_all_ranks = data.eval_batches(
            val_set.sizes, size, options.batch_size, stride=model.max_stride, rect=rect, resize=options.resize
        )
        batches = of_all_ranks[world.rank :: world.world_size]
        self.num_images = sum(map(len, batches))
        self.images = build.open_images(val_set, data_options, world)
        dataset = data.EvalDataset(val_set, self.images, options.resize)
        workers = build.loader_workers(data_options.workers, world)
        largest = 3 * options.batch_size * math.prod(data.both_sides(size))
        self.loader = data.make_loader(dataset, batches, workers, world.device, timeout, batch_bytes=largest)

    def __call__(self, model: torch.nn.Module, log_line: LogLine, refines: bool = False) -> coco_eval.Evaluation | None:
        """Score ``model``, in eval mode; None on all ranks but 0. ``refines`` is for the loss."""
        assert isinstance(model, Darknet)
        device = self.world.device
        distributed.broadcast_module(model)  # without SyncBatchNorm the statistics of the ranks differ
        rows = [torch.zeros(1 + len(LOSS_NAMES), device=device)]  # images, losses of batches; read at the end

        def keep_losses(batch: Batch, raw_maps: list[torch.Tensor]) -> None:
            if self.loss is not None:
                losses = self.loss(raw_maps, batch.targets.to(device, non_blocking=True), refines=refines)
                rows.append(torch.stack((torch.full_like(losses.total, len(batch.images)), *losses)))

        of_batches = detect.detect_batches(
            models.for_detection(model, device),
            self.loader,
            self.postprocess,
            device,
            on_raw_maps=keep_losses,
            precision=self.options.precision,
        )
        progress = Progress(self.num_images, "evaluate", self.world.is_main)
        found = detect.collect_detections(of_batches, self.to_original, progress)
        left_out = build.describe_left_out(self.images, "val")
        if left_out is not None:
            log_line(left_out)
        found_by_ranks = distributed.gather_arrays(found)
        losses_of_ranks = distributed.gather_arrays(torch.stack(rows).double().cpu().numpy())
        if found_by_ranks is None or losses_of_ranks is None:
            return None
        found = np.concatenate(found_by_ranks)
        found["image_id"] = self.truth.image_ids[found["image_id"]]  # positions before
        if self.classes is not None:
            number_in_data = np.zeros(max(self.classes) + 1, int)
            number_in_data[self.classes] = np.arange(len(self.classes))
            found["class"] = number_in_data[found["class"]]
        evaluation = coco_eval.score(self.truth, found, self.scorer)
        if self.loss is None:
            return evaluation
        means = mean_losses(np.concatenate(losses_of_ranks))
        if not np.isfinite(list(means.values())).all():
            log_line(f"val: the loss is not finite. fix: {engine.HELP}")
        return evaluation._replace(losses=means)

    def to_original(self, batch: Batch, i: int, boxes_xyxy: ndarray) -> ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = data.Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        height, width = self.truth.sizes[int(batch.indices[i])].tolist()
        return data.cut_at_edges(boxes, (height, width)) if self.options.clip else boxes


def mean_losses(rows: ndarray) -> dict[str, float]:
    """Means by LOSS_NAMES; ``rows``: images and losses of batches, in any order by fsum."""
    images, *losses = rows.T
    means = {}
    for name, column in zip(LOSS_NAMES, losses, strict=True):
        means[name] = math.fsum(images * column) / images.sum()
    return means


def score_network(
    config: EvalConfig | ExportConfig, network: TrainedNetwork, val_set: Annotations, world: World
) -> coco_eval.Evaluation | None:
    """Score a trained network on its classes of the data; None on all ranks but 0."""
    classes = class_numbers(network, val_set)
    model = network.model.to(world.device)
    evaluator = Evaluator(config, val_set, model, world, network.image_size, classes=classes)
    return evaluator(model, log.info)


def class_numbers(network: TrainedNetwork, val_set: Annotations) -> list[int] | None:
    """The network's number of each class of the data, a ConfigError, or None: they are the same."""
    known, given = network.names, val_set.names
    order = models.class_order(known, given)
    if order is None:
        raise ConfigError(
            f"the network knows {counted(len(known), 'class')} ({listed(known)}), the data has {len(given)} "
            f"({listed(given)}): {network.note}",
            "data.classes=[<names>] with classes that both have, "
            "other data, or weights converted anew with names=<the data's .json>",
        )
    if known == given:
        return None
    if order == list(range(len(known))):
        log.info("names taken as equal: those of one are numbers, or Darknet's words")
        return None
    log.info(f"scored on {len(given)} of its {counted(len(known), 'class')}, by name")
    return order


def listed(names: list[str]) -> str:
    """The first five names, and whether there are more."""
    return ", ".join([*names[:5], "..."] if len(names) > 5 else names)
