"""The figures against plain pycocotools on files, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.train_utils.coco_sets import CATEGORY_IDS, NAMES, draw, plain_pycocotools, write_coco
from train_utils.coco_eval import ABSENT, COMPUTE, FIGURES, OPERATING_POINT, PER_CLASS, format_table, score
from train_utils.detections import DETECTION, GroundTruth, canonical_order, to_coco_json


@pytest.fixture(params=list(COMPUTE))
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


def test_perfect_detections_score_one(backend: str) -> None:
    truth, _ = draw()
    keep = ~truth.crowd
    image_ids = np.repeat(truth.image_ids, np.diff(truth.offsets))
    detections = np.zeros(int(keep.sum()), dtype=DETECTION)
    detections["image_id"], detections["class"] = image_ids[keep], truth.classes[keep]
    detections["box_xywh"], detections["score"] = truth.boxes_xywh[keep], 0.9
    figures = score(truth, detections, backend).figures
    assert {name: figures[name] for name in ("AP", "AP50", "AR100")} == {"AP": 1.0, "AP50": 1.0, "AR100": 1.0}


def test_no_detections_at_all(backend: str) -> None:
    truth, detections = draw()
    result = score(truth, detections[:0], backend)
    assert result.figures == dict.fromkeys(FIGURES, 0.0)
    assert result.per_class["cell"]["AP"] == 0.0


def test_what_has_no_ground_truth_is_absent_not_zero(backend: str) -> None:
    truth, detections = draw()
    result = score(truth, detections, backend)
    for name in ("no boxes", "crowd only"):
        assert result.per_class[name] == dict.fromkeys(PER_CLASS, ABSENT) | {"images": 0, "boxes": 0}
    small = GroundTruth(**(vars(truth) | {"areas": np.full(len(truth.classes), 10.0)}))
    figures = score(small, detections[:0], backend).figures
    assert (figures["APs"], figures["APm"], figures["ARl"]) == (0.0, ABSENT, ABSENT)


def test_counts_of_the_table(backend: str) -> None:
    truth, detections = draw()
    rows = score(truth, detections, backend).per_class
    images = np.repeat(np.arange(12), np.diff(truth.offsets))
    cells = (truth.classes == 0) & ~truth.crowd
    assert (rows["cell"]["boxes"], rows["cell"]["images"]) == (cells.sum(), len(set(images[cells].tolist())))


def test_silent(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    score(*draw(), backend)
    assert capfd.readouterr() == ("", "")


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


def test_table_with_operating_points() -> None:
    result = score(*draw(), "pycocotools")
    for row in result.per_class.values():
        row.update(dict.fromkeys(OPERATING_POINT, ABSENT))
    result.per_class["cell"] |= {"threshold": 0.25, "f1": 0.5, "precision": 0.75, "recall": 0.375}
    lines = format_table(result).splitlines()
    assert lines[3].split()[-4:] == ["threshold", "f1", "precision", "recall"]
    assert lines[4].split()[-4:] == ["0.250", "0.500", "0.750", "0.375"]
    assert lines[7].split()[-4:] == ["-"] * 4
    assert len({len(line) for line in lines[3:8]}) == 1, "columns are not aligned"
