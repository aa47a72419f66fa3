"""Make batches of network input from annotations and images.

A training sample depends only on the run's seed and its request, not on worker, rank or earlier
samples. data/plan.py draws its plan; this file draws its pixels and moves its boxes.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from data.colour import change_colour
from data.config import AugmentConfig, Colour, Resize
from data.errors import DataError
from data.geometry import PAD_VALUE, Boxes, Image, Letterbox, Matrix, Size, move_boxes, resize_into, visible_boxes
from data.images import ImageSource
from data.index import Annotations
from data.loader import Batch, empty_images
from data.plan import Plan, Request, draw_plan
from data.tiles import UprightTile, WarpedTile, tile_of

Targets = NDArray[np.float32]  # (T, 6) sample, class, cx, cy, w, h
Samples = NDArray[np.int64]  # (T,) numbers in the batch
Classes = NDArray[np.int32]  # (T,)


class Sample(NamedTuple):
    """A sample before it becomes network input."""

    image: Image  # uint8 (H, W, 3) RGB; may be changed in place
    boxes_xyxy: Boxes  # (n, 4) in pixels of the image
    classes: Classes


Change = Callable[[Sample, np.random.Generator], Sample]
AUGMENTATIONS: dict[str, Change] = {}  # of plugins, by name


class Tile(NamedTuple):
    """An image that is visible in a sample."""

    sample: int  # its number in the batch
    picture: int  # 1: of the second picture of a blend
    position: int  # of the image in the data set
    matrix: Matrix  # maps the image to the sample
    drawing: UprightTile | WarpedTile


class TrainDataset(torch.utils.data.Dataset[Batch]):
    """Augmented training samples; the last epochs do without mosaic and mixup.

    Each of ``changes`` then changes the sample further.
    """

    def __init__(
        self,
        annotations: Annotations,
        images: ImageSource,
        augment: AugmentConfig,
        *,
        seed: int,
        epochs: int,
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        self.annotations, self.images = annotations, images
        self.augment, self.plain = augment, replace(augment, mosaic=0, mixup=0)
        self.first_plain_epoch = epochs - augment.plain_epochs(epochs)
        self.seed = seed
        self.changes = dict(changes or {})

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, request: Request) -> Batch:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this once per batch.

        An image that several samples show is decoded once.
        """
        buffer = empty_images(requests)
        plans = [self.plan(request) for request in requests]
        tiles = [_visible_tiles(number, plan) for number, plan in enumerate(plans)]
        visible = list(chain.from_iterable(tiles))
        if self.images.is_remote:
            later = [_visible_tiles(0, self.plan(request)) for request in getattr(requests, "ahead", ())]
            self.images.begin(tile.position for tile in chain(visible, *later))
        images = _BatchImages(self.images, visible)
        drawn = list[Tile]()
        for canvas, plan, of_sample in zip(buffer.numpy(), plans, tiles, strict=True):
            drawn += self._draw(canvas, plan, of_sample, images)
        self.images.check_batch([tile.position for tile in visible], len(drawn))
        objects = self._objects(drawn, plans[0].size)
        targets = self._changed(buffer.numpy(), requests, *objects) if self.changes else target_rows(*objects)
        batch = Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(targets),
            indices=torch.tensor([request.index for request in requests]),
        )
        if self.augment.colour == Colour.device:
            batch.gains = torch.from_numpy(np.array([plan.gains for plan in plans], dtype=np.float32))
        return batch

    def plan(self, request: Request) -> Plan:
        """The plan of one sample."""
        augment = self.augment if request.epoch < self.first_plain_epoch else self.plain
        return draw_plan(request, self.annotations.sizes, augment, self.seed)

    def _draw(self, canvas: Image, plan: Plan, tiles: list[Tile], images: "_BatchImages") -> list[Tile]:
        """Draw one sample onto the canvas (H, W, 3); return the tiles whose images are readable."""
        pictures = [canvas, *(np.empty_like(canvas) for _ in plan.pictures[1:])]
        for picture in pictures:
            picture.fill(PAD_VALUE)
        drawn = []
        for tile in tiles:
            image = images.take(tile.position)
            if image is not None:  # a skipped image leaves a grey area without boxes
                tile.drawing.draw(pictures[tile.picture], image)
                drawn.append(tile)
        if len(pictures) == 2:
            cv2.addWeighted(canvas, plan.share, pictures[1], 1 - plan.share, 0, dst=canvas)
        if self.augment.colour != Colour.device:
            change_colour(canvas, plan.gains)
        return drawn

    def _objects(self, tiles: list[Tile], size: Size) -> tuple[Samples, Classes, Boxes]:
        """Sample, class and box of all that is visible in a batch, without crowds.

        Boxes are clipped to their images, then mapped, for all tiles of the batch at once: that
        takes hardly longer than for one.
        """
        matrices = np.array([tile.matrix for tile in tiles], dtype=np.float64).reshape(-1, 3, 3)
        numbers = np.array([(tile.sample, tile.position) for tile in tiles], dtype=np.int64)
        samples, positions = numbers.reshape(-1, 2).T
        of_tile, classes, boxes = self.annotations.boxes_on(positions)
        clipped, usable = visible_boxes(move_boxes(boxes, matrices[of_tile]), size)
        return samples[of_tile[usable]], classes[usable], clipped[usable]

    def _changed(
        self, images: Image, requests: Sequence[Request], samples: Samples, classes: Classes, boxes: Boxes
    ) -> Targets:
        """Change the images (B, H, W, 3) in place, and return the changed targets.

        The generator of a change depends only on its name, the run's seed and the request.
        """
        changed = []
        for number, (image, request) in enumerate(zip(images, requests, strict=True)):
            own = samples == number
            sample = Sample(image, boxes[own], classes[own])
            for name, change in self.changes.items():
                seeds = [self.seed, request.epoch, request.index, request.repeat, zlib.crc32(name.encode())]
                sample = _checked(name, change(sample, np.random.default_rng(seeds)), image)
            image[:] = sample.image
            numbers = np.full(len(sample.classes), number)
            changed.append(target_rows(numbers, sample.classes, sample.boxes_xyxy))
        return np.concatenate(changed)


