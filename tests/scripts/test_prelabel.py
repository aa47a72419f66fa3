"""Labels are predict.py's boxes in each tool's layout; the order follows its rule."""

from __future__ import annotations

import csv
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO

from conf.api.calls import options_of
from conf.failures import ConfigError
from data import DataError
from predict import Detector
from scripts.prelabel import folder as prelabelling
from scripts.prelabel import order
from scripts.prelabel.folder import prelabel
from tests.data.images.test_media import video
from tests.data.tagged import WRITERS, stored_picture
from tests.test_predict import IDS, folder

__all__ = ["folder"]  # a fixture
OPTIONS = ("device=cpu", "workers=2", "multi_label=true", "nms_iou=0.6")
NAMES = ["1 ä.png", "b/no.png", "b/two words.jpg", "copy.png", "turned.jpg"]
HIGH = 0.6


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """Names with spaces and beyond ASCII, a copy, a turned picture, and a plain one."""
    path = folder / "my pictures"
    (path / "b").mkdir(parents=True)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 255, (48 + 8 * n, 96, 3), dtype=np.uint8) for n in range(2))
    for name, image in (("1 ä.png", first), ("b/two words.jpg", second), ("b/no.png", np.zeros((40, 40, 3), np.uint8))):
        (path / name).write_bytes(cv2.imencode(Path(name).suffix, image)[1].tobytes())
    shutil.copy(path / "1 ä.png", path / "copy.png")
    (path / "turned.jpg").write_bytes(WRITERS["jpeg"][1](stored_picture(), 6))
    return path


def labels(folder: Path, source: Path | str, out: Path, form: str, *more: str) -> Path:
    given = [f"ckpt={folder / 'random.pt'}", f"source='{source}'", f"format={form}", f"out={out}", *OPTIONS, *more]
    return prelabel(options_of("prelabel", given))


