"""Make batches of network input from annotations and images.

A training sample depends only on the run's seed and its request, not on worker, rank or earlier
samples. data/plan.py draws its plan; this file draws its pixels and moves its boxes.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from data.colour import change_colour
from data.config import AugmentConfig, Colour, Resize
from data.errors import DataError
from data.geometry import PAD_VALUE, Boxes, Image, Matrix, Size, move_boxes, resize_into, visible_boxes
from data.images import ImageSource
from data.index import Annotations
from data.loader import Batch, empty_images
from data.plan import Plan, Request, draw_plan
from data.tiles import UprightTile, WarpedTile, tile_of

Targets = NDArray[np.float32]  # (T, 6) sample, class, cx, cy, w, h


class Sample(NamedTuple):
    """A sample before it becomes network input."""

    image: Image  # uint8 (H, W, 3) RGB; may be changed in place
    boxes_xyxy: Boxes  # (n, 4) in pixels of the image
    classes: NDArray[np.int32]  # (n,)


Change = Callable[[Sample, np.random.Generator], Sample]
AUGMENTATIONS: dict[str, Change] = {}  # of plugins, by name


class Tile(NamedTuple):
    """An image that is visible in a sample."""

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
        pictures = [_visible_tiles(plan) for plan in plans]
        visible = [tile for sample in pictures for tiles in sample for tile in tiles]
        if self.images.is_remote:
            ahead = [_visible_tiles(self.plan(request)) for request in getattr(requests, "ahead", ())]
            later = [tile for sample in ahead for tiles in sample for tile in tiles]
            self.images.begin(tile.position for tile in (*visible, *later))
        images = _BatchImages(self.images, visible)
        drawn = [
            self._draw(canvas, plan, sample, images)
            for canvas, plan, sample in zip(buffer.numpy(), plans, pictures, strict=True)
        ]
        self.images.check_batch([tile.position for tile in visible], sum(map(len, drawn)))
        targets = self._targets(drawn, plans[0].size)
        if self.changes:
            targets = self._changed(buffer.numpy(), targets, requests)
        left_to_device = [plan.gains for plan in plans if self.augment.colour == Colour.device]
        return Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(targets),
            indices=torch.tensor([request.index for request in requests]),
            gains=torch.from_numpy(np.array(left_to_device, dtype=np.float32).reshape(-1, 3)),
        )

    def plan(self, request: Request) -> Plan:
        """The plan of one sample."""
        augment = self.augment if request.epoch < self.first_plain_epoch else self.plain
        return draw_plan(request, self.annotations.sizes, augment, self.seed)

    def _draw(self, canvas: Image, plan: Plan, pictures: list[list[Tile]], images: "_BatchImages") -> list[Tile]:
        """Draw one sample onto the canvas (H, W, 3); return the tiles whose images are readable."""
        tiles = _draw_picture(canvas, pictures[0], images)
        if len(plan.pictures) == 2:
            other = np.empty_like(canvas)
            tiles += _draw_picture(other, pictures[1], images)
            cv2.addWeighted(canvas, plan.share, other, 1 - plan.share, 0, dst=canvas)
        if self.augment.colour != Colour.device:
            change_colour(canvas, plan.gains)
        return tiles

    def _targets(self, drawn: list[list[Tile]], size: Size) -> Targets:
        """Return the targets of all samples.

        Boxes are clipped to their images, then mapped, for all tiles of the batch at once: that
        takes hardly longer than for one. Crowds are left out: they are regions, not objects.
        """
        tiles = [tile for sample in drawn for tile in sample]
        matrices = np.array([tile.matrix for tile in tiles], dtype=np.float64).reshape(-1, 3, 3)
        images = np.array([tile.position for tile in tiles], dtype=np.int64)
        listed = self.annotations
        starts, counts = listed.offsets[images], listed.offsets[images + 1] - listed.offsets[images]
        of_tile = np.repeat(np.arange(len(tiles)), counts)
        rows = np.arange(len(of_tile)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        objects = ~listed.crowd[rows]
        of_tile, rows = of_tile[objects], rows[objects]
        boxes = listed.boxes_xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        limits = listed.sizes[images][:, [1, 0, 1, 0]][of_tile]
        moved = move_boxes(np.clip(boxes, 0, limits).astype(np.float32), matrices[of_tile])
        clipped, usable = visible_boxes(moved, size)
        samples = np.repeat(np.arange(len(drawn)), [len(sample) for sample in drawn])[of_tile]
        return target_rows(samples[usable], listed.classes[rows][usable], clipped[usable])

    def _changed(self, images: np.ndarray, targets: Targets, requests: Sequence[Request]) -> Targets:
        """Change the images (B, H, W, 3) in place, and return the changed targets.

        The generator of a change depends only on its name, the run's seed and the request.
        """
        changed = []
        for number, (image, request) in enumerate(zip(images, requests, strict=True)):
            rows = targets[targets[:, 0] == number]
            centres, halves = rows[:, 2:4], rows[:, 4:6] / 2
            boxes = np.concatenate((centres - halves, centres + halves), axis=1)
            sample = Sample(image, boxes, rows[:, 1].astype(np.int32))
            for name, change in self.changes.items():
                seeds = [self.seed, request.epoch, request.index, request.repeat, zlib.crc32(name.encode())]
                sample = change(sample, np.random.default_rng(seeds))
                if sample.image.shape != image.shape or sample.image.dtype != np.uint8:
                    raise DataError(
                        f"augmentation {name} made an image of {sample.image.dtype} {sample.image.shape} from one of "
                        f"uint8 {image.shape}. fix: keep size and type"
                    )
                height, width = image.shape[:2]
                boxes = np.asarray(sample.boxes_xyxy, dtype=np.float32).reshape(-1, 4)
                boxes = boxes.clip(0, [width, height, width, height]).astype(np.float32)
                usable = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                sample = Sample(sample.image, boxes[usable], np.asarray(sample.classes, dtype=np.int32)[usable])
            image[:] = sample.image
            changed.append(target_rows(np.full(len(sample.classes), number), sample.classes, sample.boxes_xyxy))
        return np.concatenate(changed)


def _visible_tiles(plan: Plan) -> list[list[Tile]]:
    """The tiles of each picture."""
    pictures = []
    for picture in plan.pictures:
        tiles = []
        for index, placed in zip(picture.indices, picture.placed, strict=True):
            matrix = picture.canvas_to_sample @ placed.matrix()
            drawing = tile_of(matrix, placed.size, plan.size)
            if drawing is not None:
                tiles.append(Tile(index, matrix, drawing))
        pictures.append(tiles)
    return pictures


def _draw_picture(canvas: Image, tiles: list[Tile], images: "_BatchImages") -> list[Tile]:
    canvas.fill(PAD_VALUE)
    drawn = []
    for tile in tiles:
        image = images.take(tile.position)
        if image is not None:  # a skipped image leaves a grey area without boxes
            tile.drawing.draw(canvas, image)
            drawn.append(tile)
    return drawn


class _BatchImages:
    """Decode each image once, down to its last visible row; free it after its last use."""

    def __init__(self, source: ImageSource, tiles: Sequence[Tile]) -> None:
        self._source = source
        self._uses: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        for tile in tiles:
            self._uses[tile.position] = self._uses.get(tile.position, 0) + 1
            self._rows[tile.position] = max(self._rows.get(tile.position, 0), tile.drawing.last_row)
        self._decoded: dict[int, Image | None] = {}

    def take(self, index: int) -> Image | None:
        """Return an image down to its last visible row; ``None`` if it is skipped as unreadable."""
        if index not in self._decoded:
            self._decoded[index] = self._source.read(index, self._rows[index])
        self._uses[index] -= 1
        return self._decoded[index] if self._uses[index] else self._decoded.pop(index)


def target_rows(samples: np.ndarray, classes: np.ndarray, boxes_xyxy: Boxes) -> Targets:
    """Targets of boxes (T, 4) with the sample and class (T,) of each."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    columns = (samples[:, None], classes[:, None], (low + high) / 2, high - low)
    return np.concatenate(columns, axis=1, dtype=np.float32)


