"""Scores of a network on a data set, for train.py, eval.py and export.py."""

import math
from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

import data
import models
from conf import ConfigError
from conf.schema import EvalPrecision, EvaluateConfig, TrainConfig
from data import Annotations
from data.progress import Progress, counted, log
from models import Darknet
from train_utils import build, coco_eval, distributed, numerics, results
from train_utils.distributed import World
from train_utils.engine import HELP
from train_utils.inference import detect, open_checkpoint
from train_utils.train_state import LOSS_NAMES


class Evaluator:
    """Score models like ``model`` on one data set; made once, called after every epoch.

    Batches are formed before they are dealt to the ranks, and none is padded. So each image is
    computed once and in the same batch, whatever the number of ranks. ``loss`` adds the validation
    losses. ``classes`` are the model's number of each class of the data; None: they are the same.
    """

    def __init__(
        self,
        val_set: Annotations,
        config: EvaluateConfig,
        *,
        image_size: int | list[int],
        model: Darknet,
        data_options: data.DataConfig,
        world: World,
        timeout_seconds: float = 0.0,
        loss: models.LossConfig | None = None,
        classes: list[int] | None = None,
    ) -> None:
        open_checkpoint.check_size(model, image_size, "evaluate.image_size")
        open_checkpoint.check_limits(model, config, "evaluate.")
        self.config = config
        self.world = world
        self.classes = classes
        self.truth = results.GroundTruth.of(val_set)
        self.dtype = numerics.autocast_dtype(config.precision.value, world.device, "evaluate.precision")
        self.scorer = coco_eval.choose_scorer(config.scorer)
        self.postprocess = build.build_postprocess(config, model.heads, classes, in_training=loss is not None)
        # A separate instance: tensors it caches under inference_mode cannot be used in training.
        self.loss = build.build_loss(model.heads, loss) if loss is not None else None

        rect = config.rect and model.takes_any_size
        of_all_ranks = data.eval_batches(
            val_set.sizes, image_size, config.batch_size, stride=model.max_stride, rect=rect, resize=config.resize
        )
        batches = of_all_ranks[world.rank :: world.world_size]
        self.num_images = sum(map(len, batches))
        self.images = build.open_images(val_set, data_options, world)
        dataset = data.EvalDataset(val_set, self.images, config.resize)
        workers = build.loader_workers(data_options.workers, world)
        largest = 3 * config.batch_size * math.prod(data.both_sides(image_size))
        self.loader = data.make_loader(dataset, batches, workers, world.device, timeout_seconds, batch_bytes=largest)

    @classmethod
    def of_training(cls, config: TrainConfig, val_set: Annotations, model: Darknet, world: World) -> Self:
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

    def __call__(
        self, model: torch.nn.Module, log_line: Callable[[str], object], refines: bool = False
    ) -> coco_eval.Evaluation | None:
        """Score ``model``, which is in eval mode; None on all ranks but 0.

        ``log_line`` reports unreadable images. Losses are means over the batches, weighted by their
        images; ``refines`` is that of the loss.
        """
        assert isinstance(model, Darknet)
        device = self.world.device
        distributed.broadcast_module(model)  # without SyncBatchNorm the statistics of the ranks differ
        losses: list[tuple[int, Tensor]] = []  # images of a batch, and LOSS_NAMES; read at the end

        def keep_losses(batch: data.Batch, raw_maps: list[Tensor]) -> None:
            if self.loss is not None:
                targets = batch.targets.to(device, non_blocking=True)
                losses.append((len(batch.images), torch.stack(self.loss(raw_maps, targets, refines=refines))))

        of_batches = detect.detect_batches(
            models.for_detection(model, device),
            self.loader,
            self.postprocess,
            device,
            on_raw_maps=keep_losses,
            dtype=self.dtype,
            tf32=self.config.precision is EvalPrecision.tf32,
        )
        progress = Progress(self.num_images, "evaluate", self.world.is_main)
        found = detect.collect_detections(of_batches, self.to_original, progress)
        left_out = build.describe_left_out(self.images, "val")
        if left_out is not None:
            log_line(left_out)
        found_by_ranks = distributed.gather_arrays(found)
        losses_of_ranks = distributed.gather_arrays(np.array([(images, *each.tolist()) for images, each in losses]))
        if found_by_ranks is None or losses_of_ranks is None:
            return None
        evaluation = coco_eval.score(self.truth, self._in_numbers_of_data(found_by_ranks), self.scorer)
        if self.loss is None:
            return evaluation
        means = mean_losses(losses_of_ranks)
        if not all(map(math.isfinite, means.values())):
            log_line(f"val: the loss is not finite. fix: {HELP}")
        return evaluation._replace(losses=means)

    def _in_numbers_of_data(self, found_by_ranks: list[results.Detections]) -> results.Detections:
        """The detections of all ranks, with the classes and image ids of the data."""
        found = np.concatenate(found_by_ranks)
        if self.classes is not None:
            number_in_data = np.zeros(max(self.classes) + 1, int)
            number_in_data[self.classes] = np.arange(len(self.classes))
            found["class"] = number_in_data[found["class"]]
        found["image_id"] = self.truth.image_ids[found["image_id"]]
        return found

    def to_original(self, batch: data.Batch, i: int, boxes_xyxy: ndarray) -> ndarray:
        """Boxes (n, 4) of the batch's i-th image from network pixels to original pixels."""
        boxes = data.Letterbox(*batch.letterboxes[i].tolist()).to_original(boxes_xyxy)
        height, width = self.truth.sizes[int(batch.indices[i])].tolist()
        return data.cut_at_edges(boxes, (height, width)) if self.config.clip else boxes


def mean_losses(of_ranks: list[ndarray]) -> dict[str, float]:
    """Means by LOSS_NAMES over all images, of which each has the loss of its batch.

    A rank has a row for each batch: its images and losses. fsum rounds once, so ranks and order do
    not matter.
    """
    rows = np.concatenate([of_rank for of_rank in of_ranks if len(of_rank)])
    images, losses = rows[:, 0], rows[:, 1:]
    means = [math.fsum(images * column) / images.sum() for column in losses.T]
    return dict(zip(LOSS_NAMES, means, strict=True))


def class_numbers(network: open_checkpoint.TrainedNetwork, val_set: Annotations) -> list[int] | None:
    """The network's number of each class of the data; None if the classes are the same.

    Raises ConfigError if the network lacks a class of the data.
    """
    known, given = network.names, val_set.names
    order = models.class_order(known, given)
    if order is None:
        raise ConfigError(
            f"the network knows {counted(len(known), 'class')} ({listed(known)}), the data has {len(given)} "
            f"({listed(given)}): {network.note}. fix: data.classes=[...] with classes that both have, other data, or "
            "weights converted anew with names=<the data's .json>"
        )
    if known == given:
        return None
    if order == list(range(len(known))):
        log.info("names taken as equal: those of one are numbers")
        return None
    log.info(f"scored on {len(given)} of its {counted(len(known), 'class')}, by name")
    return order


def listed(names: list[str]) -> str:
    """The first five names, and whether there are more."""
    return ", ".join([*names[:5], "..."] if len(names) > 5 else names)
