"""Contact sheets: training batches, and detections beside labels, as small pictures in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from train_utils.errors import TrainError
from train_utils.pictures.boxes import DARK, FONT, draw_boxes
from train_utils.scores.detections import Detections, boxes_xyxy_of

PAGE, GROUP = (255, 255, 255), (222, 226, 232)  # RGB of the page, and of the plate behind a group
MARGIN, GAP = 14, 6  # pixels between groups, and between cells of a group
QUALITY = 88  # of a JPEG: half the bytes of OpenCV's 95, with nothing to see
MOST_DRAWN = 30  # detections on a picture; more hide one another
LINE = 24  # height of a line of text in pixels
FONT_SCALE = 0.5


class Cell(NamedTuple):
    """A picture with boxes: ``title`` appears above it, ``empty`` on it if it has no box."""

    image: np.ndarray  # uint8 RGB (H, W, 3)
    boxes_xyxy: np.ndarray  # (n, 4) in its pixels
    classes: np.ndarray  # (n,) positions in names
    names: Sequence[str]
    scores: np.ndarray | None = None
    title: str = ""
    empty: str = ""


class Group(NamedTuple):
    """Cells side by side under one title."""

    cells: Sequence[Cell]
    title: str = ""


def save_sheet(groups: Sequence[Group], columns: int, out: Path, side: int = 440) -> None:
    """Save groups with equal numbers of cells as one picture, with ``columns`` groups in a row.

    Each image is scaled to fit a square of ``side`` pixels before boxes are drawn, so that names
    stay readable. Raises TrainError if the file cannot be written.
    """
    rows = [groups[start : start + columns] for start in range(0, len(groups), columns)]
    drawn = [[[_draw_cell(cell, side) for cell in group.cells] for group in row] for row in rows]
    heights = [max(picture.shape[0] for cells in row for picture in cells) for row in drawn]
    head = LINE * any(group.title for group in groups) + LINE * any(c.title for group in groups for c in group.cells)
    count = max(len(group.cells) for group in groups)
    width = count * side + (count + 1) * GAP
    page_width = min(columns, len(groups)) * (width + MARGIN) + MARGIN
    page = np.full((sum(heights) + len(rows) * (head + 2 * GAP + MARGIN) + MARGIN, page_width, 3), PAGE, np.uint8)
    top = MARGIN
    for row, pictures, height in zip(rows, drawn, heights, strict=True):
        for number, (group, cells) in enumerate(zip(row, pictures, strict=True)):
            left = MARGIN + number * (width + MARGIN)
            plate = page[top : top + head + height + 2 * GAP, left : left + width]
            plate[:] = GROUP
            _write(plate, group.title, GAP, 0, width)
            for place, (cell, picture) in enumerate(zip(group.cells, cells, strict=True)):
                x = GAP + place * (side + GAP)
                _write(plate, cell.title, x, head - LINE, side)
                middle = x + (side - picture.shape[1]) // 2
                plate[head + GAP : head + GAP + picture.shape[0], middle : middle + picture.shape[1]] = picture
        top += head + height + 2 * GAP + MARGIN
    options = [cv2.IMWRITE_JPEG_QUALITY, QUALITY] if out.suffix == ".jpg" else []
    if not cv2.imwrite(str(out), page[..., ::-1], options):
        raise TrainError(f"cannot write the picture {out}. fix: free some space there, or choose another folder")


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Sequence[str], out: Path, count: int = 16) -> None:
    """Save the first images of a training batch with their boxes.

    ``images`` is uint8 RGB (B, 3, H, W); ``targets`` (T, 6) are image in the batch, class, cx, cy,
    w, h in pixels.
    """
    groups = []
    for i, image in enumerate(images[:count]):
        rows = targets[targets[:, 0] == i]
        half = rows[:, 4:6] / 2
        boxes_xyxy = np.concatenate([rows[:, 2:4] - half, rows[:, 2:4] + half], axis=1)
        groups.append(Group([Cell(image.transpose(1, 2, 0), boxes_xyxy, rows[:, 1], names, empty="no box")]))
    save_sheet(groups, 4, out)


def draw_detections(
    pairs: Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray, Detections]],
    names: Sequence[str],
    out: Path,
    confidence: float = 0.3,
) -> None:
    """Save pairs of pictures: labels on the left, detections from ``confidence`` on the right.

    At most MOST_DRAWN are drawn, the best; the title counts the others. Each pair is (file name,
    image uint8 RGB, classes (n,) and boxes_xyxy (n, 4) of its labels, detections), with boxes in
    pixels of the image.
    """
    groups = []
    for name, image, classes, boxes_xyxy, detections in pairs:
        ranked = detections[np.argsort(-detections["score"], kind="stable")]
        shown = ranked[ranked["score"] >= confidence][:MOST_DRAWN]
        hidden = f", {len(ranked) - len(shown)} weaker hidden" if len(ranked) > len(shown) else ""
        left = Cell(image, boxes_xyxy, classes, names, None, f"labels: {len(classes)}", "no label")
        title = f"detections, score from {confidence:.2g}: {len(shown)}{hidden}"
        none = f"no detection from {confidence:.2g}"
        right = Cell(image, boxes_xyxy_of(shown), shown["class"], names, shown["score"], title, none)
        groups.append(Group([left, right], name))
    if groups:
        save_sheet(groups, 2, out)


def _draw_cell(cell: Cell, side: int) -> np.ndarray:
    height, width = cell.image.shape[:2]
    ratio = side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    small = cv2.resize(cell.image, size, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
    drawn = draw_boxes(small, cell.boxes_xyxy * ratio, cell.classes, cell.names, cell.scores)
    if not len(cell.boxes_xyxy) and cell.empty:
        (text_width, text_height), base = cv2.getTextSize(cell.empty, FONT, FONT_SCALE, 1)
        x, y = (size[0] - text_width) // 2, size[1] // 2
        cv2.rectangle(drawn, (x - GAP, y - text_height - GAP), (x + text_width + GAP, y + base + GAP), PAGE, cv2.FILLED)
        cv2.putText(drawn, cell.empty, (x, y), FONT, FONT_SCALE, DARK, 1, cv2.LINE_AA)
    return drawn


def _write(canvas: np.ndarray, text: str, x: int, top: int, width: int) -> None:
    """Draw a line of text, cut at the start to fit ``width``: file names differ at the end."""
    shown = text
    while cv2.getTextSize(shown, FONT, FONT_SCALE, 1)[0][0] > width - 2 * GAP:
        text = text[1:]
        shown = f"...{text}"
    cv2.putText(canvas, shown, (x, top + LINE - 6), FONT, FONT_SCALE, DARK, 1, cv2.LINE_AA)
