"""Sheets of errors: the worst images with the reason of each error, and labels that look wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train_utils.pictures.sheets import Cell, Group, save_sheet
from train_utils.scores.detections import GroundTruth, boxes_xyxy_of
from train_utils.scores.diagnosis import Diagnosis, ImageErrors

MISSED, FALSE, RIGHT = (213, 94, 0), (0, 114, 178), (0, 158, 115)  # Okabe and Ito's red, blue and green
MOST_DRAWN = 8  # errors of a kind on a picture; more hide one another
AROUND, LEAST_AROUND = 2.5, 120  # side of what shows around a box: times its longer side, pixels
SIDE = 620  # pixels of a picture: reasons are longer than class names

Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable


def draw_worst(
    truth: GroundTruth, diagnosis: Diagnosis, read: Read, name_of: Callable[[int], str], out: Path, count: int = 3
) -> bool:
    """Save the ``count`` images with most missed labels and those with most false detections.

    Returns False, and saves nothing, if there is no error.
    """
    by_missed = sorted((e for e in diagnosis.images if len(e.missed)), key=lambda e: -len(e.missed))[:count]
    rest = [e for e in diagnosis.images if len(e.false) and not any(e is other for other in by_missed)]
    by_false = sorted(rest, key=lambda e: -len(e.false))[:count]
    groups = []
    for errors in (*by_missed, *by_false):
        if (image := read(errors.image)) is not None:
            groups.append(Group([_cell(truth, errors, image)], name_of(errors.image)))
    if groups:
        save_sheet(groups, count, out, SIDE)
    return bool(groups)


def draw_suspects(
    truth: GroundTruth,
    suspects: Sequence[dict[str, Any]],
    read: Read,
    name_of: Callable[[int], str],
    out: Path,
    count: int = 9,
) -> bool:
    """Save the surroundings of the ``count`` surest detections that contradict their labels.

    Returns False, and saves nothing, if there is none.
    """
    groups = []
    for suspect in sorted(suspects, key=lambda row: -row["dt_score"])[:count]:
        if (image := read(suspect["image"])) is None:
            continue
        found = suspect["detection"]
        boxes = boxes_xyxy_of(np.array([found])).astype(np.float64)
        title = f"{truth.names[found['class']]} {found['score']:.2f} found, "
        if suspect["gt_id"] is None:
            title += "no label there"
        else:
            row = suspect["gt_id"] - 1
            left, top, width, height = truth.boxes_xywh[row]
            boxes = np.concatenate([boxes, [[left, top, left + width, top + height]]])
            title += f"{truth.names[truth.classes[row]]} labelled"
        part, origin = _around(image, boxes)
        shifted, nameless = boxes - np.tile(origin, 2), ["", ""]
        cell = Cell(part, shifted, np.arange(len(boxes)), nameless, title=title, colors=[FALSE, MISSED])
        groups.append(Group([cell], name_of(suspect["image"])))
    if groups:
        save_sheet(groups, 3, out)
    return bool(groups)


def _around(image: np.ndarray, boxes_xyxy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of ``image`` around the boxes, and its corner (x, y)."""
    low, high = boxes_xyxy[:, :2].min(0), boxes_xyxy[:, 2:].max(0)
    reach = max(LEAST_AROUND, AROUND * float((high - low).max())) / 2
    size = image.shape[1::-1]
    start = ((low + high) / 2 - reach).clip(0, np.subtract(size, 1)).astype(int)
    end = np.minimum(np.ceil((low + high) / 2 + reach), size).astype(int)
    return image[start[1] : max(end[1], start[1] + 1), start[0] : max(end[0], start[0] + 1)], start


def _cell(truth: GroundTruth, errors: ImageErrors, image: np.ndarray) -> Cell:
    """One image: the largest missed labels on top, surest false detections, right ones nameless."""
    largest = np.argsort(-truth.areas[errors.missed], kind="stable")[:MOST_DRAWN]
    missed, false = errors.missed[largest], errors.false[:MOST_DRAWN]
    lost_xyxy = truth.boxes_xywh[missed].copy()
    lost_xyxy[:, 2:] += lost_xyxy[:, :2]
    boxes = np.concatenate([lost_xyxy, boxes_xyxy_of(false), boxes_xyxy_of(errors.right)])
    texts = [errors.missed_reasons[i] for i in largest]
    texts += [*errors.false_reasons[:MOST_DRAWN], *[""] * len(errors.right)]
    colors = [MISSED] * len(missed) + [FALSE] * len(false) + [RIGHT] * len(errors.right)
    title = f"{len(errors.right)} right (green), {len(errors.missed)} missed (red), {len(errors.false)} false (blue)"
    hidden = len(errors.missed) + len(errors.false) - len(missed) - len(false)
    title += f", {hidden} not drawn" if hidden else ""
    return Cell(image, boxes, np.arange(len(boxes)), texts, title=title, colors=colors)
