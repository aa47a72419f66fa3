"""Draw images of coloured shapes. Objects overlap, but a good part of each stays visible."""

from __future__ import annotations

import colorsys
import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

CLASSES = ("circle", "square", "triangle", "star", "cross")
# Distances of corners from the centre at equal angles, for all classes but the cross.
RADII = {"circle": [1.0] * 48, "square": [1.0] * 4, "triangle": [1.0] * 3, "star": [1.0, 0.4] * 5}
SMALLEST_OBJECT = 16.0  # pixels across
LARGEST_OBJECT = 0.5  # of the image's shorter side
MOST_OBJECTS = 7
LEAST_VISIBLE = 0.45  # share of each object
PLACEMENTS = 20  # attempts to place an object before it is left out
ASPECTS = (0.6, 1.6)  # height over width
AREAS = (0.7, 1.3)  # of an image, relative to image_size ** 2
HUE_SPREAD = 0.06  # standard deviation around a class's hue, as a share of the colour circle


class Drawing(NamedTuple):
    """An image (h, w, 3) uint8 RGB, and class and mask (h, w) of visible pixels of each object."""

    image: NDArray[np.uint8]
    classes: list[int]
    masks: list[NDArray[np.bool_]]


def draw_image(image_size: int, generator: np.random.Generator) -> Drawing:
    """Draw an image of about ``image_size ** 2`` pixels. One in twenty has no objects."""
    height, width = image_shape(image_size, generator)
    image = background(height, width, generator)
    classes: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    full_areas: list[int] = []
    count = 0 if generator.random() < 0.05 else int(generator.integers(1, MOST_OBJECTS + 1))
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


def image_shape(image_size: int, generator: np.random.Generator) -> tuple[int, int]:
    """Height and width of an image of about ``image_size ** 2`` pixels."""
    aspect = math.exp(generator.uniform(*np.log(ASPECTS)))
    side = image_size * math.sqrt(generator.uniform(*AREAS))
    return round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))


def _place(
    kind: int,
    masks: list[NDArray[np.bool_]],
    full_areas: list[int],
    size: tuple[int, int],
    generator: np.random.Generator,
) -> NDArray[np.bool_] | None:
    """The mask of a new object that leaves enough of all earlier ones visible, if found."""
    height, width = size
    for _ in range(PLACEMENTS):
        across = math.exp(generator.uniform(math.log(SMALLEST_OBJECT), math.log(LARGEST_OBJECT * min(size))))
        centre = generator.uniform((0.4 * across, 0.4 * across), (width - 0.4 * across, height - 0.4 * across))
        corners = outline(CLASSES[kind], generator.uniform(0, 2 * math.pi)) * (across / 2) + centre
        new = filled(corners, size)
        sights = (np.count_nonzero(old & ~new) / full for old, full in zip(masks, full_areas, strict=True))
        if new.any() and all(sight >= LEAST_VISIBLE for sight in sights):
            return new
    return None


def filled(corners: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels (h, w) inside a polygon with these corners (n, 2)."""
    mask = np.zeros(size, dtype=np.uint8)
    # Integer corners with 4 fractional bits; OpenCV puts whole numbers at pixel centres.
    cv2.fillPoly(mask, [np.round((corners - 0.5) * 16).astype(np.int32)], 1, shift=4)
    return mask.astype(bool)


def turning(angle: float) -> NDArray[np.float64]:
    """The matrix (2, 2) that turns columns (x, y) by an angle."""
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def outline(name: str, angle: float) -> NDArray[np.float64]:
    """Return the corners (n, 2) of a class inside the unit circle, turned by an angle."""
    if name == "cross":
        arm = np.array([[1, 0.3], [0.3, 0.3], [0.3, 1]]) / math.hypot(1, 0.3)
        quarter_turns = [np.array([[c, -s], [s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
        corners: NDArray[np.float64] = np.concatenate([arm @ quarter.T for quarter in quarter_turns])
        return np.asarray(corners @ turning(angle).T)
    radii = np.array(RADII[name])
    angles = angle + np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def background(height: int, width: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """A smooth random texture (h, w, 3)."""
    coarse = generator.uniform(40, 216) + generator.uniform(-40, 40, (4, 4, 3))
    fine = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    return np.asarray(fine, dtype=np.float32)


def _paint(image: NDArray[np.float32], mask: NDArray[np.bool_], kind: int, generator: np.random.Generator) -> None:
    """Fill the mask with a slightly shaded colour that stands out from what it covers."""
    behind = image[mask].mean(axis=0)
    colour = class_colour(kind / len(CLASSES), HUE_SPREAD, generator)
    while np.abs(colour - behind).max() < 70:
        colour = class_colour(kind / len(CLASSES), HUE_SPREAD, generator)
    shade = np.linspace(-1, 1, mask.shape[1], dtype=np.float32) * generator.uniform(-20, 20)
    image[mask] = (colour + shade[np.nonzero(mask)[1], None]).astype(np.float32)


def class_colour(share: float, spread: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """A colour (RGB, 0..255) for an object of a class with the hue `share`, 0..1, give or take.

    As with many real objects, colour hints at the class without deciding it: neighbouring classes
    share hues. Learning shapes by outline alone takes far longer than a first try should.
    """
    hue = (share + generator.normal(0, spread)) % 1
    return np.array(colorsys.hsv_to_rgb(hue, generator.uniform(0.45, 1), generator.uniform(0.35, 1))) * 255
