"""Errors on images are those that hotcoco counts, and its counts are those of pycocotools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.train_utils.coco_sets import coco128, draw, many_classes
from train_utils.scores.coco_backends import columns, curves, hotcoco_evaluation
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.diagnosis import USUAL_THRESHOLD, Diagnosis, diagnose
from train_utils.scores.operating_points import pooled_curve

KINDS = {"twice": "Dupe", "overlap": "Loc", "is": "Cls", "near": "Both", "nothing": "Bkg"}


def check(truth: GroundTruth, found: Detections) -> Diagnosis:
    """Whatever is said twice is said alike."""
    diagnosis = diagnose(truth, np.random.default_rng(0).permutation(found))
    assert np.array_equal(diagnosis.precision, curves(truth, found, "pycocotools").precision[..., 0, 2])

    best = pooled_curve(truth, found).best()
    assert best is not None and diagnosis.threshold == best["threshold"]
    right = sum(len(errors.right) for errors in diagnosis.images)
    false = sum(len(errors.false) for errors in diagnosis.images)
    missed = sum(len(errors.missed) for errors in diagnosis.images)
    assert right / (right + false) == pytest.approx(best["precision"])
    assert right / (right + missed) == pytest.approx(best["recall"])

    # Reasons by image against the counts of TIDE for the reported detections.
    reported = found[found["score"] >= diagnosis.threshold]
    evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, reported))
    counted = evaluation.tide_errors(pos_thr=0.5, bg_thr=0.1)["counts"]
    reasons = Counter(
        KINDS[reason.rpartition(": ")[2].split()[0]] for errors in diagnosis.images for reason in errors.false_reasons
    )
    assert {kind: reasons[kind] for kind in KINDS.values()} == {kind: counted[kind] for kind in KINDS.values()}

    labels = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    assert np.array_equal(diagnosis.confusion[:-1].sum(1), labels), "each label is in one cell of its row"
    for errors in diagnosis.images:
        assert (errors.false["image_id"] == truth.image_ids[errors.image]).all()
        assert (truth.image_of_box[errors.missed] == errors.image).all() and not truth.crowd[errors.missed].any()
        assert len(errors.false_reasons) == len(errors.false) and len(errors.missed_reasons) == len(errors.missed)
    return diagnosis


@pytest.mark.parametrize("seed", range(6))
def test_drawn_sets_with_crowds_ties_and_duplicates(seed: int) -> None:
    check(*draw(seed, images=10 + 4 * seed))


def test_many_classes_and_photographs(shared_dir: Path) -> None:
    check(*many_classes(20))
    truth, found = coco128(shared_dir)
    diagnosis = check(truth, found)
    # A label that is found below the threshold says so, with the score.
    low = {
        float(reason.rpartition(" ")[2])
        for errors in diagnosis.images
        for reason in errors.missed_reasons
        if "at" in reason.split()
    }
    assert len(low) > 5 and max(low) < diagnosis.threshold + 0.005
    # Sure detections without a label, and those of another class than their label.
    for suspect in diagnosis.suspects:
        assert suspect["detection"]["image_id"] == truth.image_ids[suspect["image"]]
        assert (
            suspect["dt_score"] == pytest.approx(suspect["detection"]["score"])
            and suspect["dt_score"] >= diagnosis.threshold
        )
        if suspect["gt_id"] is not None:
            row = suspect["gt_id"] - 1
            assert truth.image_of_box[row] == suspect["image"]
            assert truth.classes[row] == suspect["gt_category_id"] - 1 != suspect["detection"]["class"]
    assert {suspect["type"] for suspect in diagnosis.suspects} == {"missing_annotation", "wrong_label"}


def test_scores_of_another_scale_have_no_calibration_but_the_same_errors() -> None:
    truth, found = draw(1)
    expected, found["score"] = diagnose(truth, found), found["score"] * 64
    diagnosis = diagnose(truth, found)
    assert diagnosis.calibration is None and diagnosis.threshold == 64 * expected.threshold
    assert np.array_equal(diagnosis.confusion, expected.confusion)


def test_nothing_found_and_nothing_labelled() -> None:
    truth, found = draw(1)
    diagnosis = diagnose(truth, found[:0])
    assert diagnosis.threshold == USUAL_THRESHOLD and not diagnosis.suspects
    labels = int((~truth.crowd.astype(bool)).sum())
    assert sum(len(errors.missed) for errors in diagnosis.images) == labels == diagnosis.confusion.sum()
    assert diagnosis.precision.max() == 0
