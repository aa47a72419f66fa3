"""Detections as arrays and as files, read back with the programs they are for."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.coco import COCO

from conf import TrainError
from data.validate import ids_by_name
from tests.train_utils.coco_sets import CATEGORY_IDS, draw, plain_pycocotools, write_coco
from train_utils import results
from train_utils.coco_eval import score

NAMES, IDS = ["cat", "dog", "bird"], [17, 18, 16]


def result(name: str, count: int, frame: int | None = None) -> results.ImageResult:
    generator = np.random.default_rng(count)
    low = generator.uniform(0, 100, (count, 2))
    boxes_xyxy = np.concatenate([low, low + generator.uniform(1, 100, (count, 2))], axis=1)
    scores = np.sort(generator.uniform(0, 1, count))[::-1]
    rows = results.make_detections(0, generator.integers(0, 3, count), scores, boxes_xyxy)
    return results.ImageResult(name, frame, (240, 320), rows)


def test_pycocotools_loads_the_results_against_their_images(tmp_path: Path) -> None:
    made = [result("b/two.jpg", 3), result("a/one.jpg", 4), result("b/none.jpg", 0)]
    images, detections = results.coco_files(made, NAMES, IDS)
    results.write_json(tmp_path / "images.json", images)
    results.write_json(tmp_path / "detections.json", detections)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(tmp_path / "images.json")
        loaded = truth.loadRes(str(tmp_path / "detections.json"))
    assert [image["file_name"] for image in truth.loadImgs([1, 2, 3])] == ["a/one.jpg", "b/none.jpg", "b/two.jpg"]
    assert truth.loadCats(17)[0]["name"] == "cat"
    for number, expected in ((1, made[1]), (3, made[0])):
        rows = loaded.loadAnns(loaded.getAnnIds(imgIds=number))
        assert [IDS[cls] for cls in expected.detections["class"]] == [row["category_id"] for row in rows]
        assert np.allclose([row["bbox"] for row in rows], expected.detections["box_xywh"], atol=1e-3)
        assert np.allclose([row["score"] for row in rows], expected.detections["score"], atol=1e-6)
    assert not loaded.getAnnIds(imgIds=2)


def test_image_ids_are_coco_s_numbers_where_all_names_are_numbers() -> None:
    for names, ids in (
        (["val/000000000139.jpg", "val/000000000285.jpg"], [139, 285]),
        (["000139.jpg", "a285.jpg"], [1, 2]),
        (["a/7.jpg", "b/7.jpg"], [1, 2]),
        (["20261122153000123.jpg", "12345678901234567890123.jpg"], [2, 1]),
        (["b.jpg", "10.jpg", "2.jpg"], [3, 1, 2]),
    ):
        assert ids_by_name(names) == ids
        images, _ = results.coco_files([result(name, 0) for name in names], NAMES, IDS)
        assert {image["file_name"]: image["id"] for image in images["images"]} == dict(zip(names, ids, strict=True))
    images, _ = results.coco_files([result("7.mp4", 0, frame=number) for number in (10, 2, 1)], NAMES, IDS)
    assert [(image["id"], image["frame"]) for image in images["images"]] == [(1, 1), (2, 2), (3, 10)]


def test_yolo_labels_hold_the_boxes(tmp_path: Path) -> None:
    expected = result("a.jpg", 5)
    results.write_yolo(tmp_path / "deep" / "a.txt", expected)
    table = np.loadtxt(tmp_path / "deep" / "a.txt", ndmin=2)
    assert table.shape == (5, 6) and ((table[:, 1:] >= 0) & (table[:, 1:] <= 1)).all()
    assert table[:, 0].tolist() == expected.detections["class"].tolist()
    assert np.allclose(table[:, 5], expected.detections["score"], atol=1e-6)
    sides = np.array([320, 240])
    found = np.concatenate([(table[:, 1:3] - table[:, 3:5] / 2) * sides, table[:, 3:5] * sides], axis=1)
    assert np.abs(found - expected.detections["box_xywh"]).max() < 1e-3
    results.write_yolo(tmp_path / "none.txt", result("none.jpg", 0))
    assert (tmp_path / "none.txt").read_bytes() == b""


NESTED = [folder + ".".join(parts) for n in (2, 3, 4) for parts in product("ab", repeat=n) for folder in ("", "a/")]


@given(st.sets(st.sampled_from(NESTED), max_size=12))
def test_no_two_files_get_one_name(names: set[str]) -> None:
    given_names = results.file_names(sorted(names), ".txt")
    assert set(given_names) == names and len(set(given_names.values())) == len(names)


Row = dict[str, Any]


def drawn(seed: int) -> tuple[results.GroundTruth, list[Row]]:
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


def odd_ids(rows: list[Row]) -> None:
    """Categories that the data does not have, ids as floats, and more keys."""
    for number, row in enumerate(rows):
        row |= {"id": 7, "area": 1, "iscrowd": number % 2, "file_name": "x.jpg", "segmentation": []}
        row["image_id"] = float(row["image_id"])
        row["category_id"] = 4 if number % 5 == 0 else float(row["category_id"])


def odd_boxes(rows: list[Row]) -> None:
    for number, row in enumerate(rows[::3]):
        x, y, width, height = row["bbox"]
        odd = ([x, y, 0, height], [x, y, width, 0], [x, y, 1e6, 1e6], [x - 3000, y, width, height], [2, 3, 4, 5])
        row["bbox"] = odd[number % 5]


def odd_scores(rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        row["score"] = (-row["score"], row["score"] * 1e5, 0.1, 0.1 + 1e-12, -0.0, 0)[number % 6]


@pytest.mark.parametrize("change", [lambda rows: None, odd_ids, odd_boxes, odd_scores, lambda rows: rows.pop(0)])
def test_metrics_are_those_of_pycocotools_on_the_file(change: Callable[[list[Row]], object], tmp_path: Path) -> None:
    truth, rows = drawn(0)
    write_coco(truth, tmp_path / "truth.json")
    change(rows)
    (tmp_path / "results.json").write_text(json.dumps(rows))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json").stats.tolist()
    found = results.read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    assert list(score(truth, found).metrics.values()) == expected
    assert len(found) == sum(row["category_id"] != 4 for row in rows)


def test_no_digit_is_lost(tmp_path: Path) -> None:
    """An overlap of exactly a half in the file's numbers is a match; in float32 it is less."""
    truth, _ = draw(0)
    box = np.array([0.1, 0.1, 20.2, 30.3])
    truth = results.GroundTruth(
        truth.image_ids[:1], truth.sizes[:1], np.array([0, 1]), box[None], np.zeros(1, int), np.zeros(1, bool),
        box[None, 2:].prod(1), truth.names,
    )  # fmt: skip
    write_coco(truth, tmp_path / "truth.json")
    rows = [{"image_id": int(truth.image_ids[0]), "category_id": 3, "bbox": [0.1, 0.1, 20.2, 15.15], "score": 0.5}]
    (tmp_path / "results.json").write_text(json.dumps(rows))
    expected = plain_pycocotools(tmp_path / "truth.json", tmp_path / "results.json").stats.tolist()
    found = results.read_results(tmp_path / "results.json", truth.image_ids, CATEGORY_IDS)
    assert list(score(truth, found).metrics.values()) == expected
    assert expected[1] > 0.99 and score(truth, found.astype(results.DETECTION)).metrics["AP50"] == 0


