"""Why a figure is what it is: confusions, calibration, kinds of errors, and the worst images.

hotcoco counts all of it from the matches that also give the AP. Errors on images are those of the
detections above one threshold: the score with the best F1 over all classes together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from train_utils.scores.coco_backends import columns, hotcoco_evaluation
from train_utils.scores.detections import Detections, GroundTruth, canonical_order
from train_utils.scores.operating_points import (
    IOU,
    NEAR,
    ClassCurve,
    class_curves,
    overlaps_of,
    pooled_curve,
)

USUAL_THRESHOLD = 0.3  # where no detection is right, so that no score is better than another
SURE = 0.5  # score from which a detection may know better than a label


class ImageErrors(NamedTuple):
    """What is right and wrong on one image."""

    right: Detections
    false: Detections  # surest first
    missed: np.ndarray  # rows of the ground truth


class Suspect(NamedTuple):
    """A sure detection that contradicts the labels of an image."""

    image: int  # position in the data set
    detection: np.void  # a row of Detections
    label: int | None  # row of the ground truth, of another class; None: nothing is labelled there


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the plots of an evaluation show beside its table; K classes."""

    truth: GroundTruth
    by_id: np.ndarray  # positions of the images in the order of their ids: hotcoco counts these from 1
    precision: np.ndarray  # float64 (IoU thresholds, recalls, K) for boxes of all sizes; -1: no labels
    curves: list[ClassCurve]
    pooled: ClassCurve  # of all classes together
    threshold: float  # detections from this score on are reported
    reported: Detections
    # hotcoco's: "matrix", counts, and "normalized", shares of a row, both (K + 1, K + 1) by label
    # and reported class with background last
    confusion: dict[str, Any]
    calibration: dict[str, Any] | None  # hotcoco's; None: scores outside 0..1
    tide: dict[str, Any]  # hotcoco's: delta_ap and counts by kind of error (Bolya et al. 2020)
    status: dict[str, Any]  # hotcoco's image_diagnostics of the reported detections
    below: dict[int, float]  # score of the best match of a box, by row of the ground truth

    def worst(self, kind: str) -> list[int]:
        """Positions of the images with missed labels (fn) or false detections (fp), most first."""
        counts = {int(self.by_id[image - 1]): row[kind] for image, row in self.status["img_summary"].items()}
        return sorted((image for image, count in counts.items() if count), key=lambda image: (-counts[image], image))

    def errors_on(self, image: int) -> ImageErrors:
        """What is right and wrong on the image at a position of the data set."""
        rows = np.flatnonzero(self.reported["image_id"] == self.truth.image_ids[image])
        kinds = np.array([self.status["dt_status"].get(row + 1) for row in rows], dtype=object)
        boxes = range(*self.truth.offsets[image : image + 2])
        missed = [row for row in boxes if self.status["gt_status"].get(row + 1) == "fn"]
        found = self.reported[rows]
        return ImageErrors(found[kinds == "tp"], found[kinds == "fp"], np.array(missed, np.int64))

    def why_missed(self, row: int) -> str:
        """Name a label, and the score below the threshold with which it was found."""
        found = f", found at {self.below[row]:.2g}" if row in self.below else ""
        return f"missed {self.truth.names[self.truth.classes[row]]}{found}"

    def why_false(self, image: int, detection: np.void) -> str:
        """Name a false detection, its score and the kind of error by TIDE's rules."""
        boxes = slice(*self.truth.offsets[image : image + 2])
        classes, crowd = self.truth.classes[boxes], self.truth.crowd[boxes].astype(bool)
        found_xywh = np.tile(detection["box_xywh"].astype(np.float64), (len(classes), 1))
        overlaps = overlaps_of(found_xywh, self.truth.boxes_xywh[boxes], crowd)
        own = overlaps[classes == detection["class"]].max(initial=0)
        others = np.where((classes != detection["class"]) & ~crowd, overlaps, 0)
        other = others.max(initial=0)
        name = self.truth.names[classes[others.argmax()]] if other else ""
        if NEAR <= own < IOU:
            reason = f"overlap {own:.2f}"
        elif other >= IOU:
            reason = f"is {name}"
        elif own >= IOU:
            reason = "twice"
        else:
            reason = f"near {name}" if other >= NEAR else "nothing there"
        return f"{self.truth.names[detection['class']]} {detection['score']:.2f}: {reason}"

    def suspects(self) -> list[Suspect]:
        """The sure detections that contradict the labels, surest first; one for each label."""
        first: dict[int, dict[str, Any]] = {}
        for row in sorted(self.status["label_errors"], key=lambda row: -row["dt_score"]):
            if row["dt_score"] >= SURE:
                first.setdefault(row["gt_id"] or -row["dt_id"], row)  # both count from 1
        return [
            Suspect(
                int(self.by_id[row["image_id"] - 1]),
                self.reported[row["dt_id"] - 1],
                None if row["gt_id"] is None else row["gt_id"] - 1,
            )
            for row in first.values()
        ]


def diagnose(truth: GroundTruth, detections: Detections) -> Diagnosis:
    """Analyse ``detections``, which may be in any order and empty."""
    curves, pooled = class_curves(truth, detections), pooled_curve(truth, detections)
    best = pooled.best()
    threshold = best["threshold"] if best is not None else USUAL_THRESHOLD
    size = len(truth.image_ids), len(truth.names)
    found = canonical_order(detections)
    reported = found[found["score"] >= threshold]
    everything = hotcoco_evaluation(*size, *columns(truth, found))
    confident = hotcoco_evaluation(*size, *columns(truth, reported))
    matched_by = everything.image_diagnostics(iou_thr=IOU)["gt_match"]
    are_shares = not len(found) or 0 <= found["score"].min() <= found["score"].max() <= 1
    return Diagnosis(
        truth=truth,
        by_id=np.argsort(truth.image_ids),
        precision=everything.eval["precision"][:, :, :, 0, 2],
        curves=curves,
        pooled=pooled,
        threshold=threshold,
        reported=reported,
        confusion=confident.confusion_matrix(iou_thr=IOU),
        calibration=everything.calibration(iou_threshold=IOU) if are_shares else None,
        tide=everything.tide_errors(pos_thr=IOU, bg_thr=NEAR),
        status=confident.image_diagnostics(iou_thr=IOU, score_thr=threshold),
        below={box - 1: float(found["score"][row - 1]) for box, row in matched_by.items()},
    )
