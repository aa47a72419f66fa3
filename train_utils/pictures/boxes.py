"""Boxes with their names and scores, drawn on a picture."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence

import cv2
import numpy as np

DARK, LIGHT = (0, 0, 0), (255, 255, 255)


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
    color_of: Callable[[int], tuple[int, int, int]] = class_color,
) -> np.ndarray:
    """Copy ``image`` (uint8 RGB, H x W x 3) and draw ``boxes_xyxy`` (n, 4, pixels) and their names.

    The first boxes are drawn last, so that those with the best scores are on top. ``color_of``
    gives the colour of a class; a box without text has no plate.
    """
    canvas = np.ascontiguousarray(image).copy()
    thickness = max(1, round(min(canvas.shape[:2]) / 320))
    for i in reversed(range(len(boxes_xyxy))):
        x1, y1, x2, y2 = (round(float(value)) for value in boxes_xyxy[i])
        color = color_of(int(classes[i]))
        cv2.rectangle(canvas, (x1, y1), (x2, y2), color, thickness)
        text = names[int(classes[i])] + (f" {scores[i]:.2f}" if scores is not None else "")
        if text:
            _draw_label(canvas, text, (x1, y1), color)
    return canvas


def _draw_label(canvas: np.ndarray, text: str, corner: tuple[int, int], color: tuple[int, int, int]) -> None:
    """Draw a text on a plate above ``corner`` (x, y), shifted to lie inside the picture."""
    font_scale = max(0.42, min(canvas.shape[:2]) / 1100)
    weight = max(1, round(font_scale * 1.4))
    (width, height), base = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, font_scale, weight)
    left = max(0, min(corner[0], canvas.shape[1] - width))
    top = max(0, corner[1] - height - base)
    cv2.rectangle(canvas, (left, top), (left + width, top + height + base), color, cv2.FILLED)
    brightness = np.dot(color, (0.299, 0.587, 0.114))  # ITU-R BT.601
    ink = DARK if brightness > 110 else LIGHT
    cv2.putText(canvas, text, (left, top + height), cv2.FONT_HERSHEY_SIMPLEX, font_scale, ink, weight, cv2.LINE_AA)
