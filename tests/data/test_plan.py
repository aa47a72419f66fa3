"""Fast samples against plain ones, boxes against pixels, and what plans are drawn from."""

from dataclasses import replace

import numpy as np
import pytest

from data import AugmentConfig, Request, TrainDataset
from data.geometry import project
from data.plan import draw_plan, snapped
from tests.data.conftest import NO_AUGMENT, CocoSet
from tests.data.reference_path import reference_sample

MOSAIC = replace(NO_AUGMENT, mosaic=1, scale=0.5, translate=0.1, flip_horizontal=0.5, flip_vertical=0.5)
PLANS = {
    "mosaic of four": MOSAIC,
    "mixture": replace(MOSAIC, mixup=1),
    "turned": replace(MOSAIC, degrees=20, shear=5),
    "colour": replace(MOSAIC, hsv_hue=0.1, hsv_saturation=0.7, hsv_value=0.4),
    "single": replace(MOSAIC, mosaic=0),
}


def smooth_set(coco_set: CocoSet) -> CocoSet:
    """Larger images with soft gradients: where two ways of sampling must agree."""
    generator = np.random.default_rng(3)
    for _ in range(6):
        height, width = (int(side) for side in generator.integers(90, 260, 2))
        y, x = np.mgrid[:height, :width]
        planes = [127 + 120 * np.sin(x * f + y * g) for f, g in generator.uniform(-0.03, 0.03, (3, 2))]
        box = [float(v) for v in (*generator.uniform(5, 30, 2), *generator.uniform(20, 50, 2))]
        coco_set.add_image(np.stack(planes, axis=2).astype(np.uint8), [(1, box)])
    return coco_set


@pytest.mark.parametrize("augment", PLANS.values(), ids=PLANS.keys())
def test_the_fast_way_draws_what_the_plain_way_draws(empty_set: CocoSet, augment: AugmentConfig) -> None:
    images = smooth_set(empty_set).source()
    dataset = TrainDataset(images.annotations, images, augment, seed=1, epochs=1000)
    differences = []
    for index in range(len(images.annotations)):
        for epoch in range(3):
            request = Request(index, 128, 160, epoch, pool=tuple(range(len(images.annotations))))
            sample = dataset.__getitems__([request])
            image, classes, boxes = reference_sample(dataset.plan(request), images.annotations, images.read)
            drawn = sample.images[0].permute(1, 2, 0).numpy()
            differences.append(np.abs(drawn.astype(float) - image).mean())
            found = sample.targets.numpy()
            assert found[:, 1].astype(int).tolist() == classes.tolist()
            corners = np.concatenate([found[:, 2:4] - found[:, 4:] / 2, found[:, 2:4] + found[:, 4:] / 2], axis=1)
            np.testing.assert_allclose(corners, boxes.reshape(-1, 4), atol=0.01)
    assert np.mean(differences) < 1.0 and max(differences) < 1.5  # in grey levels, seams of small tiles included


def test_boxes_lie_where_their_pixels_lie(empty_set: CocoSet) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255)]
    generator = np.random.default_rng(0)
    empty_set.json["categories"] = [{"id": i, "name": str(i)} for i in range(len(colours))]
    for number, colour in enumerate(colours):
        height, width = (int(side) for side in generator.integers(150, 400, 2))
        x, y = int(generator.integers(0, width // 2)), int(generator.integers(0, height // 2))
        w, h = width // 3, height // 3
        image = np.zeros((height, width, 3), dtype=np.uint8)
        image[y : y + h, x : x + w] = colour
        empty_set.add_image(image, [(number, [float(x), float(y), float(w), float(h)])])
    images = empty_set.source()
    dataset = TrainDataset(images.annotations, images, MOSAIC, seed=0, epochs=1000)
    seen = 0
    for epoch in range(20):
        request = Request(epoch % len(colours), 320, 416, epoch, pool=tuple(range(len(colours))))
        (picture,) = dataset.plan(request).pictures
        sample = dataset.__getitems__([request])
        image = sample.images[0].permute(1, 2, 0).numpy().astype(int)
        rows = sample.targets.numpy()
        for _, number, cx, cy, w, h in rows:
            if sum(placed.position == number for placed in picture.placed) > 1 or min(w, h) < 6:
                continue  # the same image twice: its pixels are no longer those of one box
            close = (np.abs(image - colours[int(number)]) <= 127).all(axis=2)
            ys, xs = np.flatnonzero(close.any(axis=1)), np.flatnonzero(close.any(axis=0))
            extent = np.array([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1])
            assert np.abs(extent - [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]).max() <= 1.01, (epoch, number)
            seen += 1
    assert seen > 10


def test_the_partners_from_a_pool_are_distinct_and_others() -> None:
    sizes = np.full((9, 2), 64, dtype=np.int32)
    requests = [Request(3, 64, 64, epoch, pool=(1, 3, 4, 6, 7)) for epoch in range(60)]
    plans = [draw_plan(request, sizes, PLANS["mixture"], 0) for request in requests]
    first = [[placed.position for placed in plan.pictures[0].placed] for plan in plans]
    assert all(len(set(indices)) == 4 for indices in first)
    assert {index for indices in first for index in indices[1:]} == {1, 4, 6, 7}, "each is drawn at some time"
    assert {plan.pictures[1].placed[0].position for plan in plans} == {1, 4, 6, 7}


def test_mosaics_meet_anywhere_within_half_a_sample_of_its_centre() -> None:
    sizes = np.full((9, 2), 64, dtype=np.int32)
    plans = [draw_plan(Request(0, 200, 100, epoch), sizes, replace(NO_AUGMENT, mosaic=1), 0) for epoch in range(1500)]
    points = np.array([plan.pictures[0].placed[3].corner for plan in plans])  # that of the lower right image
    assert np.abs(points.min(axis=0) - [-50, -100]).max() <= 2 and np.abs(points.max(axis=0) - [50, 100]).max() <= 2
    assert np.abs(points.mean(axis=0)).max() < 6


@pytest.mark.parametrize("factor", [0.05, -0.7, 1.3])
def test_an_upright_picture_begins_and_ends_on_whole_pixels_and_never_vanishes(factor: float) -> None:
    matrix, ends = np.array([[factor, 0, 0.3], [0, -factor, 7.8], [0, 0, 1]]), np.array([[-4, 2], [5, 9]])
    before, after = project(ends, matrix), project(ends, snapped(matrix, *ends.tolist()))
    assert np.allclose(after, after.round()) and np.abs(after - before).max() < 1.5
    assert (after[0] != after[1]).all()


def test_short_trainings_keep_most_of_their_mosaics() -> None:
    augment = replace(MOSAIC, close_mosaic_epochs=10)
    assert [augment.plain_epochs(epochs) for epochs in (300, 40, 10, 1)] == [10, 10, 2, 0]


def test_the_shares_of_mixup_follow_their_beta_distribution() -> None:
    sizes = np.full((10, 2), 64, dtype=np.int32)
    augment = replace(PLANS["colour"], mixup=1)
    plans = [draw_plan(Request(number % 10, 64, 64, number), sizes, augment, 0) for number in range(2000)]
    assert np.ptp([plan.gains for plan in plans], axis=0) / 2 == pytest.approx([0.1, 0.7, 0.4], rel=0.01)
    shares = np.array([plan.share for plan in plans])
    variance = 1 / (4 * (2 * 32 + 1))  # of Beta(32, 32)
    assert abs(shares.mean() - 0.5) < 4 * (variance / len(shares)) ** 0.5
    assert shares.var() == pytest.approx(variance, rel=0.15)
    assert not any(len(plan.pictures) == 1 for plan in plans)
