"""COCO figures by pycocotools, from plain arrays, in one order: the same to the last bit however the work was dealt.

pycocotools breaks ties between equal scores by the order in which detections come, so they are sorted first
(``canonical_order``). Ground truth keeps the float64 numbers of its file, since a rounded box or area moves matches.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

# A row for each detection, 32 bytes; "class" counts from 0, "box_xywh" is left, top, width, height in original pixels.
DETECTION = np.dtype([("image_id", "i8"), ("class", "i4"), ("score", "f4"), ("box_xywh", "f4", (4,))])
Detections: TypeAlias = np.ndarray  # of dtype DETECTION

# In the order of pycocotools' stats; s, m, l: boxes of area below 32**2, between, above 96**2 pixels.
FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
ABSENT = -1.0  # pycocotools' figure where there is no ground truth


@dataclass(frozen=True)
class GroundTruth:
    """Annotations of N images with M boxes, grouped by image: those of image i are ``offsets[i]:offsets[i + 1]``."""

    image_ids: np.ndarray  # int64 (N,)
    sizes: np.ndarray  # int (N, 2) height, width in pixels
    offsets: np.ndarray  # int64 (N + 1,)
    boxes_xywh: np.ndarray  # float64 (M, 4) left, top, width, height in pixels, as in the file
    classes: np.ndarray  # int (M,) from 0
    crowd: np.ndarray  # bool (M,)
    areas: np.ndarray  # float64 (M,) as in the file: of the mask, not of the box
    names: Sequence[str]  # of the classes, in the order of their category ids


@dataclass(frozen=True)
class CocoResult:
    """Scores of one evaluation; a figure is ABSENT where there is no ground truth for it."""

    figures: dict[str, float]  # by FIGURES
    per_class: dict[str, dict[str, float]]  # by class name: AP, AP50, images and boxes (without crowds) that have it


def make_detections(image_id: int, classes: np.ndarray, scores: np.ndarray, boxes_xyxy: np.ndarray) -> Detections:
    """Detections of one image from classes (n,), scores (n,) and boxes_xyxy (n, 4) in original pixels."""
    detections = np.zeros(len(classes), dtype=DETECTION)
    detections["image_id"] = image_id
    detections["class"] = classes
    detections["score"] = scores
    detections["box_xywh"][:, :2] = boxes_xyxy[:, :2]
    detections["box_xywh"][:, 2:] = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    return detections


def canonical_order(detections: Detections) -> Detections:
    """A sorted copy: by image, falling score, class, then box. Only identical rows are left without an order."""
    left, top, width, height = detections["box_xywh"].T
    keys = (height, width, top, left, detections["class"], -detections["score"], detections["image_id"])
    return detections[np.lexsort(keys)]


def score(ground_truth: GroundTruth, detections: Detections) -> CocoResult:
    """The 12 COCO figures and those of each class; ``detections`` may come in any order and may be empty."""
    assert np.isin(detections["image_id"], ground_truth.image_ids).all(), "a detection on an unknown image"
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        evaluation = COCOeval(_coco_ground_truth(ground_truth), _coco_detections(ground_truth, detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = dict(zip(FIGURES, (float(value) for value in evaluation.stats), strict=True))
    return CocoResult(figures, _per_class(ground_truth, evaluation.eval["precision"]))


def to_coco_json(detections: Detections, category_ids: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """COCO's results format, in canonical order; ``category_ids[class]`` is the id in the annotation file."""
    ordered = canonical_order(detections)
    columns = (ordered["image_id"], np.asarray(category_ids)[ordered["class"]], ordered["box_xywh"], ordered["score"])
    return [
        {"image_id": image_id, "category_id": category_id, "bbox": box_xywh, "score": confidence}
        for image_id, category_id, box_xywh, confidence in zip(*(c.tolist() for c in columns), strict=True)
    ]


def format_table(result: CocoResult) -> str:
    """The 12 figures and a row for each class, as text; "-" where there is no ground truth."""
    lines = ["  ".join(f"{name:>5}" for name in FIGURES)]
    lines.append("  ".join(f"{_cell(result.figures[name]):>5}" for name in FIGURES))
    width = max(len(name) for name in ("class", *result.per_class))
    lines += ["", f"{'class':<{width}}  {'images':>7}  {'boxes':>7}  {'AP':>5}  {'AP50':>5}"]
    for name, row in result.per_class.items():
        counts = f"{row['images']:>7.0f}  {row['boxes']:>7.0f}"
        lines.append(f"{name:<{width}}  {counts}  {_cell(row['AP']):>5}  {_cell(row['AP50']):>5}")
    return "\n".join(lines)


def _cell(figure: float) -> str:
    return "-" if figure == ABSENT else f"{figure:.3f}"


def _coco_dataset(ground_truth: GroundTruth, annotations: list[dict[str, Any]]) -> COCO:
    """pycocotools' index of the images and classes with the given annotations."""
    coco = COCO()
    coco.dataset = {
        "images": [
            {"id": image_id, "height": height, "width": width}
            for image_id, (height, width) in zip(
                ground_truth.image_ids.tolist(), ground_truth.sizes.tolist(), strict=True
            )
        ],
        "categories": [{"id": index, "name": name} for index, name in enumerate(ground_truth.names)],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def _coco_ground_truth(truth: GroundTruth) -> COCO:
    image_ids = np.repeat(truth.image_ids, np.diff(truth.offsets))
    columns = (image_ids, truth.classes, truth.boxes_xywh, truth.areas, truth.crowd)
    return _coco_dataset(
        truth,
        [
            # From 1: pycocotools takes a match with annotation 0 for no match.
            {"id": number, "image_id": image_id, "category_id": cls, "bbox": box, "area": area, "iscrowd": int(crowd)}
            for number, (image_id, cls, box, area, crowd) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True), start=1
            )
        ],
    )


def _coco_detections(truth: GroundTruth, detections: Detections) -> COCO:
    """What COCO.loadRes makes of a results file, without the polygons that boxes have no use for, and also if empty."""
    rows = to_coco_json(detections, range(len(truth.names)))
    for number, row in enumerate(rows, start=1):
        row |= {"id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
    return _coco_dataset(truth, rows)


def _per_class(truth: GroundTruth, precision: np.ndarray) -> dict[str, dict[str, float]]:
    """Rows of the table from COCOeval's precision (IoU thresholds, recalls, classes, area ranges, detection limits)."""
    image_of_box = np.repeat(np.arange(len(truth.image_ids)), np.diff(truth.offsets))
    rows = {}
    for index, name in enumerate(truth.names):
        of_class = (truth.classes == index) & ~truth.crowd.astype(bool)
        any_area_100_detections = precision[:, :, index, 0, 2]
        rows[name] = {
            "AP": _mean_of_present(any_area_100_detections),
            "AP50": _mean_of_present(any_area_100_detections[0]),
            "images": len(np.unique(image_of_box[of_class])),
            "boxes": int(of_class.sum()),
        }
    return rows


def _mean_of_present(precision: np.ndarray) -> float:
    present = precision[precision > ABSENT]
    return float(present.mean()) if present.size else ABSENT
