"""Makes batches of network input from annotations and images.

A sample is a function of (seed, epoch, position) and of nothing else: not of the worker, the rank or what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.annotations import Annotations
from data.config import AugmentConfig
from data.images import ImageSource
from data.transforms import (
    PAD_VALUE,
    Boxes,
    Image,
    Matrix,
    fit_matrix,
    jitter_hsv,
    letterbox_into,
    mosaic_matrices,
    move_boxes,
    random_affine,
    visible_boxes,
    warp_into,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample asked of a data set: the image at ``index``, at ``height`` x ``width`` pixels."""

    index: int
    height: int
    width: int
    epoch: int


@dataclass
class Batch:
    """B samples of one size with T boxes in all."""

    images: Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    targets: Tensor  # float32 (T, 6): position in the batch, class, cx, cy, w, h in pixels of these images
    indices: Tensor  # int64 (B,) positions in the data set
    letterboxes: Tensor  # float64 (B, 4) ratio_x, ratio_y, pad_x, pad_y; (0, 4) for training samples

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; the loader calls this."""
        return Batch(**{field.name: getattr(self, field.name).pin_memory() for field in fields(self)})

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on a device."""
        return Batch(
            **{field.name: getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self)}
        )


class TrainDataset(Dataset[Batch]):
    """Augmented training samples."""

    def __init__(
        self, annotations: Annotations, augment: AugmentConfig, seed: int, epochs: int, images: ImageSource
    ) -> None:
        self.annotations = annotations
        self.augment = augment
        self.seed = seed
        self.first_plain_epoch = epochs - augment.close_mosaic_epochs
        self.images = images

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, request: Request) -> Batch:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """The batch of these requests, which must ask for one size. Torch's loader calls this once per batch."""
        buffer = _empty_images(requests)
        targets = [self._draw(canvas, request) for canvas, request in zip(buffer.numpy(), requests, strict=True)]
        return _batch(buffer, requests, targets, [])

    def _draw(self, canvas: Image, request: Request) -> NDArray[np.float32]:
        """Draws one sample onto the canvas (H, W, 3); returns its targets (n, 5): class, cx, cy, w, h."""
        seeds = np.random.SeedSequence([self.seed, request.epoch, request.index])
        generator = np.random.Generator(np.random.PCG64(seeds))
        indices, matrices = self._arrange(request, generator)
        canvas.fill(PAD_VALUE)
        classes, boxes = [], []
        for index, matrix in zip(indices, matrices, strict=True):
            image = self.images.read(index)
            if image is None:
                continue  # unreadable and to be skipped: its place stays grey, without boxes
            warp_into(canvas, image, matrix)
            image_classes, image_boxes = self.annotations.training_boxes(index)
            classes.append(image_classes)
            boxes.append(move_boxes(image_boxes, matrix))
        jitter_hsv(canvas, self.augment, generator)
        if not boxes:
            return np.zeros((0, 5), dtype=np.float32)
        clipped, kept = visible_boxes(np.concatenate(boxes), canvas.shape[:2], self.augment.min_visible)
        return _targets(np.concatenate(classes)[kept], clipped[kept])

    def _arrange(self, request: Request, generator: np.random.Generator) -> tuple[list[int], list[Matrix]]:
        """Which images make up the sample, and where each of them goes."""
        size = (request.height, request.width)
        use_mosaic = generator.random() < self.augment.mosaic and request.epoch < self.first_plain_epoch
        indices = [request.index]
        if use_mosaic:
            indices += generator.integers(len(self), size=3).tolist()
            placed = mosaic_matrices([self._size(index) for index in indices], size, generator)
        else:
            placed = [fit_matrix(self._size(request.index), size)]
        affine = random_affine(self.augment, size, generator)
        return indices, [affine @ matrix for matrix in placed]

    def _size(self, index: int) -> tuple[int, int]:
        height, width = self.annotations.sizes[index].tolist()
        return height, width


class EvalDataset(Dataset[Batch]):
    """Letterboxed images; ``upscale`` enlarges those that are smaller than the requested size."""

    def __init__(self, annotations: Annotations, images: ImageSource, upscale: bool = False) -> None:
        self.annotations = annotations
        self.images = images
        self.upscale = upscale

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, request: Request) -> Batch:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """The batch of these requests, which must ask for one size. Torch's loader calls this once per batch."""
        buffer = _empty_images(requests)
        targets, letterboxes = [], []
        for canvas, request in zip(buffer.numpy(), requests, strict=True):
            image = self.images.read(request.index)
            if image is None:  # unreadable and to be skipped: a grey image, whose objects count as missed
                image = np.full((*self.annotations.sizes[request.index], 3), PAD_VALUE, dtype=np.uint8)
            box = letterbox_into(canvas, image, self.upscale)
            classes, boxes = self.annotations.training_boxes(request.index)
            targets.append(_targets(classes, box.to_network(boxes)))
            letterboxes.append(box)
        return _batch(buffer, requests, targets, letterboxes)


def _empty_images(requests: Sequence[Request]) -> Tensor:
    """Memory for the images of a batch, uint8 (B, H, W, 3)."""
    height, width = requests[0].height, requests[0].width
    assert all((request.height, request.width) == (height, width) for request in requests), "one size per batch"
    return torch.empty((len(requests), height, width, 3), dtype=torch.uint8)


def _targets(classes: NDArray[np.int32], boxes_xyxy: Boxes) -> NDArray[np.float32]:
    """Rows (n, 5) of class, cx, cy, w, h."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    return np.concatenate([classes[:, None], (low + high) / 2, high - low], axis=1, dtype=np.float32)


def _batch(
    buffer: Tensor,
    requests: Sequence[Request],
    targets: list[NDArray[np.float32]],
    letterboxes: Sequence[Sequence[float]],
) -> Batch:
    rows = np.concatenate(targets)
    position = np.repeat(np.arange(len(targets), dtype=np.float32), [len(part) for part in targets])
    return Batch(
        images=buffer.permute(0, 3, 1, 2),
        targets=torch.from_numpy(np.concatenate([position[:, None], rows], axis=1)),
        indices=torch.tensor([request.index for request in requests]),
        letterboxes=torch.tensor(letterboxes, dtype=torch.float64).reshape(-1, 4),
    )
