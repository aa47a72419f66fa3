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
from numpy.typing import NDArray

from data.config import ShapesConfig
from data.errors import DataError
from data.io import end_with_parent, new_folder, usable_cores
from data.progress import tracked

Mask = NDArray[np.bool_]  # (h, w)

DRAWING_VERSION = 5  # raise it when the same settings give other files
JPEG_QUALITY = 90
CLASSES = ("circle", "square", "triangle", "star", "cross")
# Distances of corners from the centre at equal angles, for all classes but the cross.
RADII = {"circle": [1.0] * 48, "square": [1.0] * 4, "triangle": [1.0] * 3, "star": [1.0, 0.4] * 5}
MIN_OBJECT = 16.0  # pixels across
MAX_OBJECT = 0.5  # of the image's shorter side
MAX_OBJECTS = 7
MIN_VISIBLE_SHARE = 0.45  # of each object
CHUNK = 16  # images that a process draws at a time
PLACEMENTS = 20  # attempts to place an object before it is left out
ASPECTS = (0.6, 1.6)  # height over width
AREAS = (0.7, 1.3)  # of an image, relative to image_size ** 2
HUE_SPREAD = 0.06  # standard deviation around a class's hue, as a share of the colour circle


def ensure_shapes(root: Path, config: ShapesConfig) -> Path:
    """Return the folder below ``root`` with the set of ``config``; draw it if it is missing.

    Each ``config`` has its own folder. Any number of processes may call this at once.
    """
    parameters = {"version": DRAWING_VERSION, **asdict(config)}
    folder = root / hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:8]
    if folder.is_dir():
        return folder
    try:
        with new_folder(folder) as temporary:
            (temporary / "annotations").mkdir()
            for number, (split, count) in enumerate((("train", config.train_images), ("val", config.val_images))):
                content = _draw_split(temporary / split, count, config.image_size, [0, number])
                (temporary / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
            (temporary / "parameters.json").write_text(json.dumps(parameters, indent=2))
    except OSError as error:
        raise DataError(
            f"cannot write the drawn data set to {root} ({error.strerror}). "
            "fix: set data.root to a writable folder with free space"
        ) from error
    return folder


def visible_box(mask: Mask) -> tuple[int, int, int, int]:
    """Left, top, width and height of the pixels in ``mask``, which must not be empty."""
    left, top, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return left, top, width, height


def _draw_split(folder: Path, count: int, image_size: int, seed: list[int]) -> dict[str, Any]:
    """Write the images of one split and return its COCO annotations."""
    folder.mkdir()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    # Threads would wait for each other. Spawned processes import torch, but macOS needs them.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(len(usable_cores()), context, _start_worker) as pool:
        drawn = pool.map(partial(_write_image, folder, image_size, seed), range(count), chunksize=CHUNK)
        for number, (image, objects) in enumerate(tracked(drawn, count, f"drawing {folder.name} shapes")):
            images.append({"id": number + 1} | image)
            for an_object in objects:
                ids = {"id": len(annotations) + 1, "image_id": number + 1}
                annotations.append({**ids, **an_object, "iscrowd": 0})
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _start_worker() -> None:
    end_with_parent()
    cv2.setNumThreads(0)  # threads of the parent are not here


def _write_image(
    folder: Path, image_size: int, seed: list[int], number: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw and write an image; return its COCO entry and those of its objects, without ids."""
    drawing = draw_image(image_size, np.random.Generator(np.random.PCG64(np.random.SeedSequence([*seed, number]))))
    height, width = drawing.image.shape[:2]
    name = f"{number + 1:06d}.jpg"
    bgr = cv2.cvtColor(drawing.image, cv2.COLOR_RGB2BGR)
    (folder / name).write_bytes(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes())
    objects = [
        {"category_id": number_of_class + 1, "bbox": list(visible_box(mask)), "area": int(mask.sum())}
        for number_of_class, mask in zip(drawing.classes, drawing.masks, strict=True)
    ]
    return {"file_name": name, "width": width, "height": height}, objects


class Drawing(NamedTuple):
    """An image (h, w, 3) uint8 RGB, and class and mask (h, w) of visible pixels of each object."""

    image: NDArray[np.uint8]
    classes: list[int]
    masks: list[Mask]


def draw_image(image_size: int, generator: np.random.Generator) -> Drawing:
    """Draw an image of about ``image_size ** 2`` pixels. One in twenty has no objects."""
    aspect = math.exp(generator.uniform(*np.log(ASPECTS)))
    side = image_size * math.sqrt(generator.uniform(*AREAS))
    height, width = round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))
    coarse = generator.uniform(40, 216) + generator.uniform(-40, 40, (4, 4, 3))  # a smooth random texture
    smooth = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    image = np.asarray(smooth, dtype=np.float32)
    classes, masks, full_areas = list[int](), list[Mask](), list[int]()
    count = 0 if generator.random() < 0.05 else int(generator.integers(1, MAX_OBJECTS + 1))
    for _ in range(count):
        kind = int(generator.integers(len(CLASSES)))
        mask = _place(kind, masks, full_areas, (height, width), generator)
        if mask is None:
            continue
        _paint(image, mask, kind, generator)
        masks = [earlier & ~mask for earlier in masks]
        masks.append(mask)
        classes.append(kind)
        full_areas.append(int(mask.sum()))
    noise = generator.normal(0, generator.uniform(2, 10), image.shape)
    return Drawing(np.clip(image + noise, 0, 255).astype(np.uint8), classes, masks)


def _place(
    kind: int, masks: list[Mask], full_areas: list[int], size: tuple[int, int], generator: np.random.Generator
) -> Mask | None:
    """The mask of a new object that leaves enough of all earlier ones visible; None: no room."""
    height, width = size
    for _ in range(PLACEMENTS):
        across = math.exp(generator.uniform(math.log(MIN_OBJECT), math.log(MAX_OBJECT * min(size))))
        centre = generator.uniform((0.4 * across, 0.4 * across), (width - 0.4 * across, height - 0.4 * across))
        corners = _outline(CLASSES[kind], generator.uniform(0, 2 * math.pi)) * (across / 2) + centre
        filled = np.zeros(size, dtype=np.uint8)
        # OpenCV takes integers with 4 fractional bits, and whole numbers are pixel centres.
        cv2.fillPoly(filled, [np.round((corners - 0.5) * 16).astype(np.int32)], 1, shift=4)
        new = filled.astype(bool)
        visible = np.array([np.count_nonzero(earlier & ~new) for earlier in masks]) / np.array(full_areas)
        if new.any() and (visible >= MIN_VISIBLE_SHARE).all():
            return new
    return None


def _outline(name: str, angle: float) -> NDArray[np.float64]:
    """Return the corners (n, 2) of a class inside the unit circle, turned by an angle."""
    if name == "cross":
        arm = np.array([[1, 0.3], [0.3, 0.3], [0.3, 1]]) / math.hypot(1, 0.3)
        quarter_turns = [np.array([[c, -s], [s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
        corners: NDArray[np.float64] = np.concatenate([arm @ quarter.T for quarter in quarter_turns])
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        return np.asarray(corners @ turn.T)
    radii = np.array(RADII[name])
    angles = angle + np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _paint(image: NDArray[np.float32], mask: Mask, kind: int, generator: np.random.Generator) -> None:
    """Fill the mask with a slightly shaded colour that stands out from what it covers.

    Colour hints at the class, but neighbouring classes share hues. Learning shapes only by outline
    would take far too long for a first try.
    """
    colour = behind = image[mask].mean(axis=0)
    while np.abs(colour - behind).max() < 70:
        hue = (kind / len(CLASSES) + generator.normal(0, HUE_SPREAD)) % 1
        colour = np.array(colorsys.hsv_to_rgb(hue, generator.uniform(0.45, 1), generator.uniform(0.35, 1))) * 255
    shade = np.linspace(-1, 1, mask.shape[1], dtype=np.float32) * generator.uniform(-20, 20)
    image[mask] = (colour + shade[np.nonzero(mask)[1], None]).astype(np.float32)