class EvalDataset(torch.utils.data.Dataset[Batch]):
    """Images resized as ``resize`` says; the targets of the loss are as small as in training."""

    def __init__(self, annotations: Annotations, images: ImageSource, resize: Resize = Resize.letterbox) -> None:
        self.annotations, self.images, self.resize = annotations, images, resize

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, request: Request) -> Batch:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[Request]) -> Batch:
        """Return the batch of requests of one size; torch's loader calls this once per batch."""
        buffer = empty_images(requests)
        self.images.begin(request.index for request in (*requests, *getattr(requests, "ahead", ())))
        targets, letterboxes, num_readable = [], [], 0
        for number, (canvas, request) in enumerate(zip(buffer.numpy(), requests, strict=True)):
            index = request.index
            image = self.images.read(index)
            num_readable += image is not None
            if image is None:  # skipped: a grey image, so its objects count as missed
                image = np.full((*self.annotations.sizes[index], 3), PAD_VALUE, dtype=np.uint8)
            box = resize_into(canvas, image, self.resize)
            classes, boxes = self.annotations.training_boxes(index)
            boxes, usable = visible_boxes(box.to_network(boxes), (request.height, request.width))
            targets.append(target_rows(np.full(usable.sum(), number), classes[usable], boxes[usable]))
            letterboxes.append(box)
        self.images.check_batch([request.index for request in requests], num_readable)
        return Batch(
            images=buffer.permute(0, 3, 1, 2),
            targets=torch.from_numpy(np.concatenate(targets)),
            indices=torch.tensor([request.index for request in requests]),
            letterboxes=torch.tensor(letterboxes, dtype=torch.float64),
        )
