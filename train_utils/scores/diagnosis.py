"""Why a figure is what it is: confusions, calibration, kinds of errors, and the worst images.

hotcoco counts all of it from the matches that also give the AP. Errors on images are those of the
detections above one threshold: the score with the best F1 over all classes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from train_utils.scores.coco_backends import columns, hotcoco_evaluation
from train_utils.scores.detections import Detections, GroundTruth, canonical_order
from train_utils.scores.operating_points import IOU, ClassCurve, class_curves, overlaps_of, pooled_curve

USUAL_THRESHOLD = 0.3  # where no detection is right, so that no score is better than another
NEAR = 0.1  # a detection that overlaps every label by less lies on background, as in TIDE


class ImageErrors(NamedTuple):
    """What is right and wrong on one image, with a reason of a few words for each error."""

    image: int  # position in the data set
    right: Detections
    false: Detections
    false_reasons: Sequence[str]
    missed: np.ndarray  # rows of the ground truth
    missed_reasons: Sequence[str]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the plots of an evaluation show beside its table; K classes."""

    precision: np.ndarray  # float64 (IoU thresholds, recalls, K) for boxes of all sizes; -1: no labels
    curves: list[ClassCurve]
    pooled: ClassCurve  # of all classes together
    threshold: float  # detections from this score on count as reported
    confusion: np.ndarray  # int (K + 1, K + 1): label, reported class; the last of each is background
    confusion_share: np.ndarray  # float64, the same with rows that sum to 1
    # hotcoco's: ece, and bins with avg_confidence, avg_accuracy, count; None: scores outside 0..1
    calibration: dict[str, Any] | None
    tide: dict[str, Any]  # hotcoco's: delta_ap and counts by kind of error (Bolya et al. 2020)
    images: list[ImageErrors]  # of all images, in the order of the data set
    suspects: list[dict[str, Any]]  # hotcoco's label_errors, with "image" and "detection" (row) added


def diagnose(truth: GroundTruth, detections: Detections) -> Diagnosis:
    """Analyse ``detections``, which may be in any order and empty."""
    curves, pooled = class_curves(truth, detections), pooled_curve(truth, detections)
    best = pooled.best()
    threshold = best["threshold"] if best is not None else USUAL_THRESHOLD
    size = len(truth.image_ids), len(truth.names)
    found = canonical_order(detections)
    everything = hotcoco_evaluation(*size, *columns(truth, found))
    reported = found[found["score"] >= threshold]
    confident = hotcoco_evaluation(*size, *columns(truth, reported))
    confusion = confident.confusion_matrix(iou_thr=IOU)
    status = confident.image_diagnostics(iou_thr=IOU, score_thr=threshold)
    matched_by = everything.image_diagnostics(iou_thr=IOU)["gt_match"]
    below = {box - 1: float(found["score"][row - 1]) for box, row in matched_by.items()}
    images = _image_errors(truth, reported, status, below)
    are_shares = not len(found) or 0 <= found["score"].min() <= found["score"].max() <= 1
    by_id = np.argsort(truth.image_ids)
    suspects = [
        row | {"image": int(by_id[row["image_id"] - 1]), "detection": reported[row["dt_id"] - 1]}
        for row in status["label_errors"]
    ]
    return Diagnosis(
        precision=everything.eval["precision"][:, :, :, 0, 2],
        curves=curves,
        pooled=pooled,
        threshold=threshold,
        confusion=confusion["matrix"].astype(np.int64),
        confusion_share=confusion["normalized"],
        calibration=everything.calibration(iou_threshold=IOU) if are_shares else None,
        tide=everything.tide_errors(pos_thr=IOU, bg_thr=NEAR),
        images=images,
        suspects=suspects,
    )


def _image_errors(
    truth: GroundTruth, reported: Detections, status: dict[str, Any], below: dict[int, float]
) -> list[ImageErrors]:
    """Sort ``reported`` and boxes by image; ``below``: score of the best match of a box, by row."""
    kinds = np.array([status["dt_status"].get(row + 1, "") for row in range(len(reported))])
    missed = {row - 1 for row, kind in status["gt_status"].items() if kind == "fn"}
    order = np.argsort(reported["image_id"], kind="stable")
    reported, kinds = reported[order], kinds[order]
    first, last = (np.searchsorted(reported["image_id"], truth.image_ids, side) for side in ("left", "right"))
    errors = []
    for image in range(len(truth.image_ids)):
        found, kind = reported[first[image] : last[image]], kinds[first[image] : last[image]]
        rows = np.arange(truth.offsets[image], truth.offsets[image + 1])
        boxes = rows[~truth.crowd[rows].astype(bool)]
        false = found[kind == "fp"]
        lost = np.array([row for row in boxes if row in missed], np.int64)
        found_low = [f", found at {below[row]:.2g}" if row in below else "" for row in lost]
        errors.append(
            ImageErrors(
                image, found[kind == "tp"], false, _why_false(truth, rows, false), lost,
                [f"missed {truth.names[truth.classes[row]]}{how}" for row, how in zip(lost, found_low, strict=True)],
            )
        )  # fmt: skip
    return errors


def _why_false(truth: GroundTruth, boxes: np.ndarray, false: Detections) -> list[str]:
    """The kind of each false detection by TIDE's rules, from the rows ``boxes`` of its image."""
    each, every = np.repeat(np.arange(len(false)), len(boxes)), np.tile(boxes, len(false))
    found_xywh = false["box_xywh"].astype(np.float64)[each]
    overlaps = overlaps_of(found_xywh, truth.boxes_xywh[every], truth.crowd[every].astype(bool))
    reasons = []
    for row, detection in zip(overlaps.reshape(len(false), len(boxes)), false, strict=True):
        same = truth.classes[boxes] == detection["class"]
        strange = ~same & ~truth.crowd[boxes].astype(bool)
        own, other = row[same].max(initial=0), row[strange].max(initial=0)
        if NEAR <= own < IOU:
            reason = f"overlap {own:.2f}"
        elif other >= IOU:
            reason = f"is {truth.names[truth.classes[boxes[strange][row[strange].argmax()]]]}"
        elif own >= IOU:
            reason = "twice"
        else:
            reason = (
                "nothing there"
                if other < NEAR
                else f"near {truth.names[truth.classes[boxes[strange][row[strange].argmax()]]]}"
            )
        reasons.append(f"{truth.names[detection['class']]} {detection['score']:.2f}: {reason}")
    return reasons
