"""Sheets of errors: the worst images with the reason of each error, and labels that look wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from train_utils.pictures.sheets import Cell, Group, save_sheet
from train_utils.scores.detections import boxes_xyxy_of
from train_utils.scores.diagnosis import Diagnosis

MISSED, FALSE, RIGHT = (213, 94, 0), (0, 114, 178), (0, 158, 115)  # Okabe and Ito's red, blue and green
MOST_DRAWN = 8  # errors of a kind on a picture; more hide one another
AROUND, LEAST_AROUND = 2.5, 120  # side of what shows around a box: times its longer side, pixels
SIDE = 620  # pixels of a picture: reasons are longer than class names

Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_worst(found: Diagnosis, read: Read, name_of: NameOf, out: Path, count: int = 3) -> None:
    """Save the images with most missed labels, then those with most false detections, if any."""
    most_missed = found.worst("fn")[:count]
    most_false = [image for image in found.worst("fp") if image not in most_missed][:count]
    pictures = {image: read(image) for image in (*most_missed, *most_false)}
    groups = [
        Group([_worst_cell(found, image, picture)], name_of(image))
        for image, picture in pictures.items()
        if picture is not None
    ]
    if groups:
        save_sheet(groups, count, out, SIDE)


def _worst_cell(found: Diagnosis, image: int, picture: np.ndarray) -> Cell:
    """One image: the largest missed labels on top, surest false detections, right ones nameless."""
    right, all_false, all_missed = found.errors_on(image)
    missed = all_missed[np.argsort(-found.truth.areas[all_missed], kind="stable")][:MOST_DRAWN]
    false = all_false[:MOST_DRAWN]
    boxes = np.concatenate([found.truth.boxes_xyxy(missed), boxes_xyxy_of(false), boxes_xyxy_of(right)])
    texts = [found.why_missed(row) for row in missed] + [found.why_false(image, row) for row in false]
    colors = [MISSED] * len(missed) + [FALSE] * len(false) + [RIGHT] * len(right)
    title = f"{len(right)} right (green), {len(all_missed)} missed (red), {len(all_false)} false (blue)"
    hidden = len(all_missed) + len(all_false) - len(texts)
    title += f", {hidden} not drawn" if hidden else ""
    return Cell(picture, boxes, np.arange(len(boxes)), texts + [""] * len(right), title=title, colors=colors)


def draw_suspects(found: Diagnosis, read: Read, name_of: NameOf, out: Path, count: int = 9) -> None:
    """Save the surroundings of the surest detections that contradict their labels, if any."""
    groups = []
    for image, detection, label in found.suspects()[:count]:
        if (picture := read(image)) is None:
            continue
        boxes = boxes_xyxy_of(np.array([detection])).astype(np.float64)
        labelled = "no label there"
        if label is not None:
            boxes = np.concatenate([boxes, found.truth.boxes_xyxy(np.array([label]))])
            labelled = f"{found.truth.names[found.truth.classes[label]]} labelled"
        title = f"{found.truth.names[detection['class']]} {detection['score']:.2f} found, {labelled}"
        part, corner = _around(picture, boxes)
        cell = Cell(
            part, boxes - np.tile(corner, 2), np.arange(len(boxes)), ["", ""], title=title, colors=[FALSE, MISSED]
        )
        groups.append(Group([cell], name_of(image)))
    if groups:
        save_sheet(groups, 3, out)


def _around(image: np.ndarray, boxes_xyxy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of ``image`` around the boxes, and its corner (x, y)."""
    low, high = boxes_xyxy[:, :2].min(0), boxes_xyxy[:, 2:].max(0)
    reach = max(LEAST_AROUND, AROUND * float((high - low).max())) / 2
    size = image.shape[1::-1]
    start = ((low + high) / 2 - reach).clip(0, np.subtract(size, 1)).astype(int)
    end = np.maximum(((low + high) / 2 + reach).astype(int), start + 1)
    return image[start[1] : end[1], start[0] : end[0]], start