def _checked(name: str, sample: Sample, before: Image) -> Sample:
    """What an augmentation made, with its usable boxes. Raises ``DataError`` for another size."""
    image = sample.image
    if image.shape != before.shape or image.dtype != np.uint8:
        raise DataError(
            f"augmentation {name} made an image of {image.dtype} {image.shape} from one of uint8 {before.shape}. "
            "fix: keep size and type"
        )
    boxes = np.asarray(sample.boxes_xyxy, dtype=np.float32).reshape(-1, 4)
    clipped, usable = visible_boxes(boxes, before.shape[:2])
    return Sample(image, clipped[usable], np.asarray(sample.classes, dtype=np.int32)[usable])


def _visible_tiles(sample: int, plan: Plan) -> list[Tile]:
    tiles = []
    for number, picture in enumerate(plan.pictures):
        for index, placed in zip(picture.indices, picture.placed, strict=True):
            matrix = picture.canvas_to_sample @ placed.matrix()
            drawing = tile_of(matrix, placed.size, plan.size)
            if drawing is not None:
                tiles.append(Tile(sample, number, index, matrix, drawing))
    return tiles


class _BatchImages:
    """Decode each image once, down to its last visible row; free it after its last use."""

    def __init__(self, source: ImageSource, tiles: Sequence[Tile]) -> None:
        self._source = source
        self._uses, self._rows = Counter[int](), Counter[int]()
        for tile in tiles:
            self._uses[tile.position] += 1
            self._rows[tile.position] = max(self._rows[tile.position], tile.drawing.last_row)
        self._decoded: dict[int, Image | None] = {}

    def take(self, index: int) -> Image | None:
        """Return an image down to its last visible row; ``None`` if it is skipped as unreadable."""
        if index not in self._decoded:
            self._decoded[index] = self._source.read(index, self._rows[index])
        self._uses[index] -= 1
        return self._decoded[index] if self._uses[index] else self._decoded.pop(index)


def target_rows(samples: Samples, classes: Classes, boxes_xyxy: Boxes) -> Targets:
    """Targets of boxes (T, 4) with the sample and class (T,) of each."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    columns = (samples[:, None], classes[:, None], (low + high) / 2, high - low)
    return np.concatenate(columns, axis=1, dtype=np.float32)


class EvalDataset(torch.utils.data.Dataset[Batch]):
    """Images resized as ``resize`` says; the targets of the loss are as small as in training."""

    def __init__(self, annotations: Annotations, images: ImageSource, resize: Resize = Resize.letterbox) -> None:
        self.annotations, self.images = annotations, images
        self.resize = resize

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, request: Request) -> Batch:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this once per batch."""
        buffer = empty_images(requests)
        self.images.begin(request.index for request in (*requests, *getattr(requests, "ahead", ())))
        targets, letterboxes = list[Targets](), list[Letterbox]()
        num_readable = 0
        for number, (canvas, request) in enumerate(zip(buffer.numpy(), requests, strict=True)):
            image = self.images.read(request.index)
            if image is None:  # skipped: a grey image, so its objects count as missed
                image = np.full((*self.annotations.sizes[request.index], 3), PAD_VALUE, dtype=np.uint8)
            else:
                num_readable += 1
            letterbox = resize_into(canvas, image, self.resize)
            classes, boxes = self.annotations.training_boxes(request.index)
            clipped, usable = visible_boxes(letterbox.to_network(boxes), canvas.shape[:2])
            numbers = np.full(usable.sum(), number)
            targets.append(target_rows(numbers, classes[usable], clipped[usable]))
            letterboxes.append(letterbox)
        self.images.check_batch([request.index for request in requests], num_readable)
        return Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(np.concatenate(targets)),
            indices=torch.tensor([request.index for request in requests]),
            letterboxes=torch.tensor(letterboxes, dtype=torch.float64),
        )
