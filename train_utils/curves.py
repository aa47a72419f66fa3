"""Precision, recall and F1 of each class at every score, from COCO's matches at IoU .5.

COCO's rule (Lin et al. 2014, as in pycocotools): in each image the 100 best detections of a class
choose in order of score. Each takes the free box of its class with the largest IoU, at least .5.
Crowds come last and can be taken any number of times; their overlap is the share of the detection
inside them. A detection that takes a crowd does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train_utils.detections import Detections, GroundTruth, canonical_order

IOU = 0.5
MAX_DETECTIONS = 100  # of a class on an image
LARGEST_AREA = 1e5**2  # larger boxes do not count, as in COCOeval's area range "all"


@dataclass(frozen=True)
class ClassCurve:
    """One class at n thresholds, its distinct scores from high to low.

    A threshold reports all detections with at least that score.
    """

    boxes: int  # of ground truth, without crowds
    thresholds: np.ndarray  # float32 (n,) falling
    precision: np.ndarray  # float64 (n,) share of the reported detections that are right
    recall: np.ndarray  # float64 (n,) share of the boxes that are found

    @property
    def f1(self) -> np.ndarray:
        """Harmonic mean of precision and recall, float64 (n,); 0 if both are."""
        total = self.precision + self.recall
        return np.asarray(2 * self.precision * self.recall / np.where(total > 0, total, 1))

    def best(self) -> dict[str, float] | None:
        """The highest threshold of the best F1, with f1, precision and recall.

        None if no detection is right: then no threshold is better than another.
        """
        f1 = self.f1
        if not f1.size or f1.max() == 0:
            return None
        at = int(f1.argmax())
        values = {"threshold": self.thresholds[at], "f1": f1[at], "precision": self.precision[at]}
        return {name: float(value) for name, value in (values | {"recall": self.recall[at]}).items()}


def class_curves(truth: GroundTruth, detections: Detections) -> list[ClassCurve]:
    """The curve of each class; without ground truth or detections it has no points."""
    ranked, right, counted, boxes = _matched(truth, detections)
    return [
        _curve(int(boxes[cls]), ranked["score"][chosen], right[chosen])
        for cls in range(len(truth.names))
        for chosen in [counted & (ranked["class"] == cls)]
    ]


def pooled_curve(truth: GroundTruth, detections: Detections) -> ClassCurve:
    """One curve for the boxes and detections of all classes together."""
    ranked, right, counted, boxes = _matched(truth, detections)
    return _curve(int(boxes.sum()), ranked["score"][counted], right[counted])


def _matched(truth: GroundTruth, detections: Detections) -> tuple[Detections, np.ndarray, np.ndarray, np.ndarray]:
    """The n best detections, whether each is right and counts, bool (n,), and boxes per class."""
    ranked = canonical_order(detections)
    groups = _group_of_detections(truth, ranked)
    order = np.lexsort((-ranked["score"], groups))  # stable: equal scores stay in canonical order
    ranked, groups = ranked[order], groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    rank = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    ranked, groups = ranked[rank < MAX_DETECTIONS], groups[rank < MAX_DETECTIONS]
    right, counted = _match(truth, ranked, groups)
    return ranked, right, counted, np.bincount(truth.classes[~_is_ignored(truth)], minlength=len(truth.names))


def _group_of_detections(truth: GroundTruth, ranked: Detections) -> np.ndarray:
    """One number for image and class together, for each detection."""
    by_id = np.argsort(truth.image_ids)
    image = by_id[np.searchsorted(truth.image_ids[by_id], ranked["image_id"])]
    return np.asarray(image * len(truth.names) + ranked["class"])


def _is_ignored(truth: GroundTruth) -> np.ndarray:
    return np.asarray(truth.crowd.astype(bool) | (truth.areas < 0) | (truth.areas > LARGEST_AREA))


def _match(truth: GroundTruth, ranked: Detections, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which detections are right and which count, bool (n,); ``groups`` ascend, best first."""
    box_groups = truth.image_of_box * len(truth.names) + truth.classes
    ignored = _is_ignored(truth)
    box_order = np.lexsort((ignored, box_groups))  # stable, the ignored ones last
    box_groups = box_groups[box_order]
    first, last = (np.searchsorted(box_groups, groups, side) for side in ("left", "right"))
    # All pairs of a detection and a box of its image and class, detection by detection.
    count = last - first
    row = np.repeat(np.arange(len(ranked)), count)
    ends = np.cumsum(count)
    box = box_order[np.arange(len(row)) - np.repeat(ends - count, count) + np.repeat(first, count)]
    detected_xywh = ranked["box_xywh"].astype(np.float64)[row]
    overlap = overlaps_of(detected_xywh, truth.boxes_xywh[box], truth.crowd[box].astype(bool))
    near = overlap >= IOU
    chosen = _choose(row[near], box[near], overlap[near], ignored, truth.crowd.astype(bool), len(ranked))
    right = ~np.append(ignored, True)[chosen]  # -1, no box, is the last
    areas = ranked["box_xywh"][:, 2:].astype(np.float64).prod(1)
    outside = (areas < 0) | (areas > LARGEST_AREA)
    return right, right | ((chosen < 0) & ~outside)


def overlaps_of(detected_xywh: np.ndarray, boxes_xywh: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """IoU row by row of float64 (n, 4) and (n, 4); a crowd's divisor is the detection's area."""
    low = np.maximum(detected_xywh[:, :2], boxes_xywh[:, :2])
    high = np.minimum(detected_xywh[:, 2:] + detected_xywh[:, :2], boxes_xywh[:, 2:] + boxes_xywh[:, :2])
    sides = high - low
    own, other = detected_xywh[:, 2] * detected_xywh[:, 3], boxes_xywh[:, 2] * boxes_xywh[:, 3]
    shared = np.where((sides > 0).all(1), sides[:, 0] * sides[:, 1], 0)
    union = np.where(crowd, own, own + other - shared)
    overlaps = np.zeros(len(shared))
    np.divide(shared, union, out=overlaps, where=shared > 0)
    return overlaps


def _choose(
    rows: np.ndarray, boxes: np.ndarray, overlaps: np.ndarray, ignored: np.ndarray, crowd: np.ndarray, count: int
) -> np.ndarray:
    """The box that each of ``count`` detections takes, or -1.

    Pairs come detection by detection, best first, with a detection's ignored boxes last. Of equal
    overlaps pycocotools takes the later one.
    """
    chosen = np.full(count, -1)
    taken: set[int] = set()
    is_ignored, is_crowd = ignored.tolist(), crowd.tolist()
    current, best, overlap = -1, -1, 0.0
    for row, box, value in zip(rows.tolist(), boxes.tolist(), overlaps.tolist(), strict=True):
        if row != current:
            if best >= 0:
                chosen[current] = best
                taken.add(best)
            current, best, overlap = row, -1, 0.0
        if (box in taken and not is_crowd[box]) or value < overlap:
            continue
        if best >= 0 and is_ignored[box] and not is_ignored[best]:
            continue
        best, overlap = box, value
    if best >= 0:
        chosen[current] = best
    return chosen


def _curve(boxes: int, scores: np.ndarray, right: np.ndarray) -> ClassCurve:
    """The curve from the counted detections (n,) of one class."""
    if boxes == 0 or not len(scores):
        return ClassCurve(boxes, np.zeros(0, np.float32), np.zeros(0), np.zeros(0))
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(right[order])
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # equal scores are reported together
    return ClassCurve(boxes, scores[last], hits[last] / (last + 1), hits[last] / boxes)
