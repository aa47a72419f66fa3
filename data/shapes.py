"""Draw images of coloured shapes, and write them as a COCO set with exact boxes and areas.

Objects overlap, but much of each stays visible; boxes and areas are those of the visible pixels, as
in COCO. An image depends only on (seed, split, number).
"""

import colorsys
import hashlib
import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from data.config import ShapesConfig
from data.errors import DataError
from data.io import end_with_parent, new_folder, usable_cores
from data.progress import log, tracked

Entry = dict[str, Any]  # of a COCO json
Mask = NDArray[np.bool_]  # (h, w)
Texture = NDArray[np.float32]  # (h, w, 3) RGB in 0..255
Outline = NDArray[np.complex128]  # (n,) corners x + iy inside the unit circle

DRAWING_VERSION = 5  # raise it when the same settings give other files
MIN_OBJECT = 16.0  # pixels across
MAX_OBJECT = 0.5  # of the image's shorter side
MAX_OBJECTS = 7
MIN_VISIBLE_SHARE = 0.45  # of each object
CHUNK = 16  # images that a process draws at a time
PLACEMENTS = 20  # attempts to place an object before it is left out
ASPECTS = (0.6, 1.6)  # height over width
AREAS = (0.7, 1.3)  # of an image, relative to image_size ** 2
HUE_SPREAD = 0.06  # standard deviation around a class's hue, as a share of the colour circle
MIN_CONTRAST = 70  # levels of a channel between an object and what it covers


def _corners(radii: list[float]) -> Outline:
    """Corners at equal angles."""
    turns = np.arange(len(radii)) / len(radii)
    return np.asarray(radii * np.exp(2j * np.pi * turns))


ARM = np.array([1 + 0.3j, 0.3 + 0.3j, 0.3 + 1j]) / abs(1 + 0.3j)  # a quarter of the cross
OUTLINES: dict[str, Outline] = {
    "circle": _corners([1.0] * 48),
    "square": _corners([1.0] * 4),
    "triangle": _corners([1.0] * 3),
    "star": _corners([1.0, 0.4] * 5),
    "cross": np.concatenate([ARM, ARM * 1j, -ARM, ARM * -1j]),
}
CLASSES = tuple(OUTLINES)


