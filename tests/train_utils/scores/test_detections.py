"""Detections as arrays: their order and wire format."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train_utils.coco_sets import draw
from train_utils.detections import DETECTION, PACKED, Detections, canonical_order, make_detections, pack, unpack


def sorted_by_columns(detections: Detections) -> list[tuple[object, ...]]:
    """The order by its definition, in plain Python."""
    rows = [(image_id, -score, cls, *box, score) for image_id, cls, score, box in detections.tolist()]
    return sorted(rows, key=lambda row: row[:-1])


def as_rows(detections: Detections) -> list[tuple[object, ...]]:
    return [(image_id, -score, cls, *box, score) for image_id, cls, score, box in detections.tolist()]


@pytest.mark.parametrize("image_ids", ["drawn", "one", "far apart", "negative"])
def test_canonical_order_is_that_of_the_columns(image_ids: str) -> None:
    rng = np.random.default_rng(3)
    found = np.concatenate([draw(seed)[1] for seed in range(3)])
    found["score"][::7] = rng.normal(0, 1, len(found[::7]))  # also negative ones
    found["score"][::11] = np.where(rng.random(len(found[::11])) < 0.5, -0.0, 0.0)
    found = np.concatenate([found, found[::5]])  # identical rows
    if image_ids != "drawn":
        choices = {"one": [7], "far apart": [0, 2**40], "negative": [-5, 3]}
        found["image_id"] = rng.choice(choices[image_ids], len(found))
    found = rng.permutation(found)
    before = found.copy()
    assert as_rows(canonical_order(found)) == sorted_by_columns(found)
    assert np.array_equal(found, before), "its argument was changed"


def test_canonical_order_of_nothing_and_of_one() -> None:
    _, found = draw()
    assert len(canonical_order(found[:0])) == 0
    assert np.array_equal(canonical_order(found[:1]), found[:1])


def test_what_travels_arrives_to_the_last_bit_in_26_bytes() -> None:
    truth, found = draw()
    at_positions = found.copy()
    at_positions["image_id"] = np.argsort(truth.image_ids)[np.searchsorted(np.sort(truth.image_ids), found["image_id"])]
    packed = pack(at_positions)
    assert packed.dtype == PACKED and packed.nbytes == 26 * len(found)
    arrived = unpack(np.frombuffer(packed.tobytes(), PACKED), truth.image_ids)
    assert arrived.dtype == DETECTION and np.array_equal(arrived, found)
    assert len(unpack(pack(at_positions[:0]), truth.image_ids)) == 0


def test_positions_and_classes_up_to_what_the_bytes_hold() -> None:
    found = np.zeros(2, DETECTION)
    found["image_id"], found["class"] = [0, 69_999], [0, 2**16 - 1]
    arrived = unpack(pack(found), np.arange(70_000) + 10**12)
    assert arrived["image_id"].tolist() == [10**12, 10**12 + 69_999]
    assert arrived["class"].tolist() == [0, 2**16 - 1]


def test_make_detections_keeps_original_pixels() -> None:
    detections = make_detections(7, np.array([1]), np.array([0.25]), np.array([[1.5, 2, 4, 8.25]]))
    assert detections.tolist()[0][:3] == (7, 1, 0.25)
    assert detections["box_xywh"].tolist() == [[1.5, 2.0, 2.5, 6.25]]


def test_ground_truth_knows_the_image_of_each_box() -> None:
    truth, _ = draw()
    for image in range(len(truth.image_ids)):
        mine = np.flatnonzero(truth.image_of_box == image)
        assert mine.tolist() == list(range(truth.offsets[image], truth.offsets[image + 1]))
