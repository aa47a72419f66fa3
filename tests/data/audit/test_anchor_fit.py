"""Overlap and recall of anchors against plain formulas; searches find planted sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.anchors import (
    CHUNK,
    best_overlaps,
    kmeans_anchors,
    nearest_anchors,
    network_sizes,
    recall,
    refine_anchors,
)
from models.boxes import wh_iou
from tests.data.conftest import CocoSet

PLANTED = np.array([[10.0, 12.0], [40.0, 20.0], [30.0, 90.0], [200.0, 150.0]])


def clusters(generator: np.random.Generator, each: int = 300) -> np.ndarray:
    return np.concatenate([size * np.exp(generator.normal(0, 0.05, (each, 2))) for size in PLANTED])


def test_overlaps_are_those_of_the_loss() -> None:
    generator = np.random.default_rng(0)
    sizes, anchors = generator.uniform(1, 300, (CHUNK + 7, 2)), generator.uniform(1, 300, (5, 2))
    reference = wh_iou(torch.from_numpy(sizes), torch.from_numpy(anchors))
    np.testing.assert_allclose(best_overlaps(sizes, anchors), reference.max(1).values, rtol=1e-9)
    assert (nearest_anchors(sizes, anchors) == reference.argmax(1).numpy()).all()
    assert recall(sizes, anchors, 0.5) == pytest.approx(float((reference.max(1).values > 0.5).double().mean()))


def test_a_box_of_an_anchors_size_overlaps_it_wholly_and_nothing_is_recalled_of_nothing() -> None:
    assert best_overlaps(PLANTED, PLANTED).tolist() == pytest.approx([1] * 4)
    assert np.isnan(recall(np.zeros((0, 2)), PLANTED, 0.2))


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_planted_sizes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    found = kmeans_anchors(clusters(generator), 4, generator)
    expected = PLANTED[np.argsort(PLANTED.prod(1))]
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_refinement_never_loses_and_recovers_from_a_bad_start() -> None:
    generator = np.random.default_rng(1)
    sizes = clusters(generator)
    start = PLANTED * [[1.5, 0.7]]
    seen: list[float] = []
    found = refine_anchors(sizes, start, 600, generator, lambda _, fitness: seen.append(fitness))
    assert seen == sorted(seen) and len(seen) == 600
    assert best_overlaps(sizes, found).mean() == pytest.approx(seen[-1])
    assert best_overlaps(sizes, found).mean() > 0.92 > best_overlaps(sizes, start).mean()
    assert (np.diff(found.prod(1)) >= 0).all()


def test_too_few_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="different box sizes"):
        kmeans_anchors(np.ones((50, 2)), 2, np.random.default_rng(0))


def test_sizes_are_those_of_the_letterboxed_images(coco_set: CocoSet) -> None:
    coco_set.json["annotations"][-1]["iscrowd"] = 1
    annotations = coco_set.open()
    expected = []
    for i, (height, width) in enumerate(annotations.sizes.tolist()):
        rows = slice(annotations.offsets[i], annotations.offsets[i + 1])
        for (_, _, w, h), crowd in zip(annotations.boxes_xywh[rows].tolist(), annotations.crowd[rows], strict=True):
            if not crowd:
                expected.append((w * 320 / max(height, width), h * 320 / max(height, width)))
    assert len(expected) == len(annotations.classes) - 1
    np.testing.assert_allclose(network_sizes(annotations, 320), expected)
