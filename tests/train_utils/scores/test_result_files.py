"""Result files read back with the programs they are for."""

from __future__ import annotations

import contextlib
import io
from itertools import product
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.coco import COCO

from train_utils.detections import (
    ImageResult,
    coco_files,
    file_names,
    image_ids,
    make_detections,
    write_json,
    write_yolo,
)

NAMES, IDS = ["cat", "dog", "bird"], [17, 18, 16]


def result(name: str, count: int, frame: int | None = None) -> ImageResult:
    generator = np.random.default_rng(count)
    low = generator.uniform(0, 100, (count, 2))
    boxes_xyxy = np.concatenate([low, low + generator.uniform(1, 100, (count, 2))], axis=1)
    scores = np.sort(generator.uniform(0, 1, count))[::-1]
    return ImageResult(name, frame, (240, 320), make_detections(0, generator.integers(0, 3, count), scores, boxes_xyxy))


def test_pycocotools_loads_the_results_against_their_images(tmp_path: Path) -> None:
    results = [result("b/two.jpg", 3), result("a/one.jpg", 4), result("b/none.jpg", 0)]
    images, detections = coco_files(results, NAMES, IDS)
    write_json(tmp_path / "images.json", images)
    write_json(tmp_path / "detections.json", detections)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(tmp_path / "images.json")
        loaded = truth.loadRes(str(tmp_path / "detections.json"))
    assert [image["file_name"] for image in truth.loadImgs([1, 2, 3])] == ["a/one.jpg", "b/none.jpg", "b/two.jpg"]
    assert truth.loadCats(17)[0]["name"] == "cat"
    for number, expected in ((1, results[1]), (3, results[0])):
        rows = loaded.loadAnns(loaded.getAnnIds(imgIds=number))
        assert [IDS[cls] for cls in expected.detections["class"]] == [row["category_id"] for row in rows]
        assert np.allclose([row["bbox"] for row in rows], expected.detections["box_xywh"], atol=1e-3)
        assert np.allclose([row["score"] for row in rows], expected.detections["score"], atol=1e-6)
    assert not loaded.getAnnIds(imgIds=2)


def test_image_ids_are_coco_s_numbers_where_all_names_are_numbers() -> None:
    assert image_ids([result("val/000000000139.jpg", 0), result("val/000000000285.jpg", 0)]) == [139, 285]
    assert image_ids([result("000139.jpg", 0), result("a285.jpg", 0)]) == [1, 2]
    assert image_ids([result("a/7.jpg", 0), result("b/7.jpg", 0)]) == [1, 2]
    assert image_ids([result("20261122153000123.jpg", 0), result("12345678901234567890123.jpg", 0)]) == [1, 2]
    assert image_ids([result("0.jpg", 0), result(f"{2**53 - 1}.jpg", 0)]) == [0, 2**53 - 1]
    assert image_ids([result("7.mp4", 0, frame=number) for number in (1, 2, 3)]) == [1, 2, 3]


def test_frames_are_numbered_in_their_order() -> None:
    frames = [result("clip.mp4", 1, frame=number) for number in (10, 2, 1)]
    images, _ = coco_files(frames, NAMES, IDS)
    assert [(image["id"], image["frame"]) for image in images["images"]] == [(1, 1), (2, 2), (3, 10)]


def test_yolo_labels_hold_the_boxes(tmp_path: Path) -> None:
    expected = result("a.jpg", 5)
    write_yolo(tmp_path / "deep" / "a.txt", expected)
    table = np.loadtxt(tmp_path / "deep" / "a.txt", ndmin=2)
    assert table.shape == (5, 6) and ((table[:, 1:] >= 0) & (table[:, 1:] <= 1)).all()
    assert table[:, 0].tolist() == expected.detections["class"].tolist()
    assert np.allclose(table[:, 5], expected.detections["score"], atol=1e-6)
    sides = np.array([320, 240])
    found = np.concatenate([(table[:, 1:3] - table[:, 3:5] / 2) * sides, table[:, 3:5] * sides], axis=1)
    assert np.abs(found - expected.detections["box_xywh"]).max() < 1e-3
    write_yolo(tmp_path / "none.txt", result("none.jpg", 0))
    assert (tmp_path / "none.txt").read_bytes() == b""


NESTED = [folder + ".".join(parts) for n in (2, 3, 4) for parts in product("ab", repeat=n) for folder in ("", "a/")]


@given(st.sets(st.sampled_from(NESTED), max_size=12))
def test_no_two_files_get_one_name(names: set[str]) -> None:
    """Of files such as a.b, a.b.a and b.a, where one's stem is another's name."""
    given_names = file_names(sorted(names), ".txt")
    assert set(given_names) == names and len(set(given_names.values())) == len(names)


def test_a_file_keeps_its_stem_unless_another_has_it_too() -> None:
    assert file_names(["a/b.jpg", "c/b.jpg"], ".txt") == {"a/b.jpg": "a/b.txt", "c/b.jpg": "c/b.txt"}
    assert file_names(["b.jpg", "b.png"], ".txt") == {"b.jpg": "b.jpg.txt", "b.png": "b.png.txt"}
