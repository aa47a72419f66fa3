"""The figures against plain pycocotools on files, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from train_utils.coco_eval import (
    ABSENT,
    DETECTION,
    FIGURES,
    Detections,
    GroundTruth,
    canonical_order,
    format_table,
    make_detections,
    score,
    to_coco_json,
)

CATEGORY_IDS = [3, 7, 8, 90]  # with gaps, as in COCO
NAMES = ["cell", "dog", "no boxes", "crowd only"]


def draw(seed: int = 0, images: int = 12) -> tuple[GroundTruth, Detections]:
    """Boxes of all sizes with crowds and mask areas; detections near them, with ties, duplicates, > 100 on an image."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, images)
    counts[3] = 0
    total = int(counts.sum())
    classes = rng.choice([0, 1, 3], total, p=[0.6, 0.3, 0.1])
    boxes = np.concatenate([rng.uniform(0, 300, (total, 2)), rng.uniform(5, 200, (total, 2))], axis=1).round(2)
    truth = GroundTruth(
        image_ids=rng.permutation(1000)[:images],
        sizes=np.full((images, 2), 500),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes_xywh=boxes,
        classes=classes,
        crowd=(classes == 3) | (rng.random(total) < 0.1),
        areas=boxes[:, 2] * boxes[:, 3] * rng.uniform(0.4, 1, total),
        names=NAMES,
    )
    found = []
    for image, image_id in enumerate(truth.image_ids.tolist()):
        mine = slice(truth.offsets[image], truth.offsets[image + 1])
        near = np.repeat(truth.boxes_xywh[mine], 4, axis=0)
        far = rng.uniform(5, 200, (150 if image == 1 else 5, 4))
        xywh = np.concatenate([near * rng.normal(1, 0.06, near.shape), far])
        kinds = np.concatenate([np.repeat(truth.classes[mine], 4), rng.integers(0, 4, len(far))])
        scores = rng.integers(1, 20, len(xywh)) / 20  # many equal ones
        found.append(make_detections(image_id, kinds, scores, np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]]))
    return truth, np.concatenate(found)


def write_coco(truth: GroundTruth, path: Path) -> None:
    image_ids = np.repeat(truth.image_ids, np.diff(truth.offsets))
    annotations = [
        {
            "id": number + 1,
            "image_id": int(image_ids[number]),
            "category_id": CATEGORY_IDS[truth.classes[number]],
            "bbox": truth.boxes_xywh[number].tolist(),
            "area": float(truth.areas[number]),
            "iscrowd": int(truth.crowd[number]),
        }
        for number in range(len(truth.classes))
    ]
    images = [{"id": int(image_id), "height": 500, "width": 500} for image_id in truth.image_ids]
    categories = [{"id": number, "name": name} for number, name in zip(CATEGORY_IDS, NAMES, strict=True)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


def plain_pycocotools(annotations: Path, results: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_to_pycocotools_on_files(seed: int, tmp_path: Path) -> None:
    truth, detections = draw(seed)
    write_coco(truth, tmp_path / "truth.json")
    (tmp_path / "results.json").write_text(json.dumps(to_coco_json(detections, CATEGORY_IDS)))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json")
    result = score(truth, detections)
    assert list(result.figures.values()) == expected.stats.tolist()  # no tolerance
    assert 0.1 < result.figures["AP"] < 0.9
    for index, name in enumerate(NAMES):
        precision = expected.eval["precision"][:, :, index, 0, 2]
        for key, part in (("AP", precision), ("AP50", precision[0])):
            assert result.per_class[name][key] == (part.mean() if (part > -1).any() else ABSENT)


def test_the_order_of_detections_does_not_matter() -> None:
    truth, detections = draw()
    result = score(truth, detections)
    rng = np.random.default_rng(0)
    for _ in range(5):
        shuffled = rng.permutation(detections)
        assert np.array_equal(canonical_order(shuffled), canonical_order(detections))
        assert score(truth, shuffled) == result


def test_the_order_would_matter_without_sorting(tmp_path: Path) -> None:
    """The drawn ties are real: pycocotools' own figures move with the order of the file."""
    truth, detections = draw()
    write_coco(truth, tmp_path / "truth.json")
    figures = set()
    for seed in range(6):
        rows = to_coco_json(detections, CATEGORY_IDS)
        np.random.default_rng(seed).shuffle(rows)
        (tmp_path / "results.json").write_text(json.dumps(rows))
        figures.add(plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json").stats[0])
    assert len(figures) > 1


def test_perfect_detections_score_one() -> None:
    truth, _ = draw()
    keep = ~truth.crowd
    image_ids = np.repeat(truth.image_ids, np.diff(truth.offsets))
    detections = np.zeros(int(keep.sum()), dtype=DETECTION)
    detections["image_id"], detections["class"] = image_ids[keep], truth.classes[keep]
    detections["box_xywh"], detections["score"] = truth.boxes_xywh[keep], 0.9
    figures = score(truth, detections).figures
    assert {name: figures[name] for name in ("AP", "AP50", "AR100")} == {"AP": 1.0, "AP50": 1.0, "AR100": 1.0}


def test_no_detections_at_all() -> None:
    truth, detections = draw()
    result = score(truth, detections[:0])
    assert result.figures == dict.fromkeys(FIGURES, 0.0)
    assert result.per_class["cell"]["AP"] == 0.0


def test_what_has_no_ground_truth_is_absent_not_zero() -> None:
    truth, detections = draw()
    result = score(truth, detections)
    for name in ("no boxes", "crowd only"):
        assert result.per_class[name] == {"AP": ABSENT, "AP50": ABSENT, "images": 0, "boxes": 0}
    small = GroundTruth(**(vars(truth) | {"areas": np.full(len(truth.classes), 10.0)}))
    figures = score(small, detections[:0]).figures
    assert (figures["APs"], figures["APm"], figures["ARl"]) == (0.0, ABSENT, ABSENT)


def test_counts_of_the_table() -> None:
    truth, detections = draw()
    rows = score(truth, detections).per_class
    images = np.repeat(np.arange(12), np.diff(truth.offsets))
    cells = (truth.classes == 0) & ~truth.crowd
    assert (rows["cell"]["boxes"], rows["cell"]["images"]) == (cells.sum(), len(set(images[cells].tolist())))


def test_silent(capfd: pytest.CaptureFixture[str]) -> None:
    score(*draw())
    assert capfd.readouterr() == ("", "")


def test_table() -> None:
    truth, detections = draw()
    result = score(truth, detections)
    lines = format_table(result).splitlines()
    assert lines[0].split() == list(FIGURES)
    assert lines[1].split() == [f"{result.figures[name]:.3f}" for name in FIGURES]
    assert [line.split()[-4:] for line in lines[3:]] == [
        ["images", "boxes", "AP", "AP50"],
        *([f"{row['images']}", f"{row['boxes']}", *cells] for row, cells in zip(
            result.per_class.values(),
            [
                [f"{result.per_class['cell'][key]:.3f}" for key in ("AP", "AP50")],
                [f"{result.per_class['dog'][key]:.3f}" for key in ("AP", "AP50")],
                ["-", "-"],
                ["-", "-"],
            ],
            strict=True,
        )),
    ]  # fmt: skip


def test_make_detections_keeps_original_pixels() -> None:
    detections = make_detections(7, np.array([1]), np.array([0.25]), np.array([[1.5, 2, 4, 8.25]]))
    assert detections.tolist()[0][:3] == (7, 1, 0.25)
    assert detections["box_xywh"].tolist() == [[1.5, 2.0, 2.5, 6.25]]
