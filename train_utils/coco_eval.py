"""COCO figures from plain arrays: the same to the last bit however the work was distributed.

hotcoco, or pycocotools, its slower reference, get the same numbers in the same order: images by id,
detections in canonical order (equal scores rank by it), classes and images counted from 1. Ground
truth keeps the float64 numbers of its file, because a rounded box or area changes matches.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import hotcoco
import numpy as np

from train_utils.detections import Detections, GroundTruth, canonical_order

# In the order of pycocotools' stats; s, m, l: boxes of less than 32**2, up to 96**2, more pixels.
FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
PER_CLASS = ("AP", "AP50", "APs", "APm", "APl")
OPERATING_POINT = ("threshold", "f1", "precision", "recall")  # of a class, where curves.py added them
ABSENT = -1.0  # pycocotools' figure where there is no ground truth


class Columns(NamedTuple):
    """Ground truth or detections, column by column, as the libraries take them."""

    images: np.ndarray  # int64 (n,) position of the image in the order of ids, from 1
    classes: np.ndarray  # int64 (n,) from 1
    boxes_xywh: np.ndarray  # float64 (n, 4)
    areas: np.ndarray  # float64 (n,)
    more: np.ndarray  # (n,) ground truth: bool, whether it is a crowd; detections: float64 scores


def to_columns(truth: GroundTruth, detections: Detections) -> tuple[Columns, Columns]:
    """Boxes in their order and detections in canonical order, as the libraries take them."""
    assert np.isin(detections["image_id"], truth.image_ids).all(), "a detection on an unknown image"
    by_id = np.argsort(truth.image_ids)
    position = np.empty(len(by_id), dtype=np.int64)
    position[by_id] = np.arange(1, len(by_id) + 1)
    boxes = Columns(
        position[truth.image_of_box],
        truth.classes.astype(np.int64) + 1,
        truth.boxes_xywh,
        truth.areas,
        truth.crowd.astype(bool),
    )
    ordered = canonical_order(detections)
    xywh = ordered["box_xywh"].astype(np.float64)
    rows = Columns(
        np.searchsorted(truth.image_ids[by_id], ordered["image_id"]) + 1,
        ordered["class"].astype(np.int64) + 1,
        xywh,
        xywh[:, 2] * xywh[:, 3],
        ordered["score"].astype(np.float64),
    )
    return boxes, rows


def hotcoco_evaluation(truth: GroundTruth, detections: Detections) -> Any:
    """Return hotcoco's COCOeval after evaluate and accumulate.

    It numbers images, classes, boxes and detections from 1, in the order of their columns.
    """
    boxes, rows = to_columns(truth, detections)
    frame = _frame(truth)
    coco = hotcoco.COCO.from_arrays(
        frame["images"],
        frame["categories"],
        image_ids=boxes.images,
        category_ids=boxes.classes,
        boxes=boxes.boxes_xywh,
        area=boxes.areas,
        iscrowd=boxes.more,
    )
    table = np.column_stack((rows.images, rows.boxes_xywh, rows.more, rows.classes))
    evaluation = hotcoco.COCOeval(coco, coco.load_res(table), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def pycocotools_evaluation(truth: GroundTruth, detections: Detections) -> Any:
    """Return pycocotools' COCOeval after evaluate and accumulate."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    boxes, rows = to_columns(truth, detections)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        sides = []
        # As COCO.loadRes makes of a results file, without the polygons, which boxes do not need.
        for columns, last in ((boxes, "iscrowd"), (rows, "score")):
            coco = COCO()
            coco.dataset = _frame(truth) | {
                "annotations": [
                    # From 1: pycocotools treats a match with annotation 0 as no match.
                    {"id": number, "image_id": image, "category_id": cls, "bbox": box, "area": area, "iscrowd": 0}
                    | {last: value}
                    for number, (image, cls, box, area, value) in enumerate(
                        zip(*(column.tolist() for column in columns), strict=True), start=1
                    )
                ]
            }
            coco.createIndex()
            sides.append(coco)
        evaluation = COCOeval(*sides, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _frame(truth: GroundTruth) -> dict[str, list[dict[str, Any]]]:
    """Images and categories of a COCO data set; only masks and messages use sizes and names."""
    images, classes = len(truth.image_ids), len(truth.names)
    return {
        "images": [{"id": number, "height": 1, "width": 1} for number in range(1, images + 1)],
        "categories": [{"id": number, "name": str(number)} for number in range(1, classes + 1)],
    }


EVALUATIONS = {"hotcoco": hotcoco_evaluation, "pycocotools": pycocotools_evaluation}  # by config.Backend


class Curves(NamedTuple):
    """What COCOeval accumulates; -1 where there is no ground truth.

    T: IoU thresholds .5 to .95. R: recalls 0 to 1. K: classes. A: area ranges (all, small, medium,
    large). M: limits of detections per image (1, 10, 100).
    """

    precision: np.ndarray  # float64 (T, R, K, A, M)
    recall: np.ndarray  # float64 (T, K, A, M)


def accumulate(truth: GroundTruth, detections: Detections, backend: str) -> Curves:
    """Precision and recall by ``backend``, a key of EVALUATIONS; ``detections`` in any order."""
    evaluation = EVALUATIONS[backend](truth, detections)
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])


@dataclass(frozen=True)
class CocoResult:
    """Scores of one evaluation; a figure without ground truth is ABSENT."""

    figures: dict[str, float]  # by FIGURES
    per_class: dict[str, dict[str, float]]  # by class name: PER_CLASS, images, boxes (no crowds)
    backend: str  # the library that computed them


def score(ground_truth: GroundTruth, detections: Detections, backend: str = "hotcoco") -> CocoResult:
    """Compute the 12 COCO figures and those of each class.

    ``detections`` may be empty and in any order. ``backend`` is a key of EVALUATIONS.
    """
    precision, recall = accumulate(ground_truth, detections, backend)
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