ROW = {"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4], "score": 0.5}
WRONG: list[dict[str, Any]] = [
    {"image_id": 10**6}, {"image_id": "a7"}, {"image_id": "07"}, {"image_id": [7]}, {"bbox": [1, 2, 3]},
    {"bbox": [1, 2, 3, 10**400]}, {"bbox": [1, 2, float("inf"), 4]}, {"score": "high"}, {"score": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        None, "[", "{}", '{"annotations": []}',
        *(json.dumps([ROW, ROW | wrong]) for wrong in WRONG),
        json.dumps([{"image_id": 7}]), json.dumps([ROW, ROW | {"category_id": 0}]),
        json.dumps([ROW | {"category_id": number} for number in (2, 3)]),
    ],
)  # fmt: skip
def test_what_is_no_results_file_of_the_data_is_one_sentence(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(TrainError, match=r"^detections=.*\. fix: [^\n]*$"):
        results.read_results(tmp_path / "results.json", np.array([7]), CATEGORY_IDS)


def test_a_pipe_holds_no_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "results.json")
    with pytest.raises(TrainError, match="not a regular"):
        results.read_results(tmp_path / "results.json", np.array([7]), CATEGORY_IDS)


def test_ids_may_be_texts_and_rows_of_other_categories_are_counted(tmp_path: Path, capsys) -> None:
    rows = [ROW | {"image_id": "7"}, ROW | {"category_id": "1"}, ROW | {"category_id": 99}]
    (tmp_path / "results.json").write_text(json.dumps(rows), encoding="utf-16")
    found = results.read_results(tmp_path / "results.json", np.array([7]), [3, 1])  # as data.names may order them
    said = capsys.readouterr().out
    assert found["class"].tolist() == [0, 1] and said.count("\n") == 1 and "1 of its 3 rows" in said and "99" in said
    merged = results.read_results(tmp_path / "results.json", np.array([7]), [1, 3, 99], single_class=True)
    assert merged["class"].tolist() == [0, 0, 0] and capsys.readouterr().out == ""
    (tmp_path / "results.json").write_text(json.dumps([*rows[:2], ROW, ROW | {"score": 0.1}, ROW | {"score": 0.1}]))
    assert len(results.read_results(tmp_path / "results.json", np.array([7]), [1, 3])) == 5
    assert "2 of its 5 rows repeat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scale", "is_xyxy", "said"), [(1, False, ""), (0.01, False, "fractions"), (1, True, "left, top, width, height")]
)
def test_boxes_in_other_units_are_a_warning(scale, is_xyxy, said, capsys) -> None:
    found = np.zeros(4, results.DETECTION_AS_READ)
    found["image_id"] = [9, 7, 7, 9]
    wide, high = [60, 10, 30, 20], [10, 60, 20, 30]  # each fits only into its own image
    found["box_xywh"] = np.array([wide, high, high, wide]) * scale
    found["box_xywh"][:, 2:] += found["box_xywh"][:, :2] * is_xyxy
    results.warn_of_units(Path("a.json"), found, np.array([9, 7]), np.array([[50, 100], [100, 50]]))
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == bool(printed)


