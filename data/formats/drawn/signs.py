"""Draw images of few large signs, whose classes differ only by a small mark.

Such sets are common: breeds, brands, states of one part. Boxes are learnt soon; telling the classes
apart from a few hundred objects is the hard part.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from data.formats.drawn.shapes import Drawing, background, class_colour, filled, image_shape, outline, turning

CLASSES = ("circle", "square", "triangle", "star", "cross", "bar")
BAR = np.array([[-0.35, -1], [0.35, -1], [0.35, 1], [-0.35, 1]])
COUNTS = (0.3, 0.4, 0.3)  # how often an image has one, two, three signs
ACROSS = (0.35, 0.7)  # of a sign, relative to the image's shorter side
HUE_SPREAD = 0.1  # standard deviation around the hue of a class's mark, as a share of the colour circle
MARK = (0.3, 0.45)  # of a mark across, relative to the sign's shorter side
PLACE = 0.35  # of a mark's centre from that of its sign, relative to half the sign: it stays inside
LEAST_VISIBLE = 0.8  # share of each sign
PLACEMENTS = 20  # attempts to place a sign before it is left out
CLUTTER = (8, 25)  # number of polygons behind the signs


def draw_image(image_size: int, generator: np.random.Generator) -> Drawing:
    """Draw an image of about ``image_size ** 2`` pixels with one to three signs."""
    size = image_shape(image_size, generator)
    image = background(*size, generator)
    _clutter(image, generator)
    classes: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    marks: list[NDArray[np.bool_]] = []
    full_areas: list[int] = []
    for _ in range(1 + int(generator.choice(len(COUNTS), p=COUNTS))):
        kind = int(generator.integers(len(CLASSES)))
        for _ in range(PLACEMENTS):
            body, mark = _sign(kind, size, generator)
            seen = (np.count_nonzero(old & ~body) / full for old, full in zip(masks, full_areas, strict=True))
            if all(share >= LEAST_VISIBLE for share in seen) and not any((body & old).any() for old in marks):
                break
        else:
            continue
        _paint(image, body, mark, kind, generator)
        masks = [*(old & ~body for old in masks), body]
        marks.append(mark)
        classes.append(kind)
        full_areas.append(int(body.sum()))
    noise = generator.normal(0, generator.uniform(2, 10), image.shape)
    return Drawing(np.clip(image + noise, 0, 255).astype(np.uint8), classes, masks)


def _sign(
    kind: int, size: tuple[int, int], generator: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The masks (h, w) of a sign and of the mark on it, for an image of that size."""
    across = generator.uniform(*ACROSS) * min(size)
    stretch = math.exp(generator.uniform(-0.35, 0.35)) ** 0.5
    half = np.array([across * stretch, across / stretch]) / 2
    power = generator.uniform(2, 6)  # from an ellipse to a rounded rectangle
    angles = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    unit = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    points = np.sign(unit) * np.abs(unit) ** (2 / power) * half
    turn = generator.uniform(-0.3, 0.3)
    turned = turning(turn)
    height, width = size
    margin = 0.9 * half  # a little of a sign may be outside, but nothing of its mark
    centre = generator.uniform(margin, np.array([width, height]) - margin)
    radius = generator.uniform(*MARK) * half.min()
    place = centre + turned @ (generator.uniform(-PLACE, PLACE, 2) * half)
    angle = turn - math.pi / 2 + generator.uniform(-0.3, 0.3)
    corners = BAR @ turning(angle).T if CLASSES[kind] == "bar" else outline(CLASSES[kind], angle)
    return filled(points @ turned.T + centre, size), filled(corners * radius + place, size)


def _clutter(image: NDArray[np.float32], generator: np.random.Generator) -> None:
    """Paint polygons of any colour on an image (h, w, 3)."""
    height, width = image.shape[:2]
    for _ in range(int(generator.integers(*CLUTTER))):
        corners = generator.uniform(-1, 1, (int(generator.integers(3, 7)), 2)) * generator.uniform(0.03, 0.2) * height
        mask = filled(corners + generator.uniform((0, 0), (width, height)), (height, width))
        strength = generator.uniform(0.3, 1)
        image[mask] = (1 - strength) * image[mask] + strength * generator.uniform(0, 255, 3)


def _paint(
    image: NDArray[np.float32],
    body: NDArray[np.bool_],
    mark: NDArray[np.bool_],
    kind: int,
    generator: np.random.Generator,
) -> None:
    """Paint a sign of any colour, a darker rim, and a mark that stands out from it."""
    colour = generator.uniform(30, 225, 3)
    shade = np.linspace(-1, 1, body.shape[1], dtype=np.float32) * generator.uniform(-30, 30)
    image[body] = colour + shade[np.nonzero(body)[1], None]
    inner = cv2.erode(body.astype(np.uint8), np.ones((5, 5))).astype(bool)
    image[body & ~inner] *= 0.6
    ink = class_colour(kind / len(CLASSES), HUE_SPREAD, generator)
    while np.abs(ink - colour).max() < 90:
        ink = class_colour(kind / len(CLASSES), HUE_SPREAD, generator)
    image[mark] = ink
