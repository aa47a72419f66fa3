"""The curves against COCOeval's own matches, and the best threshold against trying all of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.train_utils.coco_sets import CATEGORY_IDS, NAMES, draw, write_coco
from train_utils.curves import ClassCurve, class_curves, pooled_curve
from train_utils.detections import Detections, GroundTruth, make_detections, to_coco_json


def matches_of_pycocotools(
    truth: GroundTruth, found: Detections, folder: Path
) -> dict[int, tuple[int, list[tuple[float, bool]]]]:
    """Per class: number of counted boxes, and score and correctness of counted detections."""
    write_coco(truth, folder / "truth.json")
    (folder / "results.json").write_text(json.dumps(to_coco_json(found, CATEGORY_IDS)))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(folder / "truth.json"))
        evaluation = COCOeval(coco, coco.loadRes(str(folder / "results.json")), "bbox")
        evaluation.evaluate()
    rows: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    boxes: dict[int, int] = defaultdict(int)
    for image in evaluation.evalImgs:
        if image is None or image["aRng"] != [0, 1e10]:
            continue
        cls = CATEGORY_IDS.index(image["category_id"])
        boxes[cls] += int((np.asarray(image["gtIgnore"]) == 0).sum())
        for score, match, ignored in zip(image["dtScores"], image["dtMatches"][0], image["dtIgnore"][0], strict=True):
            if not ignored:
                rows[cls].append((score, match > 0))
    return {cls: (boxes[cls], rows[cls]) for cls in range(len(NAMES))}


@pytest.mark.parametrize("seed", range(8))
def test_every_point_and_the_best_one_by_brute_force(seed: int, tmp_path: Path) -> None:
    truth, found = draw(seed, images=12 + 5 * seed)
    if seed % 2:  # scores that differ: a threshold of its own for each detection
        found["score"] = np.random.default_rng(seed).random(len(found))
    if seed == 6:
        truth = replace(truth, areas=np.where(truth.image_of_box == 4, 2e10, truth.areas))
        found["box_xywh"][:7, 2:] = 2e5
    expected = matches_of_pycocotools(truth, found, tmp_path)
    seen = 0
    for cls, curve in enumerate(class_curves(truth, np.random.default_rng(0).permutation(found))):
        boxes, rows = expected[cls]
        assert curve.boxes == boxes
        if boxes == 0:
            assert not curve.thresholds.size and curve.best() is None
            continue
        candidates = []
        for threshold in sorted({score for score, _ in rows}, reverse=True):
            right = sum(is_right for score, is_right in rows if score >= threshold)
            reported = sum(score >= threshold for score, _ in rows)
            f1 = 2 * right / (reported + boxes)
            candidates.append((threshold, right / reported, right / boxes, f1))
        ours = zip(curve.thresholds.tolist(), curve.precision, curve.recall, curve.f1, strict=True)
        assert [row[:3] for row in map(tuple, ours)] == [row[:3] for row in candidates]
        assert curve.f1 == pytest.approx([row[3] for row in candidates], rel=1e-12)
        best = curve.best()
        assert best is not None
        assert best["f1"] == pytest.approx(max(row[3] for row in candidates), rel=1e-12)
        assert (best["threshold"], best["precision"], best["recall"]) in [row[:3] for row in candidates]
        seen += 1
    assert seen >= 2


def test_of_equal_f1_the_highest_threshold() -> None:
    curve = ClassCurve(4, np.array([0.9, 0.5, 0.1], np.float32), np.array([1.0, 0.6, 0.3]), np.array([0.5, 0.75, 0.75]))
    best = curve.best()
    assert best == {"threshold": pytest.approx(0.9), "f1": pytest.approx(2 / 3), "precision": 1.0, "recall": 0.5}


def test_no_detections_none_right_and_no_ground_truth() -> None:
    truth, found = draw()
    assert all(curve.best() is None for curve in class_curves(truth, found[:0]))
    wrong = make_detections(int(truth.image_ids[0]), np.array([0]), np.array([0.5]), np.array([[490.0, 490, 491, 491]]))
    curve = class_curves(truth, wrong)[0]
    assert (curve.precision.tolist(), curve.recall.tolist(), curve.best()) == ([0.0], [0.0], None)


@pytest.mark.parametrize("seed", range(3))
def test_the_pooled_curve_counts_the_detections_of_all_classes(seed: int, tmp_path: Path) -> None:
    truth, found = draw(seed, images=20)
    per_class = matches_of_pycocotools(truth, found, tmp_path).values()
    boxes, rows = sum(count for count, _ in per_class), [row for _, of_class in per_class for row in of_class]
    curve = pooled_curve(truth, found)
    assert curve.boxes == boxes
    for threshold, precision, recall in zip(curve.thresholds.tolist(), curve.precision, curve.recall, strict=True):
        right = sum(is_right for score, is_right in rows if score >= threshold)
        assert precision == right / sum(score >= threshold for score, _ in rows) and recall == right / boxes