def expected(folder: Path, source: Path, **more: Any) -> dict[str, Any]:
    """What predict.py finds, by file name."""
    detector = Detector(
        folder / "random.pt", device="cpu", multi_label=True, nms_iou=0.6, **{"confidence": HIGH} | more
    )
    return {found.frame.medium.name: found for found in detector(str(source))}


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "order.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("more", [{}, {"merge_nms": "true"}])
def test_coco_as_pycocotools_reads_it(folder: Path, source: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    given = [f"{key}={value}" for key, value in more.items()]
    out = labels(folder, source, tmp_path / "out", "coco", f"confidence={HIGH}", *given)
    coco = COCO(str(out / "annotations" / "instances_default.json"))
    assert sorted(image["file_name"] for image in coco.imgs.values()) == NAMES
    assert sorted(coco.getCatIds()) == sorted(IDS)
    for name, found in expected(folder, source, **more).items():
        (image,) = (image for image in coco.imgs.values() if image["file_name"] == name)
        assert (image["height"], image["width"]) == found.frame.size
        got = [(row["category_id"], *row["bbox"], row["area"]) for row in coco.imgToAnns[image["id"]]]
        want = [(row["category_id"], *row["bbox"], row["bbox"][2] * row["bbox"][3]) for row in found.to_coco(1)]
        np.testing.assert_allclose(sorted(got), sorted(want), rtol=1e-4, atol=1e-3)
    (turned,) = (image for image in coco.imgs.values() if image["file_name"] == "turned.jpg")
    assert turned["height"] > turned["width"], "as the tag says"
    assert len(coco.anns) > 5 and len(rows_of(out)) == len(NAMES)


def test_yolo_as_cvat_reads_it(folder: Path, source: Path, tmp_path: Path) -> None:
    out = labels(folder, source, tmp_path / "out", "yolo", f"confidence={HIGH}")
    data = dict(line.split(" = ") for line in (out / "obj.data").read_text().splitlines())
    names = (out / data["names"]).read_text().splitlines()
    listed = (out / data["train"]).read_text(encoding="utf-8").splitlines()
    assert int(data["classes"]) == len(names) == len(IDS)
    assert listed == [f"obj_train_data/{name}" for name in NAMES]
    for name, found in expected(folder, source).items():
        height, width = found.frame.size
        lines = (out / "obj_train_data" / name).with_suffix(".txt").read_text().splitlines()
        rows = np.array([line.split(" ") for line in lines], dtype=float).reshape(-1, 5)
        corners = np.hstack([rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2])
        np.testing.assert_allclose(corners * [width, height, width, height], found.boxes_xyxy, atol=1e-3)
        assert rows[:, 0].tolist() == found.classes.tolist()


def test_label_studio_in_the_order_of_labelling(folder: Path, source: Path, tmp_path: Path) -> None:
    out = labels(folder, source, tmp_path / "out", "label-studio", f"confidence={HIGH}")
    view = ElementTree.parse(out / "label_config.xml").getroot()
    shown, choices = view.find("Image"), view.find("RectangleLabels")
    assert shown is not None and choices is not None and shown.get("value") == "$image"
    found, ranked = expected(folder, source), rows_of(out)
    assert [label.get("value") for label in choices] == found["copy.png"].class_names
    tasks = json.loads((out / "tasks.json").read_text())
    assert str(folder) not in (out / "tasks.json").read_text(), "a path of this machine"
    for task, row in zip(tasks, ranked, strict=True):
        (address,) = parse_qs(urlparse(task["data"]["image"]).query)["d"]
        assert address == f"my pictures/{row['file']}"
        (prediction,), of_file = task["predictions"], found[row["file"]]
        assert prediction["model_version"] and prediction["score"] == pytest.approx(
            1 - float(row["uncertainty"]), abs=1e-4
        )
        assert len({region["id"] for region in prediction["result"]}) == len(prediction["result"]) == len(of_file)
        for region, box, score, name in zip(
            prediction["result"], of_file.boxes_xyxy, of_file.scores, of_file.names, strict=True
        ):
            assert (region["from_name"], region["to_name"]) == (choices.get("name"), shown.get("name"))
            assert (region["original_height"], region["original_width"]) == of_file.frame.size
            value, size = region["value"], (region["original_width"], region["original_height"])
            left, top = value["x"] * size[0] / 100, value["y"] * size[1] / 100
            right, bottom = left + value["width"] * size[0] / 100, top + value["height"] * size[1] / 100
            np.testing.assert_allclose([left, top, right, bottom], box, atol=1e-3)
            assert value["rectanglelabels"] == [name] and region["score"] == pytest.approx(score)


def test_the_order_is_the_same_twice_and_a_copy_comes_last(folder: Path, source: Path, tmp_path: Path) -> None:
    given = (("a", "coco", "confidence=0.9"), ("b", "yolo", "confidence=0.3"))  # it hides labels, not doubt
    one, two = (labels(folder, source, tmp_path / name, *more) for name, *more in given)
    assert (one / "order.csv").read_bytes() == (two / "order.csv").read_bytes()
    rows = rows_of(one)
    assert [int(row["rank"]) for row in rows] == [1, 2, 3, 4, 5]
    assert float(rows[0]["uncertainty"]) == max(float(row["uncertainty"]) for row in rows)
    assert rows[-1]["file"] == "copy.png" and float(rows[-1]["distance"]) == 0


def test_pictures_without_detections_are_labelled_as_empty(folder: Path, source: Path, tmp_path: Path) -> None:
    for form in ("coco", "yolo", "label-studio"):
        labels(folder, source, tmp_path / form, form, "confidence=1")
    assert not COCO(str(tmp_path / "coco" / "annotations" / "instances_default.json")).anns
    files = sorted((tmp_path / "yolo" / "obj_train_data").rglob("*.txt"))
    assert len(files) == len(NAMES) and not any(path.read_text() for path in files)
    tasks = json.loads((tmp_path / "label-studio" / "tasks.json").read_text())
    assert [task["predictions"][0]["result"] for task in tasks] == [[]] * len(NAMES)
    shutil.copytree(source / "b", tmp_path / "set" / "deep")
    nested = labels(folder, tmp_path / "set", tmp_path / "nested", "label-studio", "confidence=1")
    assert (
        json.loads((nested / "tasks.json").read_text())[0]["data"]["image"].rpartition("=")[2].startswith("set/deep/")
    )


def test_uncertainty_is_that_of_the_score_nearest_to_one_half() -> None:
    for scores, value in (
        ([], 0.1), ([0.04], 0.1), ([0.75, 0.25], 0.5), ([0.25, 0.75], 0.5), ([0.99, 0.04], 0.02),
        ([0.9, 0.45, 0.3], 0.9), ([0.5], 1.0),
    ):  # fmt: skip
        assert order.uncertainty(np.array(scores)) == pytest.approx(value)


def test_the_order_weighs_distance_by_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = np.radians([0, 0, 90, 10, 60])
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    uncertainties = np.array([0.9, 0.9, 0.2, 0.8, 0.6])
    #  0 is first. Then 4: 0.6 * 1, against 0.2 * 1.41 of 2 and 0.8 * 0.17 of 3. 1 is a copy of 0.
    ranked = order.labelling_order(uncertainties, features)
    assert [number for number, _ in ranked] == [0, 4, 3, 2, 1]
    assert [distance for _, distance in ranked] == pytest.approx([2, 1, 0.1743, 0.5176, 0], abs=1e-4)
    monkeypatch.setattr(order, "COMPARED", 2)
    assert [number for number, _ in order.labelling_order(uncertainties, features)] == [0, 4, 3, 2, 1]
    assert [number for number, _ in order.labelling_order(np.full(3, 0.5), features[:1].repeat(3, 0))] == [0, 1, 2]


def test_ties_keep_the_order_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is next, and behind the compared ones."""
    for compared in (4, 1):
        monkeypatch.setattr(order, "COMPARED", compared)
        ranked = order.labelling_order(np.array([0.5, 0.9, 0.5, 0.5]), np.eye(4, dtype=np.float32))
        assert [number for number, _ in ranked] == [1, 0, 2, 3]


def test_the_order_does_not_depend_on_which_picture_is_finished_first(
    folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prelabelling.found_with_features
    outs = [labels(folder, source, tmp_path / "a", "coco")]
    monkeypatch.setattr(prelabelling, "found_with_features", lambda *made_of: reversed([*found(*made_of)]))
    outs.append(labels(folder, source, tmp_path / "b", "coco"))
    assert (outs[0] / "order.csv").read_bytes() == (outs[1] / "order.csv").read_bytes()


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_refused(folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="exists, and nothing is overwritten"):
        labels(folder, source, tmp_path, "coco")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    video(mixed / "a.avi", 1)
    with pytest.raises(ConfigError, match=r"a\.avi is a video"):
        labels(folder, mixed, tmp_path / "out", "coco")
    (mixed / "a.avi").unlink()
    for name in ("a.png", "a.jpg"):
        shutil.copy(source / "copy.png", mixed / name)
    with pytest.raises(ConfigError, match=r"a\.jpg and another picture need one \.txt"):
        labels(folder, mixed, tmp_path / "out", "yolo")
    (mixed / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"a\.png"):
        labels(folder, mixed, tmp_path / "out", "coco")
    with pytest.raises(ValueError, match="format must be coco, yolo or label-studio"):
        labels(folder, source, tmp_path / "out", "voc")
    for option, key in (("exif=ignore", "exif=apply"),):
        with pytest.raises(ValueError, match=f"fix: {key}"):
            labels(folder, source, tmp_path / "out", "coco", option)
    assert not (tmp_path / "out").exists()
    (mixed / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        labels(folder, source, mixed / "file" / "out", "coco")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"cannot write .*out \(No space left"):
        patch.setattr("scripts.prelabel.folder.csv", SimpleNamespace(writer=full_disk))
        labels(folder, source, tmp_path / "out", "coco")
    assert {path.name for path in tmp_path.iterdir()} == {"mixed"}, "what was written of it stays"
    assert rows_of(labels(folder, mixed, tmp_path / "left", "coco", "on_error=skip"))[0]["file"] == "a.jpg"
    exported = SimpleNamespace(model=torch.nn.Identity())  # stands for an ONNX file
    monkeypatch.setattr("scripts.prelabel.folder.open_detector", lambda *_: exported)
    with pytest.raises(ConfigError, match="shows no features"):
        labels(folder, source, tmp_path / "out", "coco")