def test_the_order_of_detections_does_not_depend_on_that_of_batches() -> None:
    corners = np.array([[0, 0, 4, 4], [1, 1, 5, 5], [2, 2, 6, 6], [2, 2, 6, 5]], dtype=np.float32)
    scores = np.array([0.5, 0.5, 0.9, 0.9])
    parts = [results.make_detections(image, np.array([1, 0, 0, 0]), scores, corners) for image in (3, 1)]
    found = np.concatenate(parts)
    ordered = results.canonical_order(found)
    assert ordered["image_id"].tolist() == [1] * 4 + [3] * 4 and ordered["class"].tolist() == [0, 0, 0, 1] * 2
    assert ordered["score"].tolist() == pytest.approx([0.9, 0.9, 0.5, 0.5] * 2)
    assert np.array_equal(results.canonical_order(found[::-1]), ordered)


@pytest.mark.parametrize("wrong", [{"file_name": "b.jpg"}, {"height": 9}, {"categories": IDS[::-1]}])
def test_results_beside_other_images_or_categories_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    image = {"id": 7, "file_name": "a.jpg", "height": 10, "width": 20}
    known = {
        "images": [image | {"file_name": "val/a.jpg"}],
        "categories": results.categories_json([*NAMES, "cat"], [*IDS, 3]),
    }
    for change in ({}, {"id": "7", "height": 10.0}, wrong):
        ids = change.get("categories", [*IDS[:2], 5])
        categories = [{"id": number, "name": name} for number, name in zip(ids, [*NAMES[:2], "other"], strict=True)]
        results.write_json(tmp_path / "images.json", {"images": [image | change], "categories": categories})
        with pytest.raises(TrainError, match=r"in the data\. fix: ") if change is wrong else contextlib.nullcontext():
            results.check_images(tmp_path / "results.json", known)
