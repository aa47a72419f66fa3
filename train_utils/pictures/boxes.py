"""Boxes with their names and scores, drawn on a picture."""

from __future__ import annotations

import colorsys
from collections.abc import Collection, Sequence

import cv2
import numpy as np

DARK, LIGHT = (0, 0, 0), (255, 255, 255)
FONT = cv2.FONT_HERSHEY_SIMPLEX
LEAST_SIDE = 128  # pixels


def class_color(index: int) -> tuple[int, int, int]:
    """Colour (RGB, 0..255) of a class, in golden-ratio steps of hue so that neighbours differ."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.85, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: np.ndarray,
    boxes_xyxy: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
) -> np.ndarray:
    """Copy ``image`` (uint8 RGB, H x W x 3) and draw ``boxes_xyxy`` (n, 4, pixels) and their names.

    The first boxes, those with the best scores, are drawn on top. A name stands where it covers no
    better one, if its box has such a place. A picture whose shorter side is below LEAST_SIDE
    has boxes only: texts would cover it.
    """
    canvas = np.ascontiguousarray(image).copy()
    side = min(canvas.shape[:2])
    thickness = max(1, round(side / 220))
    scale = max(0.36, side / 1100)
    weight = max(1, round(scale * 1.4))
    corners = boxes_xyxy.round().astype(int).tolist()
    for box, cls in reversed(list(zip(corners, classes, strict=True))):
        cv2.rectangle(canvas, box[:2], box[2:], class_color(int(cls)), thickness)
    texts = [names[int(cls)] + (f" {scores[i]:.2f}" if scores is not None else "") for i, cls in enumerate(classes)]
    plates: dict[int, tuple[int, int, int, int]] = {}
    for i, text in enumerate(texts):
        if side >= LEAST_SIDE:
            (width, height), base = cv2.getTextSize(text, FONT, scale, weight)
            plates[i] = _place(corners[i], (width, height + base), canvas, plates.values())
    for i, (left, top, right, bottom) in reversed(plates.items()):
        color = class_color(int(classes[i]))
        cv2.rectangle(canvas, (left, top), (right, bottom), color, cv2.FILLED)
        ink = DARK if np.dot(color, (0.299, 0.587, 0.114)) > 110 else LIGHT  # brightness by ITU-R BT.601
        base = cv2.getTextSize(texts[i], FONT, scale, weight)[1]
        cv2.putText(canvas, texts[i], (left, bottom - base), FONT, scale, ink, weight, cv2.LINE_AA)
    return canvas


def _place(
    box: Sequence[int], size: tuple[int, int], canvas: np.ndarray, plates: Collection[tuple[int, int, int, int]]
) -> tuple[int, int, int, int]:
    """Where a plate of that size (width, height) lies near ``box``: above it, if that is free."""
    (x1, y1, x2, y2), (width, height), (rows, columns) = box, size, canvas.shape[:2]
    places = [
        (left, top, left + width, top + height)
        for y in (y1 - height, y2 + 1, y1, y2 - height, y1 - 2 * height, y2 + height)
        for x in (x1, x2 - width)
        for left, top in [(max(0, min(x, columns - width)), max(0, min(y, rows - height)))]
    ]
    free = (a for a in places if all(a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3] for b in plates))
    return next(free, places[0])
