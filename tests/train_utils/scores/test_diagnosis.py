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
    errors_on = [diagnosis.errors_on(image) for image in range(len(truth.image_ids))]
    right, false, missed = (sum(map(len, kind)) for kind in zip(*errors_on, strict=True))
    assert right / (right + false) == pytest.approx(best["precision"])
    assert right / (right + missed) == pytest.approx(best["recall"])

    # Reasons by image against the counts of TIDE for the reported detections.
    reported = found[found["score"] >= diagnosis.threshold]
    evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, reported))
    counted = evaluation.tide_errors(pos_thr=0.5, bg_thr=0.1)["counts"]
    reasons = Counter(
        KINDS[diagnosis.why_false(image, row).rpartition(": ")[2].split()[0]]
        for image, errors in enumerate(errors_on)
        for row in errors.false
    )
    assert {kind: reasons[kind] for kind in KINDS.values()} == {kind: counted[kind] for kind in KINDS.values()}

    labels = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    assert np.array_equal(diagnosis.confusion["matrix"][:-1].sum(1), labels), "each label is in one cell of its row"
    for image, errors in enumerate(errors_on):
        assert (errors.false["image_id"] == truth.image_ids[image]).all()
        assert (truth.image_of_box[errors.missed] == image).all() and not truth.crowd[errors.missed].any()
    for kind, counts in (("fp", [len(e.false) for e in errors_on]), ("fn", [len(e.missed) for e in errors_on])):
        worst = diagnosis.worst(kind)
        assert [counts[image] for image in worst] == sorted(filter(None, counts), reverse=True)
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
        float(reason.rpartition(" at ")[2])
        for image in diagnosis.worst("fn")
        for reason in map(diagnosis.why_missed, diagnosis.errors_on(image).missed)
        if " at " in reason
    }
    assert len(low) > 5 and max(low) < diagnosis.threshold + 0.005
    # Sure detections without a label, and those of another class than their label.
    suspects = diagnosis.suspects()
    assert {suspect.label is None for suspect in suspects} == {True, False}
    labels = [suspect.label for suspect in suspects if suspect.label is not None]
    assert len(labels) == len(set(labels)), "a label is suspected once"
    for suspect, next_one in zip(suspects, [*suspects[1:], suspects[-1]], strict=True):
        assert suspect.detection["image_id"] == truth.image_ids[suspect.image]
        assert suspect.detection["score"] >= next_one.detection["score"] >= 0.5
        if suspect.label is not None:
            assert truth.image_of_box[suspect.label] == suspect.image
            assert truth.classes[suspect.label] != suspect.detection["class"]


def test_scores_of_another_scale_have_no_calibration_but_the_same_errors() -> None:
    truth, found = draw(1)
    expected, found["score"] = diagnose(truth, found), found["score"] * 64
    diagnosis = diagnose(truth, found)
    assert diagnosis.calibration is None and diagnosis.threshold == 64 * expected.threshold
    assert np.array_equal(diagnosis.confusion["matrix"], expected.confusion["matrix"])


def test_nothing_found_and_nothing_labelled() -> None:
    truth, found = draw(1)
    diagnosis = diagnose(truth, found[:0])
    assert diagnosis.threshold == USUAL_THRESHOLD and not diagnosis.suspects()
    labels = int((~truth.crowd.astype(bool)).sum())
    missed = sum(len(diagnosis.errors_on(image).missed) for image in diagnosis.worst("fn"))
    assert missed == labels == diagnosis.confusion["matrix"].sum()
    assert diagnosis.precision.max() == 0
