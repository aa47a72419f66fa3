"""COCO's precision and recall on plain arrays, by pycocotools or the faster hotcoco.

Both get the same numbers in the same order: images by id, detections in canonical order, classes
and images counted from 1. They agree to the last bit (tests/train_utils/scores/).
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import numpy as np

from train_utils.scores.detections import Detections, GroundTruth, canonical_order


class Curves(NamedTuple):
    """What COCOeval accumulates; -1 where there is no ground truth.

    T: IoU thresholds .5 to .95. R: recalls 0 to 1. K: classes. A: area ranges (all, small, medium,
    large). M: limits of detections per image (1, 10, 100).
    """

    precision: np.ndarray  # float64 (T, R, K, A, M)
    recall: np.ndarray  # float64 (T, K, A, M)


class Columns(NamedTuple):
    """Ground truth or detections, column by column, as the libraries take them."""

    images: np.ndarray  # int64 (n,) position of the image in the order of ids, from 1
    classes: np.ndarray  # int64 (n,) from 1
    boxes_xywh: np.ndarray  # float64 (n, 4)
    areas: np.ndarray  # float64 (n,)
    more: np.ndarray  # (n,) ground truth: bool, whether it is a crowd; detections: float64 scores


def curves(truth: GroundTruth, detections: Detections, backend: str) -> Curves:
    """Precision and recall by ``backend``, a key of COMPUTE; ``detections`` in any order."""
    return COMPUTE[backend](len(truth.image_ids), len(truth.names), *columns(truth, detections))


def columns(truth: GroundTruth, detections: Detections) -> tuple[Columns, Columns]:
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
    found = canonical_order(detections)
    found_xywh = found["box_xywh"].astype(np.float64)
    rows = Columns(
        np.searchsorted(truth.image_ids[by_id], found["image_id"]) + 1,
        found["class"].astype(np.int64) + 1,
        found_xywh,
        found_xywh[:, 2] * found_xywh[:, 3],
        found["score"].astype(np.float64),
    )
    return boxes, rows


def _pycocotools(images: int, classes: int, truth: Columns, found: Columns) -> Curves:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        sides = []
        for annotations in (_ground_truth_rows(truth), _detection_rows(found)):
            coco = COCO()
            coco.dataset = _frame(images, classes) | {"annotations": annotations}
            coco.createIndex()
            sides.append(coco)
        evaluation = COCOeval(*sides, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])


def _hotcoco(images: int, classes: int, truth: Columns, found: Columns) -> Curves:
    evaluation = hotcoco_evaluation(images, classes, truth, found)
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])


def hotcoco_evaluation(images: int, classes: int, truth: Columns, found: Columns) -> Any:
    """Return hotcoco's COCOeval after evaluate and accumulate.

    It numbers images, classes, boxes and detections from 1, in the order of their columns.
    """
    import hotcoco

    frame = _frame(images, classes)
    boxes = hotcoco.COCO.from_arrays(
        frame["images"],
        frame["categories"],
        image_ids=truth.images,
        category_ids=truth.classes,
        boxes=truth.boxes_xywh,
        area=truth.areas,
        iscrowd=truth.more,
    )
    table = np.column_stack((found.images, found.boxes_xywh, found.more, found.classes))
    evaluation = hotcoco.COCOeval(boxes, boxes.load_res(table), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _frame(images: int, classes: int) -> dict[str, list[dict[str, Any]]]:
    """Images and categories of a COCO data set; only masks and messages use sizes and names."""
    return {
        "images": [{"id": number, "height": 1, "width": 1} for number in range(1, images + 1)],
        "categories": [{"id": number, "name": str(number)} for number in range(1, classes + 1)],
    }


def _ground_truth_rows(columns: Columns) -> list[dict[str, Any]]:
    return [
        # From 1: pycocotools treats a match with annotation 0 as no match.
        {"id": number, "image_id": image, "category_id": cls, "bbox": box, "area": area, "iscrowd": int(crowd)}
        for number, (image, cls, box, area, crowd) in enumerate(_rows(columns), start=1)
    ]


def _detection_rows(columns: Columns) -> list[dict[str, Any]]:
    """What COCO.loadRes makes of a results file, without the polygons, which boxes do not need."""
    return [
        {"id": number, "image_id": image, "category_id": cls, "bbox": box, "area": area, "iscrowd": 0, "score": score}
        for number, (image, cls, box, area, score) in enumerate(_rows(columns), start=1)
    ]


def _rows(columns: Columns) -> zip[Any]:
    return zip(*(column.tolist() for column in columns), strict=True)


COMPUTE = {"hotcoco": _hotcoco, "pycocotools": _pycocotools}
