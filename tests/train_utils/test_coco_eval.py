"""Metrics and matches of both scorers against plain pycocotools on files, to the last bit."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hotcoco
import numpy as np
import pytest

from conf import ConfigError
from conf.schema import Scorer
from tests.train_utils.coco_sets import CATEGORY_IDS, draw, plain_pycocotools, write_coco
from train_utils import coco_eval
from train_utils.coco_eval import ABSENT, Matches, best_f1, choose_scorer, find_matches, match, score
from train_utils.results import Detections, GroundTruth, make_detections, to_coco_json

Case = tuple[GroundTruth, Detections]


@pytest.fixture(autouse=True, params=["hotcoco", "pycocotools"])
def scorer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pycocotools":
        monkeypatch.setitem(sys.modules, "hotcoco", None)
    return str(request.param)


def test_the_scorer_is_chosen_and_named(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert coco_eval.format_table(score(*draw())).startswith(f"scored by {scorer} ")
    assert choose_scorer(Scorer.auto) == choose_scorer(Scorer(scorer)) != "hotcoco"
    assert choose_scorer(Scorer.pycocotools).startswith("pycocotools 2.")
    monkeypatch.setattr(hotcoco, "__version__", "1.4.0")
    assert choose_scorer(Scorer.auto).startswith("pycocotools 2.")
    with pytest.raises(ConfigError, match=r"^evaluate\.scorer=hotcoco needs .* fix: evaluate\.scorer=auto, or uv "):
        choose_scorer(Scorer.hotcoco)


def assert_equal_to_pycocotools(case: Case, truth_file: Path, category_ids: list[int], folder: Path) -> np.ndarray:
    """Arrays, metrics, metrics of each class and matches; returns the metrics."""
    truth, found = case
    (folder / "results.json").write_text(json.dumps(to_coco_json(found, category_ids)))
    expected = plain_pycocotools(truth_file, folder / "results.json")
    found = np.random.default_rng(0).permutation(found)
    ours = match(truth, found)
    for key in ("precision", "recall"):
        assert np.array_equal(ours.eval[key], expected.eval[key]), key
    result = score(truth, found)
    assert list(result.metrics.values()) == expected.stats.tolist()
    for index, name in enumerate(truth.names):
        every, *sizes = (expected.eval["precision"][:, :, index, area, 2] for area in range(4))
        for key, part in zip(coco_eval.PER_CLASS, (every, every[0], *sizes), strict=True):
            assert result.per_class[name][key] == (part[part > -1].mean() if (part > -1).any() else ABSENT)
    for line, ids in zip(coco_eval.rows_of_classes(result)[1], [[], *category_ids], strict=True):  # no id: all
        labels = expected.cocoGt.loadAnns(expected.cocoGt.getAnnIds(catIds=ids, iscrowd=0))
        assert line[1:3] == [str(len({label["image_id"] for label in labels})), str(len(labels))]

    matches = find_matches(truth, found, ious=10)
    columns = matches.classes, matches.images, matches.scores, *matches.right, *matches.wrong
    image_ids, points, boxes = sorted(truth.image_ids.tolist()), [], np.zeros_like(matches.boxes)
    for pair in expected.evalImgs:
        if pair is None or pair["aRng"] != [0, 1e10]:
            continue
        at = category_ids.index(pair["category_id"]), image_ids.index(pair["image_id"])
        boxes[at] = (np.asarray(pair["gtIgnore"]) == 0).sum()
        matched, counts = pair["dtMatches"] > 0, ~np.asarray(pair["dtIgnore"], bool)
        rows = zip(pair["dtScores"], *(matched & counts), *(~matched & counts), strict=True)
        points += [(*at, *row) for row in rows]
    assert sorted(zip(*columns, strict=True)) == sorted(points) and np.array_equal(matches.boxes, boxes)
    return np.asarray(expected.stats)


def changed_boxes(change: Callable[[np.ndarray], None]) -> Case:
    truth, found = draw(5)
    boxes = truth.boxes_xywh.copy()
    change(boxes)
    return replace(truth, boxes_xywh=boxes), found


def many_on_one_image() -> Case:
    """More than 100 of one class on an image, most of them with one score."""
    truth, found = draw(6)
    rng = np.random.default_rng(6)
    low = rng.uniform(0, 300, (400, 2))
    high = low + rng.uniform(5, 200, (400, 2))
    scores = np.where(rng.random(400) < 0.8, 0.5, rng.random(400))
    more = make_detections(int(truth.image_ids[2]), np.zeros(400, int), scores, np.c_[low, high])
    return truth, np.concatenate([found, more])


def without_boxes(case: Case) -> Case:
    truth, found = case
    empty = {name: getattr(truth, name)[:0] for name in ("boxes_xywh", "classes", "crowd", "areas")}
    return replace(truth, offsets=np.zeros_like(truth.offsets), **empty), found


def with_one_score(case: Case) -> Case:
    case[1]["score"] = 0.5
    return case


CASES: dict[str, Callable[[], Case]] = {
    "drawn 0": draw,
    "drawn 1": lambda: draw(1, images=22),
    "drawn, more boxes than recalls are sampled": lambda: draw(8, images=150),
    "more than 100 of a class on an image": many_on_one_image,
    "boxes without area": lambda: changed_boxes(lambda boxes: boxes.__setitem__((slice(0, 20, 2), 2), 0)),
    "boxes beyond the largest area": lambda: changed_boxes(lambda boxes: boxes.__setitem__((slice(0, 3), 2), 1e10)),
    "one score for all": lambda: with_one_score(draw(9)),
    "nothing but crowds": lambda: (replace(draw(1)[0], crowd=np.ones(len(draw(1)[0].classes), bool)), draw(1)[1]),
    "no ground truth": lambda: without_boxes(draw(2)),
}


@pytest.mark.parametrize("case", CASES)
def test_all_is_as_in_pycocotools(case: str, tmp_path: Path) -> None:
    drawn = CASES[case]()
    write_coco(drawn[0], tmp_path / "truth.json")
    metrics = assert_equal_to_pycocotools(drawn, tmp_path / "truth.json", CATEGORY_IDS, tmp_path)
    assert not case.startswith("drawn") or 0.1 < metrics[0] < 0.9


def test_without_detections_and_without_ground_truth() -> None:
    """COCO.loadRes does not take an empty file."""
    truth, found = draw(0)
    unlabelled, _ = without_boxes((truth, found))
    result = score(truth, found[:0])
    assert set(result.metrics.values()) == {0.0} and tuple(result.metrics) == coco_eval.METRICS
    for case in (found, found[:0]):
        assert set(score(unlabelled, case).metrics.values()) == {ABSENT}
        assert best_f1(find_matches(unlabelled, case)) is None
    for name in ("no boxes", "crowd only"):
        absent = dict.fromkeys((*coco_eval.PER_CLASS, *coco_eval.OPERATING_POINT), ABSENT)
        assert result.per_class[name] == absent | {"images": 0, "boxes": 0}


@pytest.mark.parametrize("seed", range(4))
def test_the_best_f1_is_that_of_trying_all_thresholds(seed: int) -> None:
    truth, found = draw(seed, images=12 + 5 * seed)
    if seed % 2:  # scores that differ: a threshold of its own for each detection
        found["score"] = np.random.default_rng(seed).random(len(found))
    matches = find_matches(truth, found)
    for index in (None, 0, 1):
        of_class = np.full(len(matches.classes), True) if index is None else matches.classes == index
        boxes = int((matches.boxes if index is None else matches.boxes[index]).sum())
        candidates = []
        for threshold in set(matches.scores[of_class].tolist()):
            reported = of_class & (matches.scores >= threshold)
            right = int(matches.right[0, reported].sum())
            total = right + int(matches.wrong[0, reported].sum())
            candidates.append((2 * right / (total + boxes), threshold, right / total if total else 0.0, right / boxes))
        best = best_f1(matches, index)
        assert best is not None and tuple(best) == coco_eval.OPERATING_POINT
        assert best["f1"] == pytest.approx(max(candidates)[0], rel=1e-12)
        assert (best["threshold"], best["precision"], best["recall"]) in [row[1:] for row in candidates]


def test_of_equal_f1_the_highest_threshold_and_none_without_a_right_detection() -> None:
    scores, right = np.array([0.1, 0.9, 0.5, 0.7]), np.array([[True, True, False, False]])
    none = np.zeros(4, int)
    equal = Matches(none, none, scores, right, ~right, np.array([[2]]), none, none)
    assert best_f1(equal) == {"threshold": 0.9, "f1": 2 / 3, "precision": 1.0, "recall": 0.5}
    assert best_f1(equal._replace(right=right & False, wrong=right | True)) is None
