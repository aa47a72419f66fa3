"""Contact sheets: training batches, and detections beside labels, as small pictures in a grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from train_utils.errors import TrainError
from train_utils.pictures.boxes import DARK, FONT, draw_boxes
from train_utils.scores.detections import Detections, boxes_xyxy_of

SIDE, GAP, LINE = 440, 8, 24  # pixels of a cell's picture, between cells, and of a line of text
QUALITY = 88  # of a JPEG: half the bytes of OpenCV's 95, with nothing to see
MOST_DRAWN = 30  # detections on a picture; more hide one another
LONGEST = 46  # characters that fit over a cell


class Cell(NamedTuple):
    """A picture with boxes, under a title that is cut at its start to fit."""

    image: np.ndarray  # uint8 RGB (H, W, 3)
    boxes_xyxy: np.ndarray  # (n, 4) in its pixels
    classes: np.ndarray  # (n,) positions in names
    names: Sequence[str]
    scores: np.ndarray | None = None
    title: str = ""


def save_sheet(cells: Sequence[Cell], columns: int, out: Path) -> None:
    """Save cells as one picture, with ``columns`` of them in a row.

    Each image is scaled to fit a square of SIDE pixels before boxes are drawn, so that names stay
    readable. Raises TrainError if the file cannot be written.
    """
    rows, height, width = -(-len(cells) // columns), LINE + SIDE + GAP, SIDE + GAP
    page = np.full((rows * height + GAP, min(columns, len(cells)) * width + GAP, 3), 255, np.uint8)
    for number, cell in enumerate(cells):
        top, left = number // columns * height + LINE, number % columns * width + GAP
        ratio = SIDE / max(cell.image.shape[:2])
        size = max(1, round(cell.image.shape[1] * ratio)), max(1, round(cell.image.shape[0] * ratio))
        small = cv2.resize(cell.image, size, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
        drawn = draw_boxes(small, cell.boxes_xyxy * ratio, cell.classes, cell.names, cell.scores)
        page[top : top + size[1], left : left + size[0]] = drawn
        title = cell.title if len(cell.title) <= LONGEST else f"...{cell.title[-LONGEST:]}"
        cv2.putText(page, title, (left, top - 7), FONT, 0.5, DARK, 1, cv2.LINE_AA)
    options = [cv2.IMWRITE_JPEG_QUALITY, QUALITY] if out.suffix == ".jpg" else []
    if not cv2.imwrite(str(out), page[..., ::-1], options):
        raise TrainError(f"cannot write the picture {out}. fix: free some space there, or choose another folder")


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Sequence[str], out: Path, count: int = 16) -> None:
    """Save the first images of a training batch with their boxes.

    ``images`` is uint8 RGB (B, 3, H, W); ``targets`` (T, 6) are image in the batch, class, cx, cy,
    w, h in pixels.
    """
    cells = []
    for i, image in enumerate(images[:count]):
        rows = targets[targets[:, 0] == i]
        half = rows[:, 4:6] / 2
        boxes_xyxy = np.concatenate([rows[:, 2:4] - half, rows[:, 2:4] + half], axis=1)
        cells.append(Cell(image.transpose(1, 2, 0), boxes_xyxy, rows[:, 1], names))
    save_sheet(cells, 4, out)


def draw_detections(
    pairs: Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray, Detections]],
    names: Sequence[str],
    out: Path,
    confidence: float = 0.3,
) -> None:
    """Save pairs of pictures: labels on the left, detections from ``confidence`` on the right.

    At most MOST_DRAWN are drawn, the best. Each pair is (file name, image uint8 RGB, classes (n,)
    and boxes_xyxy (n, 4) of its labels, detections), with boxes in pixels of the image.
    """
    cells = []
    for name, image, classes, boxes_xyxy, detections in pairs:
        ranked = detections[np.argsort(-detections["score"], kind="stable")]
        shown = ranked[ranked["score"] >= confidence][:MOST_DRAWN]
        cells.append(Cell(image, boxes_xyxy, classes, names, None, f"{name}: {len(classes)} labels"))
        title = f"{len(shown)} detections, score from {confidence:.2g}"
        cells.append(Cell(image, boxes_xyxy_of(shown), shown["class"], names, shown["score"], title))
    if cells:
        save_sheet(cells, 4, out)
