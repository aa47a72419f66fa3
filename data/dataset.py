"""Make batches of network input from annotations and images.

A training sample depends only on the run's seed and its request. data/plan.py draws its plan; this
file draws its pixels and moves its boxes.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from data import geometry
from data.config import AugmentConfig, Colour, Resize
from data.errors import DataError
from data.geometry import PAD_VALUE, Boxes, Image, Matrix, Size, visible_boxes
from data.images import ImageSource
from data.index import Annotations
from data.loader import NO_GAINS, Batch, empty_images
from data.plan import Plan, Request, draw_plan

Targets = NDArray[np.float32]  # (T, 6) sample, class, cx, cy, w, h
Samples = NDArray[np.int64]  # (T,) numbers in the batch
Classes = NDArray[np.int32]  # (T,)

LEVELS = np.arange(256, dtype=np.float64)


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
    last_row: int  # how many of the image's first rows are needed
    draw: geometry.Draw


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
        self.seed, self.changes = seed, dict(changes or {})

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this once per batch."""
        buffer = empty_images(requests)
        plans = list(map(self.plan, requests))
        tiles = list(map(_visible_tiles, count(), plans))
        if self.images.is_remote:
            later = map(_visible_tiles, count(), map(self.plan, getattr(requests, "ahead", ())))
            self.images.begin([tile.position for tile in chain(*tiles, *later)])
        objects = self._objects(self._draw(buffer.numpy(), plans, tiles), plans[0].size)
        targets = self._changed(buffer.numpy(), requests, *objects) if self.changes else target_rows(*objects)
        gains = torch.from_numpy(np.array([plan.gains for plan in plans], np.float32))
        return Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(targets),
            indices=torch.tensor([request.index for request in requests]),
            gains=gains if self.augment.colour == Colour.device else NO_GAINS,
        )

    def plan(self, request: Request) -> Plan:
        """The plan of one sample."""
        augment = self.augment if request.epoch < self.first_plain_epoch else self.plain
        return draw_plan(request, self.annotations.sizes, augment, self.seed)

    def _draw(self, canvases: Image, plans: list[Plan], tiles: list[list[Tile]]) -> list[Tile]:
        """Draw the samples onto canvases (B, H, W, 3); return the tiles with readable images.

        Each image is decoded once, down to its last visible row, and freed after its last use.
        """
        last, rows = {}, Counter[int]()
        for tile in chain(*tiles):
            last[tile.position] = tile
            rows[tile.position] = max(rows[tile.position], tile.last_row)
        decoded, drawn = {}, []
        for canvas, plan, of_sample in zip(canvases, plans, tiles, strict=True):
            pictures = [canvas] if len(plan.pictures) == 1 else [canvas, np.empty_like(canvas)]
            for picture in pictures:
                picture.fill(PAD_VALUE)
            for tile in of_sample:
                if tile.position not in decoded:
                    decoded[tile.position] = self.images.read(tile.position, rows[tile.position])
                image = decoded[tile.position]
                if last[tile.position] is tile:
                    del decoded[tile.position]
                if image is not None:  # a skipped image leaves a grey area without boxes
                    # Others may need more rows, but the last bits of a warp depend on the source.
                    tile.draw(pictures[tile.picture], image[: tile.last_row])
                    drawn.append(tile)
            if len(pictures) == 2:
                cv2.addWeighted(canvas, plan.share, pictures[1], 1 - plan.share, 0, dst=canvas)
            if self.augment.colour != Colour.device:
                change_colour(canvas, plan.gains)
        return drawn

    def _objects(self, tiles: list[Tile], size: Size) -> tuple[Samples, Classes, Boxes]:
        """Sample, class and box of all that is visible in a batch, without crowds."""
        matrices = np.array([tile.matrix for tile in tiles], np.float64).reshape(-1, 3, 3)
        numbers = np.array([(tile.sample, tile.position) for tile in tiles], np.int64)
        samples, positions = numbers.reshape(-1, 2).T
        of_tile, classes, boxes = self.annotations.boxes_on(positions)
        clipped, usable = visible_boxes(geometry.move_boxes(boxes, matrices[of_tile]), size)
        return samples[of_tile[usable]], classes[usable], clipped[usable]

    def _changed(
        self, images: Image, requests: Sequence[Request], samples: Samples, classes: Classes, boxes: Boxes
    ) -> Targets:
        """Change the images (B, H, W, 3) in place, and return the changed targets.

        The generator of a change depends only on its name, the run's seed and the request.
        """
        changed = []
        for number, (before, request) in enumerate(zip(images, requests, strict=True)):
            own = samples == number
            image, own_boxes = before, boxes[own]
            own_classes = classes[own]
            for name, change in self.changes.items():
                seeds = [self.seed, request.epoch, request.index, request.repeat, zlib.crc32(name.encode())]
                sample = Sample(image, own_boxes, own_classes)
                image, moved, kept = change(sample, np.random.default_rng(seeds))
                if image.shape != before.shape or image.dtype != np.uint8:
                    made = f"{image.dtype} {image.shape} from one of uint8 {before.shape}"
                    raise DataError(f"augmentation {name} made an image of {made}", "keep size and type")
                reached = np.asarray(moved, np.float32).reshape(-1, 4)
                clipped, usable = visible_boxes(reached, before.shape[:2])
                own_boxes, own_classes = clipped[usable], np.asarray(kept, np.int32)[usable]
            before[:] = image
            changed.append(target_rows(np.full(len(own_classes), number), own_classes, own_boxes))
        return np.concatenate(changed)