def ensure_shapes(root: Path, config: ShapesConfig) -> Path:
    """Return the folder below ``root`` with the set of ``config``; draw it if it is missing.

    Each ``config`` has its own folder. Any number of processes may call this at once.
    """
    parameters = {"version": DRAWING_VERSION, **asdict(config)}
    key = json.dumps(parameters, sort_keys=True)
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:8]
    if folder.is_dir():
        return folder
    log.info(f"drawing {config.train_images:,} + {config.val_images:,} images, once, in {folder}")
    try:
        with new_folder(folder) as temporary:
            (temporary / "annotations").mkdir()
            counts = {"train": config.train_images, "val": config.val_images}
            for number, (split, count) in enumerate(counts.items()):
                content = _draw_split(temporary / split, count, config.image_size, number)
                (temporary / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
            (temporary / "parameters.json").write_text(json.dumps(parameters, indent=2))
    except OSError as error:
        fix = "set data.root to a writable folder with free space"
        raise DataError(f"cannot write the drawn data set to {root} ({error.strerror})", fix) from error
    return folder


def _draw_split(folder: Path, count: int, image_size: int, seed: int) -> dict[str, Any]:
    folder.mkdir()
    images, objects = [], []
    # Threads would wait for each other. Spawned processes import torch, but macOS needs them.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(len(usable_cores()), context, _start_worker) as pool:
        drawn = pool.map(partial(_write_image, folder, image_size, seed), range(count), chunksize=CHUNK)
        for image, of_image in tracked(drawn, count, f"drawing {folder.name} shapes"):
            images.append(image)
            objects += of_image
    annotations = [{"id": number, **entry} for number, entry in enumerate(objects, start=1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _start_worker() -> None:
    end_with_parent()
    cv2.setNumThreads(0)  # threads of the parent are not here


def _write_image(folder: Path, image_size: int, seed: int, number: int) -> tuple[Entry, list[Entry]]:
    """Draw and write an image; return its COCO entry and those of its objects, without their id."""
    drawing = draw_image(image_size, default_rng([0, seed, number]))
    height, width = drawing.image.shape[:2]
    image_id = number + 1
    name = f"{image_id:06d}.jpg"
    bgr = cv2.cvtColor(drawing.image, cv2.COLOR_RGB2BGR)
    _, encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 90])
    (folder / name).write_bytes(encoded.tobytes())
    objects = []
    for kind, mask in zip(drawing.classes, drawing.masks, strict=True):
        box = cv2.boundingRect(mask.astype(np.uint8))
        entry = {"image_id": image_id, "category_id": kind + 1, "bbox": box}
        objects.append({**entry, "area": int(mask.sum()), "iscrowd": 0})
    return {"id": image_id, "file_name": name, "width": width, "height": height}, objects


class Drawing(NamedTuple):
    """An image (h, w, 3) uint8 RGB, and class and mask (h, w) of visible pixels of each object."""

    image: NDArray[np.uint8]
    classes: list[int]
    masks: list[Mask]


def draw_image(image_size: int, generator: Generator) -> Drawing:
    """Draw an image of about ``image_size ** 2`` pixels. One in twenty has no objects."""
    stretch = math.sqrt(math.exp(generator.uniform(*np.log(ASPECTS))))
    side = image_size * math.sqrt(generator.uniform(*AREAS))
    height, width = round(side * stretch), round(side / stretch)
    colours = generator.uniform(40, 216) + generator.uniform(-40, 40, (4, 4, 3))
    coarse = colours.astype(np.float32)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    image = np.asarray(smooth, np.float32)
    owner = np.zeros((height, width), np.int64)  # number of the object at each pixel, 0 for none
    areas = [0]  # of the objects by number, also where others cover them
    classes = []
    count = 0 if generator.random() < 0.05 else int(generator.integers(1, MAX_OBJECTS + 1))
    for _ in range(count):
        kind = int(generator.integers(len(CLASSES)))
        mask = _place(kind, owner, areas, generator)
        if mask is not None:
            _paint(image, mask, kind, generator)
            owner[mask] = len(areas)
            areas.append(int(mask.sum()))
            classes.append(kind)
    masks = [owner == number for number in range(1, len(areas))]
    noise = generator.normal(0, generator.uniform(2, 10), image.shape)
    return Drawing(np.clip(image + noise, 0, 255).astype(np.uint8), classes, masks)


def _place(kind: int, owner: NDArray[np.int64], areas: list[int], generator: Generator) -> Mask | None:
    """The mask of a new object that leaves enough of all earlier ones visible; None: no room."""
    height, width = owner.shape
    largest = MAX_OBJECT * min(height, width)
    for _ in range(PLACEMENTS):
        across = math.exp(generator.uniform(math.log(MIN_OBJECT), math.log(largest)))
        margin = 0.4 * across
        centre = generator.uniform(margin, (width - margin, height - margin))
        turned = OUTLINES[CLASSES[kind]] * np.exp(1j * generator.uniform(0, 2 * math.pi))
        corners = turned.view(np.float64).reshape(-1, 2) * (across / 2) + centre
        filled = np.zeros(owner.shape, np.uint8)
        # OpenCV takes integers with 4 fractional bits, and whole numbers are pixel centres.
        sixteenths = np.round((corners - 0.5) * 16).astype(np.int32)
        cv2.fillPoly(filled, [sixteenths], 1, shift=4)
        new = filled.astype(bool)
        visible = np.bincount(owner[~new], minlength=len(areas))
        if new.any() and (visible >= MIN_VISIBLE_SHARE * np.array(areas)).all():
            return new
    return None


def _paint(image: Texture, mask: Mask, kind: int, generator: Generator) -> None:
    """Fill the mask with a slightly shaded colour that stands out from what it covers.

    Colour hints at the class, but neighbouring classes share hues: outlines take long to learn.
    """
    colour = behind = image[mask].mean(axis=0)
    while np.abs(colour - behind).max() < MIN_CONTRAST:
        hue = (kind / len(CLASSES) + generator.normal(0, HUE_SPREAD)) % 1
        saturation, value = generator.uniform(0.45, 1), generator.uniform(0.35, 1)
        colour = np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255
    _, columns = np.nonzero(mask)
    ramp = np.linspace(-1, 1, mask.shape[1], dtype=np.float32)
    shade = ramp * generator.uniform(-20, 20)
    image[mask] = colour + shade[columns, None]
