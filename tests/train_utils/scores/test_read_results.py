"""Results files of other systems: figures equal plain pycocotools on the files, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train_utils.coco_sets import CATEGORY_IDS, draw, plain_pycocotools, write_coco
from train_utils.coco_eval import COMPUTE, FIGURES, score
from train_utils.curves import class_curves
from train_utils.detections import DETECTION, GroundTruth, read_results
from train_utils.errors import TrainError

Row = dict[str, Any]


def drawn(seed: int) -> tuple[GroundTruth, list[Row]]:
    """Numbers with all their digits, in no order, with many equal scores."""
    truth, found = draw(seed)
    rng = np.random.default_rng(seed)
    rows = [
        {
            "image_id": int(row["image_id"]),
            "category_id": CATEGORY_IDS[row["class"]],
            "bbox": (row["box_xywh"].astype(float) * (1 + 1e-9 * rng.random())).tolist(),
            "score": float(rng.integers(1, 9) / 10 if rng.random() < 0.5 else rng.random()),
        }
        for row in rng.permutation(found)
    ]
    return truth, rows


def other_categories(rows: list[Row]) -> None:
    for row in rows[::5]:
        row["category_id"] = 4


def floats_for_ids(rows: list[Row]) -> None:
    for row in rows[::2]:
        row["image_id"] = float(row["image_id"])
    for row in rows[::3]:
        row["category_id"] = float(row["category_id"])


def whole_numbers(rows: list[Row]) -> None:
    for row in rows:
        row["bbox"] = [round(value) for value in row["bbox"]]
        row["score"] = int(row["score"] * 1000)


def odd_boxes(rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        change = ([0, 0, -1, 0], [0, 0, 0, -1], [0, 0, 1e6, 1e6], [-3000, 0, 0, 0])[number % 4]
        if number % 3 == 0:
            row["bbox"] = [
                value * (1 + min(0, factor)) + factor for value, factor in zip(row["bbox"], change, strict=True)
            ]


def odd_scores(rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        row["score"] = (-row["score"], row["score"] * 1e5, 0.1, 0.1 + 1e-12, -0.0, 0)[number % 6]


def more_keys(rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        row |= {"id": 7, "area": 1, "iscrowd": number % 2, "file_name": "x.jpg", "segmentation": []}


def few(rows: list[Row]) -> None:
    del rows[1:]


CHANGES = [lambda rows: None, other_categories, floats_for_ids, whole_numbers, odd_scores, more_keys, few, odd_boxes]


@pytest.mark.parametrize("seed", range(len(CHANGES) + 4))
def test_figures_are_those_of_pycocotools_on_the_file(seed: int, tmp_path: Path) -> None:
    truth, rows = drawn(seed)
    write_coco(truth, tmp_path / "truth.json")
    CHANGES[seed % len(CHANGES)](rows)
    (tmp_path / "results.json").write_text(json.dumps(rows))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json").stats.tolist()
    found, ignored = read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    for backend in COMPUTE:
        assert list(score(truth, found, backend).figures.values()) == expected, backend
    assert len(class_curves(truth, found)) == len(truth.names)
    assert ignored == sum(row["category_id"] == 4 for row in rows)


def test_no_digit_is_lost(tmp_path: Path) -> None:
    """An overlap of exactly a half in the file's numbers is a match; in float32 it is less."""
    truth, _ = draw(0)
    box = np.array([0.1, 0.1, 20.2, 30.3])
    truth = GroundTruth(
        truth.image_ids[:1], truth.sizes[:1], np.array([0, 1]), box[None], np.zeros(1, int), np.zeros(1, bool),
        box[None, 2:].prod(1), truth.names,
    )  # fmt: skip
    write_coco(truth, tmp_path / "truth.json")
    rows = [{"image_id": int(truth.image_ids[0]), "category_id": 3, "bbox": [0.1, 0.1, 20.2, 15.15], "score": 0.5}]
    (tmp_path / "results.json").write_text(json.dumps(rows))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json").stats.tolist()
    found, _ = read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    for backend in COMPUTE:
        assert list(score(truth, found, backend).figures.values()) == expected, backend
    assert expected[1] > 0.99 and score(truth, found.astype(DETECTION)).figures["AP50"] == 0


def test_a_file_without_rows_scores_nothing(tmp_path: Path) -> None:
    truth, _ = draw(0)
    (tmp_path / "results.json").write_text("[]")
    found, _ = read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    for backend in COMPUTE:
        figures = score(truth, found, backend).figures
        assert set(figures.values()) == {0.0} and tuple(figures) == FIGURES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_id": 10**6}, "names image 1000000, which the data does not have. fix: the annotations"),
        ({"image_id": 1.5}, "names image 1.5, which the data does not have"),
        ({"bbox": [1, 2, 3]}, "cannot be read (ValueError: "),
        ({"bbox": [1, 2, 3, "a"]}, "cannot be read (ValueError: "),
        ({"score": "high"}, "cannot be read (ValueError: "),
        ({"score": ...}, "cannot be read (KeyError: 'score'). fix: a COCO results file"),
    ],
)
def test_a_wrong_row_is_an_error(change: Row, said: str, tmp_path: Path) -> None:
    truth, rows = drawn(0)
    rows[3] = {key: value for key, value in (rows[3] | change).items() if value is not ...}
    (tmp_path / "results.json").write_text(json.dumps(rows))
    with pytest.raises(TrainError) as error:
        read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"annotations": []}', "cannot be read (TypeError: "),
        ("[", "cannot be read (JSONDecodeError: Expecting value"),
        (None, "No such file or directory"),
        ('[{"image_id": 7, "category_id": 0, "bbox": [1, 2, 3, 4], "score": 1}]', "has none of its categories"),
    ],
)
def test_what_is_no_results_file_is_one_sentence(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(TrainError) as error:
        read_results(tmp_path / "results.json", np.array([7]), CATEGORY_IDS)
    assert said in str(error.value) and "\n" not in str(error.value)
