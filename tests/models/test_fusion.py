"""Detections of several views: each object once, whatever the views show of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import batched_nms, box_iou

from data import Looks
from models import Fusion, Seen, fusion

WHOLE = np.array([-np.inf, -np.inf, np.inf, np.inf])


def random_seen(images: int = 6, each: int = 70, classes: int = 4) -> Seen:
    """Boxes in views of whole images, with many overlaps and no equal scores."""
    generator = np.random.default_rng(0)
    count = images * each
    centres, sizes = generator.uniform(0, 90, (count, 2)), generator.uniform(10, 50, (count, 2))
    boxes = np.concatenate((centres - sizes / 2, centres + sizes / 2), axis=1)
    numbers = generator.permutation(np.repeat(np.arange(images), each))
    return Seen(
        boxes, (generator.permutation(count) + 1) / count, generator.integers(0, classes, count), numbers,
        np.tile(WHOLE, (count, 1)),
    )  # fmt: skip


def assert_same(ours: Seen, theirs: Seen) -> None:
    for name, column in vars(ours).items():
        assert np.array_equal(column, getattr(theirs, name)), name


def test_without_slices_it_is_torchvision_s_suppression() -> None:
    seen = random_seen()
    merged = Fusion(0.5, 0.1, 20)(seen)
    for image in range(6):
        rows = seen.rows((seen.images == image) & (seen.scores > 0.1))
        boxes, scores, classes = map(torch.from_numpy, (rows.boxes_xyxy, rows.scores, rows.classes))
        expected = rows.rows(batched_nms(boxes, scores, classes, 0.5)[:20].numpy())
        assert_same(merged.rows(merged.images == image), expected)
        assert len(expected.scores) < len(rows.scores)


def plain_fusion(boxes: np.ndarray, scores: np.ndarray, iou: float, views: int) -> np.ndarray:
    """Rows of box and score of weighted boxes fusion, by the steps of its paper (section 3)."""
    clusters: list[list[int]] = []
    fused: list[np.ndarray] = []
    for row in np.argsort(-scores):
        overlaps = [float(box_iou(torch.from_numpy(boxes[row][None]), torch.from_numpy(one[None]))) for one in fused]
        best = int(np.argmax(overlaps)) if overlaps else -1
        if best < 0 or overlaps[best] <= iou:
            clusters.append([])
            fused.append(boxes[row])
            best = len(clusters) - 1
        clusters[best].append(row)
        own = clusters[best]
        fused[best] = (scores[own, None] * boxes[own]).sum(0) / scores[own].sum()
    means = [scores[own].mean() * min(len(own), views) / views for own in clusters]
    rows = np.column_stack((fused, means))
    return rows[np.argsort(-rows[:, 4])]


def test_the_average_is_weighted_boxes_fusion() -> None:
    seen = random_seen(images=3)
    merged = Fusion(0.5, 0.0, 1000, average=True, views=3)(seen)
    for image in range(3):
        for kind in range(4):
            of_group = (seen.images == image) & (seen.classes == kind)
            expected = plain_fusion(seen.boxes_xyxy[of_group], seen.scores[of_group], 0.5, 3)
            ours = merged.rows((merged.images == image) & (merged.classes == kind))
            assert np.allclose(np.column_stack((ours.boxes_xyxy, ours.scores)), expected, atol=1e-9)


@pytest.mark.parametrize("average", [False, True])
def test_an_image_s_objects_depend_neither_on_others_nor_on_memory(
    average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, merge = random_seen(), Fusion(0.4, 0.05, 15, average, 2)
    merged = merge(seen)
    assert np.bincount(merged.images).tolist() == [15] * 6
    assert (np.diff(merged.scores)[np.diff(merged.images) == 0] <= 0).all()
    for image in range(6):
        assert_same(merge(seen.rows(seen.images == image)), merged.rows(merged.images == image))
    monkeypatch.setattr(fusion, "CHUNK", 40)
    assert_same(merge(seen), merged)
    nothing = seen.rows(np.zeros(0, dtype=np.int64))
    assert_same(merge(nothing), nothing)


# Objects in an image of 300 x 250 pixels, cut into slices of 100 with 20 or more in common. The
# inner borders are at x = 66, 100, 133, 166, 200, 233 and y = 75, 100, 150, 175.
OBJECTS = {
    "inside a slice": (5, 5, 30, 40),
    "in the overlap of two": (70, 10, 95, 30),
    "across a border": (90, 20, 108, 40),
    "ends at a border": (40, 20, 100, 60),
    "begins at a border": (66, 20, 90, 60),
    "is the overlap": (66, 5, 100, 70),
    "across a corner": (90, 90, 112, 112),
    "a corner of four slices": (66, 75, 100, 100),
    "at the image's corner": (270, 230, 300, 250),
    "beyond the image": (280, 200, 310, 260),
    "wider than the overlap": (60, 20, 140, 30),
    "wider than a slice": (20, 100, 220, 130),
    "higher than a slice": (120, 20, 160, 240),
    "larger than a slice": (40, 40, 260, 210),
    "a sliver in the next slice": (10, 10, 67, 20),
    "the image": (0, 0, 300, 250),
}


def seen_in_slices(objects: np.ndarray, looks: Looks, generator: np.random.Generator) -> Seen:
    """What a perfect detector finds: the visible part of each object, each of its own class."""
    windows = looks.seen((250, 300))
    low = np.maximum(objects[:, None, :2], windows[:, :2])
    high = np.minimum(objects[:, None, 2:], windows[:, 2:])
    classes, views = np.nonzero((high > low).all(axis=-1))
    boxes = np.concatenate((low, high), axis=-1)[classes, views]
    scores = generator.permutation(len(views)) / len(views) + 0.001
    return Seen(boxes, scores, classes, np.zeros(len(views), dtype=np.int64), windows[views])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("overlap", [20, 90])
@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_an_object_is_found_once_wherever_slices_cut_it(whole: bool, overlap: int, margin: float) -> None:
    """Whatever the order of the scores; also 300 random objects, and 100 that borders bound."""
    looks = Looks((100,), slices=100, overlap=overlap, whole=whole)
    generator = np.random.default_rng(0)
    corners = generator.uniform((0, 0), (300, 250), (2, 300, 2))
    tiles = np.array(looks.windows((250, 300)))
    borders = np.stack([generator.choice(np.unique(tiles[:, axis::2]), (2, 100)) for axis in (0, 1)], axis=-1)
    borders = borders[:, (borders[0] != borders[1]).all(axis=1)]
    pairs = [np.concatenate((two.min(0), two.max(0)), axis=1) for two in (corners, borders)]
    objects = np.concatenate((np.array([*OBJECTS.values()]), *pairs)).astype(np.float64)
    merge = Fusion(0.6, 0.0, 1000, margin=margin)
    for _ in range(3):
        seen = seen_in_slices(objects, looks, generator)
        assert len(seen.scores) > 3 * len(objects)
        merged = merge(seen)
        found = merged.rows(np.argsort(merged.classes, kind="stable"))
        assert found.classes.tolist() == [*range(len(objects))]
        assert np.array_equal(found.boxes_xyxy, objects)
        best = [seen.scores[seen.classes == kind].max() for kind in range(len(objects))]
        assert found.scores.tolist() == best


def test_objects_of_one_class_beside_and_inside_of_one_another_stay_apart() -> None:
    """Intersection over the smaller area would drop the one inside."""
    looks = Looks((100,), slices=100, overlap=30)
    objects = np.array([(20, 40, 280, 210), (120, 100, 150, 130), (10, 5, 60, 30), (62, 5, 140, 30)], dtype=np.float64)
    seen = seen_in_slices(objects, looks, np.random.default_rng(1))
    merged = Fusion(0.6, 0.0, 100, margin=2.0)(replace(seen, classes=np.zeros_like(seen.classes)))
    assert sorted(merged.boxes_xyxy.tolist()) == sorted(objects.tolist())