def _visible_tiles(sample: int, plan: Plan) -> list[Tile]:
    tiles = []
    for number, picture in enumerate(plan.pictures):
        for index, size, (height, width), (x, y) in picture.placed:
            to_canvas = np.array([[width / size[1], 0, x], [0, height / size[0], y], [0, 0, 1]])
            matrix = picture.canvas_to_sample @ to_canvas
            shown = geometry.tile_of(matrix, size, plan.size)
            if shown is not None:
                tiles.append(Tile(sample, number, index, matrix, *shown))
    return tiles


def change_colour(image: Image, gains: NDArray[np.float64]) -> None:
    """Multiply hue, saturation and value of an RGB image by three gains, in place.

    In OpenCV's 8-bit HSV, hue in 0..179 wraps around, the others saturate at 255; all round down.
    """
    if (gains == 1).all():
        return
    hue, saturation, value = gains.tolist()
    tables = (LEVELS * hue % 180, np.minimum(LEVELS * saturation, 255), np.minimum(LEVELS * value, 255))
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    cv2.LUT(hsv, np.stack(tables, axis=-1).astype(np.uint8)[None], dst=hsv)
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=image)


def target_rows(samples: Samples, classes: Classes, boxes_xyxy: Boxes) -> Targets:
    """Targets of boxes (T, 4) with the sample and class (T,) of each."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    columns = (samples[:, None], classes[:, None], (low + high) / 2, high - low)
    return np.hstack(columns, dtype=np.float32)


class EvalDataset(torch.utils.data.Dataset[Batch]):
    """Images resized as ``resize`` says; the targets of the loss are as small as in training."""

    def __init__(self, annotations: Annotations, images: ImageSource, resize: Resize = Resize.letterbox) -> None:
        self.annotations, self.images = annotations, images
        self.resize = resize

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this once per batch."""
        buffer = empty_images(requests)
        indices = [request.index for request in requests]
        self.images.begin(indices + [request.index for request in getattr(requests, "ahead", ())])
        targets, letterboxes = [], []
        for number, (canvas, index) in enumerate(zip(buffer.numpy(), indices, strict=True)):
            image = self.images.read(index)
            if image is None:  # skipped: a grey image, so its objects count as missed
                image = np.full((*self.annotations.sizes[index], 3), PAD_VALUE, np.uint8)
            letterbox = geometry.resize_into(canvas, image, self.resize)
            classes, boxes = self.annotations.training_boxes(index)
            clipped, usable = visible_boxes(letterbox.to_network(boxes), canvas.shape[:2])
            targets.append(target_rows(np.full(usable.sum(), number), classes[usable], clipped[usable]))
            letterboxes.append(letterbox)
        return Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(np.concatenate(targets)),
            indices=torch.tensor(indices),
            letterboxes=torch.tensor(letterboxes, dtype=torch.float64),
        )
