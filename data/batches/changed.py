"""Training samples that the augmentations of plugins change after all others."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.errors import DataError
from data.geometry import Image
from data.samples.batch import Batch, target_rows
from data.samples.dataset import TrainDataset
from data.samples.plan import Request


class Sample(NamedTuple):
    """A sample before it becomes network input."""

    image: Image  # uint8 (H, W, 3) RGB; may be changed in place
    boxes_xyxy: NDArray[np.float32]  # (n, 4) in its pixels
    classes: NDArray[np.int32]  # (n,)


Change = Callable[[Sample, np.random.Generator], Sample]
AUGMENTATIONS: dict[str, Change] = {}  # of the plugins in use, by name


class ChangedDataset(TrainDataset):
    """A TrainDataset whose samples ``changes`` change, one after the other.

    Each gets a generator that depends on its name, the run's seed and the request only.
    """

    def __init__(self, changes: Mapping[str, Change], *made_of: Any) -> None:
        super().__init__(*made_of)
        self.changes = dict(changes)

    def __reduce__(self) -> tuple[Callable[..., TrainDataset], tuple[Any, ...]]:
        return type(self), (self.changes, *super().__reduce__()[1])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this."""
        batch = super().__getitems__(requests)
        images, rows = batch.images.permute(0, 2, 3, 1).numpy(), batch.targets.numpy()
        changed = []
        for number, request in enumerate(requests):
            own = rows[rows[:, 0] == number]
            centres, halves = own[:, 2:4], own[:, 4:6] / 2
            boxes = np.concatenate((centres - halves, centres + halves), axis=1)
            sample = Sample(images[number], boxes, own[:, 1].astype(np.int32))
            for name, change in self.changes.items():
                sample = self._changed(name, change, sample, request)
            images[number] = sample.image
            changed.append(target_rows(np.full(len(sample.classes), number), sample.classes, sample.boxes_xyxy))
        return replace(batch, targets=torch.from_numpy(np.concatenate(changed)))

    def _changed(self, name: str, change: Change, sample: Sample, request: Request) -> Sample:
        seeds = [self.seed, request.epoch, request.index, request.repeat, zlib.crc32(name.encode())]
        image, boxes, classes = change(sample, np.random.default_rng(seeds))
        height, width = image.shape[:2]
        boxes = np.asarray(boxes, dtype=np.float32).reshape(-1, 4).clip(0, [width, height, width, height])
        kept = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        found = Sample(image, boxes[kept].astype(np.float32), np.asarray(classes, dtype=np.int32)[kept])
        if image.shape != sample.image.shape or image.dtype != np.uint8:
            raise DataError(
                f"augmentation {name} made an image of {image.dtype} {image.shape} from one of uint8 "
                f"{sample.image.shape}. fix: keep size and type"
            )
        return found
