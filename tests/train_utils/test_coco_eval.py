"""Each library against plain pycocotools on files: whole arrays and figures, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.train_utils.coco_sets import (
    CATEGORY_IDS,
    NAMES,
    coco128_truth,
    draw,
    plain_pycocotools,
    write_coco,
)
from train_utils.coco_eval import (
    ABSENT,
    EVALUATIONS,
    FIGURES,
    PER_CLASS,
    accumulate,
    format_table,
    score,
    summarise,
)
from train_utils.detections import Detections, GroundTruth, canonical_order, make_detections, to_coco_json

Case = tuple[GroundTruth, Detections]


def assert_equal_to_pycocotools(case: Case, truth_file: Path, category_ids: list[int], folder: Path) -> np.ndarray:
    """Arrays and figures of all libraries; returns the figures."""
    truth, found = case
    (folder / "results.json").write_text(json.dumps(to_coco_json(found, category_ids)))
    expected = plain_pycocotools(truth_file, folder / "results.json")
    for backend in EVALUATIONS:
        precision, recall = accumulate(truth, np.random.default_rng(0).permutation(found), backend)
        assert np.array_equal(precision, expected.eval["precision"]), backend
        assert np.array_equal(recall, expected.eval["recall"]), backend
        assert summarise(precision, recall) == expected.stats.tolist(), backend
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


def one_image_for_each_class() -> Case:
    """One box per class: precision of a right detection followed by a wrong one."""
    truth = GroundTruth(
        image_ids=np.array([9, 4, 7, 2]), sizes=np.full((4, 2), 500), offsets=np.arange(5),
        boxes_xywh=np.array([[10.0, 10, 30, 30]] * 4), classes=np.arange(4), crowd=np.zeros(4, bool),
        areas=np.full(4, 900.0), names=NAMES,
    )  # fmt: skip
    box = np.array([[10.0, 10, 40, 40], [200, 200, 240, 240]])
    return truth, np.concatenate(
        [
            make_detections(9, np.array([0, 0]), np.array([0.9, 0.8]), box),  # right, wrong
            make_detections(4, np.array([1, 1]), np.array([0.8, 0.9]), box),  # wrong, right
            make_detections(7, np.array([2, 2]), np.array([0.5, 0.5]), box),  # equal scores
        ]
    )


def huge() -> Case:
    """Boxes beyond the largest area that counts, and without any."""
    truth, found = changed_boxes(lambda boxes: boxes.__setitem__((slice(0, 3), slice(2, 4)), 2e5))
    found = found.copy()
    found["box_xywh"][:5, 2:] = 1e6
    found["box_xywh"][5:40:3, 2] = 0
    return replace(truth, areas=np.where(np.arange(len(truth.areas)) % 7 == 0, 0, truth.areas)), found


def repeated() -> Case:
    truth, found = draw(7)
    return truth, np.concatenate([found, found[::2], found[::3]])


def perfect_first() -> Case:
    """With more boxes than recalls are sampled, and the first detection alone right."""
    truth, found = draw(8, images=150)
    found = found.copy()
    order = np.argsort(-found["score"], kind="stable")
    found["score"][order] = np.linspace(0.99, 0.01, len(found))
    box = int(np.flatnonzero((truth.classes == 0) & ~truth.crowd)[0])
    image_id = int(truth.image_ids[truth.image_of_box[box]])
    x, y, width, height = truth.boxes_xywh[box]
    right = make_detections(image_id, np.array([0]), np.array([1.0]), np.array([[x, y, x + width, y + height]]))
    wrong = make_detections(image_id, np.array([0]), np.array([0.995]), np.array([[490.0, 490, 495, 495]]))
    return truth, np.concatenate([found, right, wrong])


CASES: dict[str, Callable[[], Case]] = {
    **{f"drawn {seed}": lambda seed=seed: draw(seed, images=10 + 4 * seed) for seed in range(12)},  # type: ignore[misc]
    "more than 100 of a class on an image": many_on_one_image,
    "one box of each class": one_image_for_each_class,
    "boxes without area": lambda: changed_boxes(lambda boxes: boxes.__setitem__((slice(0, 20, 2), 2), 0)),
    "huge boxes": huge,
    "detections twice and thrice": repeated,
    "right first, then wrong, among many boxes": perfect_first,
    "one score for all": lambda: _with_score(draw(9), 0.5),
    "score 0": lambda: _with_score(draw(9), 0.0),
    "no detections": lambda: (draw(0)[0], draw(0)[1][:0]),
    "nothing but crowds": lambda: (replace(draw(1)[0], crowd=np.ones(len(draw(1)[0].classes), bool)), draw(1)[1]),
    "no ground truth": lambda: _without_boxes(draw(2)),
    "neither": lambda: (_without_boxes(draw(2))[0], draw(2)[1][:0]),
}


def _with_score(case: Case, value: float) -> Case:
    case[1]["score"] = value
    return case


def _without_boxes(case: Case) -> Case:
    truth, found = case
    empty = {name: getattr(truth, name)[:0] for name in ("boxes_xywh", "classes", "crowd", "areas")}
    return replace(truth, offsets=np.zeros_like(truth.offsets), **empty), found


@pytest.mark.parametrize("case", CASES)
def test_arrays_and_figures_are_those_of_pycocotools(case: str, tmp_path: Path) -> None:
    drawn = CASES[case]()
    write_coco(drawn[0], tmp_path / "truth.json")
    if len(drawn[1]):
        assert_equal_to_pycocotools(drawn, tmp_path / "truth.json", CATEGORY_IDS, tmp_path)
        return
    # COCO.loadRes does not take an empty file.
    expected = accumulate(*drawn, "pycocotools")
    for backend in EVALUATIONS:
        for ours, theirs in zip(accumulate(*drawn, backend), expected, strict=True):
            assert np.array_equal(ours, theirs), backend


def test_coco128(shared_dir: Path, tmp_path: Path) -> None:
    """Real annotations with crowds, mask areas and gaps in category ids; detections nearby."""
    for split in ("train2017", "val2017"):
        path, truth, category_ids = coco128_truth(shared_dir, split)
        rng = np.random.default_rng(0)
        near = np.repeat(np.arange(len(truth.boxes_xywh)), 5)
        xywh = truth.boxes_xywh[near] * rng.normal(1, 0.07, (len(near), 4))
        classes = np.where(rng.random(len(near)) < 0.8, truth.classes[near], rng.integers(0, 80, len(near)))
        scores = rng.integers(1, 200, len(near)) / 200
        found = make_detections(0, classes, scores, np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]])
        found["image_id"] = truth.image_ids[truth.image_of_box[near]]
        figures = assert_equal_to_pycocotools((truth, found), path, category_ids, tmp_path)
        assert 0.1 < figures[0] < 0.9


@pytest.fixture(params=list(EVALUATIONS))
def backend(request: pytest.FixtureRequest) -> str:
    """Each library that is installed."""
    return str(request.param)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_to_pycocotools_on_files(backend: str, seed: int, tmp_path: Path) -> None:
    truth, detections = draw(seed)
    write_coco(truth, tmp_path / "truth.json")
    (tmp_path / "results.json").write_text(json.dumps(to_coco_json(detections, CATEGORY_IDS)))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json")
    result = score(truth, detections, backend)
    assert list(result.figures.values()) == expected.stats.tolist()  # no tolerance
    assert 0.1 < result.figures["AP"] < 0.9
    assert result.backend == backend
    for index, name in enumerate(NAMES):
        every, *sizes = (expected.eval["precision"][:, :, index, area, 2] for area in range(4))
        for key, part in zip(PER_CLASS, (every, every[0], *sizes), strict=True):
            assert result.per_class[name][key] == (part.mean() if (part > -1).any() else ABSENT)


def test_the_order_of_detections_does_not_matter(backend: str) -> None:
    truth, detections = draw()
    result = score(truth, detections, backend)
    rng = np.random.default_rng(0)
    for _ in range(5):
        shuffled = rng.permutation(detections)
        assert np.array_equal(canonical_order(shuffled), canonical_order(detections))
        assert score(truth, shuffled, backend) == result


def test_what_has_no_ground_truth_is_absent_not_zero(backend: str) -> None:
    truth, detections = draw()
    result = score(truth, detections, backend)
    for name in ("no boxes", "crowd only"):
        assert result.per_class[name] == dict.fromkeys(PER_CLASS, ABSENT) | {"images": 0, "boxes": 0}
    small = GroundTruth(**(vars(truth) | {"areas": np.full(len(truth.classes), 10.0)}))
    figures = score(small, detections[:0], backend).figures
    assert (figures["APs"], figures["APm"], figures["ARl"]) == (0.0, ABSENT, ABSENT)


def test_table() -> None:
    result = score(*draw(), "pycocotools")
    lines = format_table(result).splitlines()
    assert lines[0].split() == list(FIGURES)
    assert lines[1].split() == [f"{result.figures[name]:.3f}" for name in FIGURES]
    assert lines[3].split() == ["class", "images", "boxes", *PER_CLASS]
    for line, (name, row) in zip(lines[4:8], result.per_class.items(), strict=True):
        cells = ["-" if row[key] == ABSENT else f"{row[key]:.3f}" for key in PER_CLASS]
        assert line.split() == [*name.split(), f"{row['images']}", f"{row['boxes']}", *cells]
    assert lines[8:] == ["", "scored by pycocotools"]
