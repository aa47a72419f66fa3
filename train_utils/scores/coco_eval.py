"""COCO figures from plain arrays: the same to the last bit however the work was distributed.

pycocotools breaks ties between equal scores by the order of the detections, so they are sorted
first (``canonical_order``). Ground truth keeps the float64 numbers of its file, because a rounded
box or area changes matches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train_utils.scores.coco_backends import curves
from train_utils.scores.detections import Detections, GroundTruth

# In the order of pycocotools' stats; s, m, l: boxes of less than 32**2, up to 96**2, more pixels.
FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
PER_CLASS = ("AP", "AP50", "APs", "APm", "APl")
OPERATING_POINT = ("threshold", "f1", "precision", "recall")  # of a class, where operating_points.py added them
ABSENT = -1.0  # pycocotools' figure where there is no ground truth


@dataclass(frozen=True)
class CocoResult:
    """Scores of one evaluation; a figure without ground truth is ABSENT."""

    figures: dict[str, float]  # by FIGURES
    per_class: dict[str, dict[str, float]]  # by class name: PER_CLASS, images, boxes (no crowds)
    backend: str  # the library that computed them


def score(ground_truth: GroundTruth, detections: Detections, backend: str = "hotcoco") -> CocoResult:
    """Compute the 12 COCO figures and those of each class.

    ``detections`` may be empty and in any order. ``backend`` is a key of COMPUTE.
    """
    precision, recall = curves(ground_truth, detections, backend)
    values = summarise(precision, recall)
    return CocoResult(dict(zip(FIGURES, values, strict=True)), _per_class(ground_truth, precision), backend)


def summarise(precision: np.ndarray, recall: np.ndarray) -> list[float]:
    """The values of FIGURES, to the last bit as COCOeval.summarize: means over what is present.

    ``precision`` is (IoU thresholds, recalls, classes, area ranges, limits), ``recall`` the same
    without recalls.
    """
    of_all = precision[..., 0, 2]
    parts = [of_all, of_all[0], of_all[5], *(precision[..., area, 2] for area in (1, 2, 3))]
    parts += [recall[..., 0, limit] for limit in (0, 1, 2)] + [recall[..., area, 2] for area in (1, 2, 3)]
    return [_mean_of_present(part) for part in parts]


def format_table(result: CocoResult) -> str:
    """Format the 12 figures, a row per class and the backend; "-" means no ground truth."""
    lines = [" ".join(f"{name:>5}" for name in FIGURES)]
    lines.append(" ".join(f"{format_figure(result.figures[name]):>5}" for name in FIGURES))  # fits into 80 columns
    width = max(len(name) for name in ("class", *result.per_class))
    columns = PER_CLASS + OPERATING_POINT * any("f1" in row for row in result.per_class.values())
    titles = "  ".join(f"{name:>5}" for name in columns)
    lines += ["", f"{'class':<{width}}  {'images':>7}  {'boxes':>7}  {titles}"]
    for name, row in result.per_class.items():
        counts = f"{row['images']:>7.0f}  {row['boxes']:>7.0f}"
        cells = "  ".join(f"{format_figure(row[column]):>{max(5, len(column))}}" for column in columns)
        lines.append(f"{name:<{width}}  {counts}  {cells}")
    return "\n".join([*lines, "", f"scored by {result.backend}"])


def format_figure(figure: float | None) -> str:
    """A figure of 0 to 1 with three places; a dash where there is none."""
    return "-" if figure is None or figure == ABSENT else f"{figure:.3f}"


def _per_class(truth: GroundTruth, precision: np.ndarray) -> dict[str, dict[str, float]]:
    """Rows of the table from COCOeval's precision, shaped as in ``summarise``."""
    image_of_box = truth.image_of_box
    rows = {}
    for index, name in enumerate(truth.names):
        of_class = (truth.classes == index) & ~truth.crowd.astype(bool)
        of_areas = [precision[:, :, index, area, 2] for area in range(4)]  # all, small, medium, large
        parts = (of_areas[0], of_areas[0][0], *of_areas[1:])
        rows[name] = dict(zip(PER_CLASS, map(_mean_of_present, parts), strict=True)) | {
            "images": len(np.unique(image_of_box[of_class])),
            "boxes": int(of_class.sum()),
        }
    return rows


def _mean_of_present(values: np.ndarray) -> float:
    present = values[values > ABSENT]
    return float(present.mean()) if present.size else ABSENT
