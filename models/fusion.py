"""Merge the detections of several views of an image: slices of it, other sizes, mirrored ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPS = 1e-9  # square pixels: keeps the overlap of boxes without area finite
CHUNK = 2**17  # boxes in one table, padding included

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Seen:
    """Detections in views of images; after merging one for each object."""

    boxes_xyxy: Floats  # (n, 4) in pixels of the image
    scores: Floats  # (n,)
    classes: Ints  # (n,)
    images: Ints  # (n,)
    windows: Floats  # (n, 4) left, top, right, bottom of what the view sees; infinite where the image ends

    def rows(self, which: Ints | Bools) -> Seen:
        """Some of the detections."""
        return Seen(*(column[which] for column in vars(self).values()))


@dataclass(frozen=True)
class Fusion:
    """Merge the detections of one object in several views, class by class.

    Two are of one object if their boxes, cut to what both views see, overlap by more than ``iou``.
    So the part of an object that a slice shows agrees with the whole and with its other parts, but
    not with another object inside of it.

    average: weighted boxes fusion (Solovyev, Wang, Gabruseva 2021, section 3): the mean box,
        weighted by scores, and the sum of the scores over the number of boxes, or of ``views`` if
        that is larger. Otherwise non-maximum suppression: the best box with its score. A side that
        a slice cuts is that of the best box that has it whole, or else the outermost.
    margin: pixels from an inner border of a slice within which it cuts a box.
    max_detections: how many an image keeps, over all classes, best first.
    """

    iou: float
    confidence: float
    max_detections: int
    average: bool = False
    views: int = 1
    margin: float = 0.0

    def __call__(self, seen: Seen) -> Seen:
        """The objects by image, best first; the other images do not change those of an image.

        Rows of one view and class that have equal scores must come in a fixed order. Boxes without
        area, as clipping leaves of those outside the image, are dropped.
        """
        seen = seen.rows(np.all(seen.boxes_xyxy[:, 2:] > seen.boxes_xyxy[:, :2], axis=1))
        before = len(seen.scores) + 1
        while len(seen.scores) < before:  # parts of an object may become neighbours only once others are merged
            before = len(seen.scores)
            seen = self._merged(seen)
            if not np.isfinite(seen.windows).any():
                break
        seen = seen.rows(seen.scores > self.confidence)
        seen = seen.rows(np.lexsort((-seen.scores, seen.images)))
        rank = np.arange(len(seen.images)) - np.searchsorted(seen.images, seen.images)
        return seen.rows(rank < self.max_detections)

    def _merged(self, seen: Seen) -> Seen:
        """Each detection joins the object, made of better ones, with which it agrees most."""
        seen = seen.rows(np.lexsort((-seen.scores, seen.classes, seen.images)))
        new = (np.diff(seen.images, prepend=-1) != 0) | (np.diff(seen.classes, prepend=-1) != 0)
        starts = np.flatnonzero(new)
        lengths = np.diff(starts, append=len(new))
        order = np.argsort(-lengths, kind="stable")
        parts = [self._objects(seen, starts[some], lengths[some]) for some in _chunks(order, lengths[order])]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Seen(*map(np.concatenate, columns)) if parts else seen

    def _objects(self, seen: Seen, starts: Ints, lengths: Ints) -> Seen:
        """The same for some groups of rows of one image and class, the longest first.

        Every turn takes the next row of each group, and compares it with all objects of its group.
        """
        shape = len(lengths), int(lengths[0])
        boxes, windows = np.zeros((4, *shape)), np.zeros((4, *shape))
        scores, counts, firsts = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        used = np.zeros(len(lengths), np.int64)
        for turn in range(shape[1]):
            groups = slice(0, int(np.searchsorted(-lengths, -turn)))  # those that have so many rows
            rows = starts[groups] + turn
            box, window, score = seen.boxes_xyxy[rows].T, seen.windows[rows].T, seen.scores[rows]
            known = slice(0, int(used.max()) + 1)  # with one that is free in all groups
            overlap = seen_iou(boxes[:, groups, known], windows[:, groups, known], box[..., None], window[..., None])
            best, numbers = overlap.argmax(axis=1), np.arange(len(rows))
            joins = overlap[numbers, best] > self.iou
            at = numbers, np.where(joins, best, used[groups])
            used[groups] += ~joins
            old, sees = boxes[:, *at], windows[:, *at]
            if self.average:
                scores[at] += score
                boxes[:, *at] += (box - old) * (score / scores[at])
            else:
                boxes[:, *at] = np.where(joins, self._whole(old, sees, box, window), box)
                scores[at] = np.maximum(scores[at], score)
            windows[:, *at] = np.where(joins, _hull(sees, window), window)
            firsts[at] = np.where(joins, firsts[at], rows)
            counts[at] += 1
        found = counts > 0
        if self.average:
            scores /= np.maximum(counts, self.views)
        rows = firsts[found]
        return Seen(boxes[:, found].T, scores[found], seen.classes[rows], seen.images[rows], windows[:, found].T)

    def _whole(self, better: Floats, sees: Floats, worse: Floats, also_sees: Floats) -> Floats:
        """The better of two boxes (4, n), with each side that its view cuts replaced."""
        cut, also_cut = self.cut(better, sees), self.cut(worse, also_sees)
        return np.where(cut, np.where(also_cut, _hull(better, worse), worse), better)

    def cut(self, boxes_xyxy: Floats, windows: Floats) -> Bools:
        """Which sides (4, n) of boxes a window cuts."""
        low = boxes_xyxy[:2] <= windows[:2] + self.margin
        return np.concatenate((low, boxes_xyxy[2:] >= windows[2:] - self.margin))


def seen_iou(boxes1_xyxy: Floats, windows1: Floats, boxes2_xyxy: Floats, windows2: Floats) -> Floats:
    """IoU (...) of two arrays of boxes (4, ...) within what both of their windows show."""
    low, high = np.maximum(windows1[:2], windows2[:2]), np.minimum(windows1[2:], windows2[2:])
    low1, high1 = np.maximum(boxes1_xyxy[:2], low), np.minimum(boxes1_xyxy[2:], high)
    low2, high2 = np.maximum(boxes2_xyxy[:2], low), np.minimum(boxes2_xyxy[2:], high)
    both = _area(np.maximum(low1, low2), np.minimum(high1, high2))
    result: Floats = both / np.maximum(_area(low1, high1) + _area(low2, high2) - both, EPS)
    return result


def _area(low: Floats, high: Floats) -> Floats:
    area: Floats = np.maximum(high - low, 0).prod(axis=0)
    return area


def _hull(boxes1_xyxy: Floats, boxes2_xyxy: Floats) -> Floats:
    """The boxes (4, n) around pairs of boxes."""
    low, high = np.minimum(boxes1_xyxy[:2], boxes2_xyxy[:2]), np.maximum(boxes1_xyxy[2:], boxes2_xyxy[2:])
    return np.concatenate((low, high))


def _chunks(order: Ints, lengths: Ints) -> Iterator[Ints]:
    """``order`` in parts; a table of groups is as long as the first of them, and small enough."""
    start = 0
    while start < len(order):
        end = start + max(1, CHUNK // int(lengths[start]))
        yield order[start:end]
        start = end
