"""The check of a data set: each planted mistake is reported, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import DataError, DataFormat, open_annotations
from data.anchors import summarise
from data.index import read_annotations
from scripts.check_data import CheckedSet, Issue, check_dataset, text_report
from tests.data.drawn_set import HEIGHT, WIDTH, DrawnSet

NETWORK = (128, np.array([[20.0, 20.0], [60.0, 40.0]]), 0.2)
Plant = Callable[["DrawnSet"], None]


@pytest.fixture
def drawn(tmp_path: Path) -> DrawnSet:
    return DrawnSet(tmp_path / "set")


def check(drawn: DrawnSet, form: DataFormat) -> CheckedSet:
    return check_dataset(drawn.config(form), *NETWORK)


def found(entries: list[Issue]) -> dict[tuple[str, str], int]:
    return {(entry.split, entry.kind): entry.count for entry in entries}


def cut(drawn: DrawnSet) -> None:
    path = drawn.image("train", 2)
    path.write_bytes(path.read_bytes()[:-200])


def not_an_image(drawn: DrawnSet) -> None:
    drawn.image("val", 1).write_text("<html>404</html>")


def gone(drawn: DrawnSet) -> None:
    drawn.image("train", 1).unlink()


def twice_in_train(drawn: DrawnSet) -> None:
    drawn.copy("train", 0, "train", 7)


def twice_across(drawn: DrawnSet) -> None:
    drawn.copy("train", 0, "val", 7)


def annotation(split: str, row: int, **changes: Any) -> Plant:
    return lambda drawn: drawn.json[split]["annotations"][row].update(changes)


def wrong_size(drawn: DrawnSet) -> None:
    drawn.json["train"]["images"][3].update(height=200)


def box_twice(drawn: DrawnSet) -> None:
    boxes = drawn.json["train"]["annotations"]
    boxes.append(boxes[2] | {"id": 999})
    boxes.append(boxes[2] | {"id": 1000, "category_id": 5})  # another class, so no copy


def id_twice(drawn: DrawnSet) -> None:
    drawn.json["train"]["images"].append({"id": 2, "file_name": "0.jpg", "height": HEIGHT, "width": WIDTH})


def rows(split: str, number: int, text: str) -> Plant:
    def plant(drawn: DrawnSet) -> None:
        with drawn.label(split, number).open("a") as file:
            file.write(text)

    return plant


PLANTED: dict[str, tuple[Plant, DataFormat, str, str, str]] = {
    "cut short": (cut, DataFormat.coco, "train", "images that cannot be read", "train/2.jpg is cut short"),
    "no image": (not_an_image, DataFormat.coco, "val", "images that cannot be read", "val/1.jpg is not an image"),
    "missing": (gone, DataFormat.coco, "train", "missing image files", "names 1.jpg"),
    "image twice": (twice_in_train, DataFormat.coco, "train", "images given twice", "train/0.jpg and "),
    "leak": (twice_across, DataFormat.coco, "train and val", "images given twice, once in each set", "val/7.jpg"),
    "size": (wrong_size, DataFormat.coco, "train", "images that cannot be read", "train/3.jpg has 128 x 96"),
    "outside": (
        annotation("val", 1, bbox=[100, 50, 40, 20]),
        DataFormat.coco,
        "val",
        "boxes that reach out of their image and are scored unchanged",
        "annotation 1 of 0.jpg",
    ),
    "no area": (
        annotation("train", 4, bbox=[9, 9, 0, 5]),
        DataFormat.coco,
        "train",
        "boxes without area",
        "annotation 20",
    ),
    "not finite": (
        rows("train", 1, "1 .5 .5 nan .1\n"),
        DataFormat.yolo,
        "train",
        "boxes that are not finite",
        "1.txt:3",
    ),
    "class": (
        annotation("train", 3, category_id=99),
        DataFormat.coco,
        "train",
        "boxes of a class not in use",
        "category 99",
    ),
    "box twice": (box_twice, DataFormat.coco, "train", "boxes given twice", "1.jpg: cat [21, 30, 40, 24]"),
    "id twice": (id_twice, DataFormat.coco, "train", "images with an id in use", "image id 2 is used twice"),
    "yolo class": (
        rows("train", 1, "2 .5 .5 .1 .1\n"),
        DataFormat.yolo,
        "train",
        "rows of a class that has no name",
        "1.txt:3 is of class 2",
    ),
    "yolo pixels": (rows("val", 0, "1 60 50 20 20\n"), DataFormat.yolo, "val", "rows in pixels", "0.txt:3 holds 60"),
    "yolo row": (
        rows("val", 2, "1 .5 .5 .1\n"),
        DataFormat.yolo,
        "val",
        "rows that are no boxes",
        "2.txt:3 has 4 columns",
    ),
    "yolo twice": (
        rows("train", 0, "1 .5 .5 .25 .25\n1 .5 .5 .25 .25\n"),
        DataFormat.yolo,
        "train",
        "boxes given twice",
        "0.jpg: dog",
    ),
    "yolo no image": (not_an_image, DataFormat.yolo, "val", "files that are no images", "val/1.jpg"),
    "yolo cut": (cut, DataFormat.yolo, "train", "images that cannot be read", "train/2.jpg"),
    "yolo leak": (twice_across, DataFormat.yolo, "train and val", "images given twice, once in each set", "val/7.jpg"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_reported_and_nothing_else(drawn: DrawnSet, name: str) -> None:
    plant, form, split, kind, words = PLANTED[name]
    plant(drawn)
    report = check(drawn, form)
    assert found(report.problems) == {(split, kind): 1} and report.num_problems == 1
    assert not report.notes
    (example,) = report.problems[0].examples
    assert words in example
    lines = text_report(report)
    assert f"  {split}: {kind} (1)" in lines and lines[-1].startswith("1 problem in ")
    assert words.split()[0] in "".join(line.strip() for line in lines)


@pytest.mark.parametrize("form", [DataFormat.coco, DataFormat.yolo])
def test_a_set_without_faults_has_none(drawn: DrawnSet, form: DataFormat) -> None:
    checked = check(drawn, form)
    assert checked.num_problems == 0 and not checked.problems and not checked.notes
    assert checked.readable == {"train": [0, 1, 2, 3, 4], "val": [0, 1, 2]}
    lines = text_report(checked)
    assert lines[0] == "train: 5 images, 10 boxes, recall of the anchors 1.0000"
    assert [line.split() for line in lines if line[:3] in ("cat", "dog")] == [["cat", "5", "3"], ["dog", "5", "3"]]
    assert lines[-1] == "0 problems in 8 images"


def test_several_mistakes_at_once_are_all_reported(drawn: DrawnSet) -> None:
    """Counts include entries that the reader drops and images that do not decode."""
    for plant in (cut, not_an_image, wrong_size, box_twice, twice_across, annotation("train", 4, bbox=[9, 9, 0, 5])):
        plant(drawn)
    checked = check(drawn, DataFormat.coco)
    assert found(checked.problems) == {
        ("train", "images that cannot be read"): 2,
        ("val", "images that cannot be read"): 1,
        ("train", "boxes without area"): 1,
        ("train", "boxes given twice"): 1,
        ("train and val", "images given twice, once in each set"): 1,
    }
    assert checked.readable == {"train": [0, 1, 4], "val": [0, 2, 3]}


def test_more_mistakes_than_are_shown_are_counted(drawn: DrawnSet) -> None:
    boxes = drawn.json["train"]["annotations"]
    boxes += [boxes[0] | {"id": 1000 + number, "category_id": 77} for number in range(30)]
    boxes.append(boxes[0] | {"id": 2000, "bbox": [1, 1, 0, 0]})  # another kind, behind all those
    report = check(drawn, DataFormat.coco)
    assert found(report.problems) == {
        ("train", "boxes of a class not in use"): 30,
        ("train", "boxes without area"): 1,
    }
    assert [len(entry.examples) for entry in report.problems] == [20, 1]
    assert "    ... and 10 more" in text_report(report)


def test_what_may_be_meant_so_is_a_note(drawn: DrawnSet) -> None:
    """An empty image, an absent class, tiny boxes that no anchor fits."""
    content = drawn.json["val"]
    content["annotations"] = [box for box in content["annotations"] if box["image_id"] != 1 and box["category_id"] == 1]
    content["annotations"].append({"id": 5, "image_id": 2, "category_id": 1, "bbox": [9, 9, 2, 3]})
    checked = check(drawn, DataFormat.coco)
    assert not checked.problems
    assert found(checked.notes) == {
        ("val", "images without boxes"): 1,
        ("val", "classes without boxes"): 1,
        ("val", "boxes that no anchor fits"): 1,
    }
    assert checked.recall["val"] == pytest.approx(2 / 3)


def test_plain_pictures_are_no_copies_of_one_another(drawn: DrawnSet) -> None:
    for number, level in enumerate((0, 3, 250), start=10):
        image = np.full((HEIGHT, WIDTH, 3), level, np.uint8)
        image[:9, :9] = number
        drawn.add("train", number, image)
    report = check(drawn, DataFormat.coco)
    assert not report.problems and not report.notes


def test_classes_that_differ_are_a_problem(drawn: DrawnSet) -> None:
    drawn.json["val"]["categories"][1]["name"] = "wolf"
    config = replace(drawn.config(DataFormat.coco), names=None)
    report = check_dataset(config, *NETWORK)
    assert found(report.problems) == {("train and val", "classes that differ"): 1}
    assert any(line.startswith("wolf") for line in text_report(report))


def test_a_set_that_is_not_there_is_an_error(drawn: DrawnSet) -> None:
    config = replace(drawn.config(DataFormat.coco), root=str(drawn.root / "nowhere"))
    with pytest.raises(DataError, match=r"fix: set data\.root"):
        check_dataset(config, *NETWORK)


def test_an_index_and_the_check_read_the_same(drawn: DrawnSet, tmp_path: Path) -> None:
    config = replace(drawn.config(DataFormat.coco), index_dir=str(tmp_path / "index"))
    anew, *_ = read_annotations(config, "train")
    assert not (tmp_path / "index").exists()
    opened = open_annotations(config, "train")
    for key in ("name_bytes", "image_ids", "sizes", "offsets", "boxes_xywh", "classes", "crowd", "areas"):
        assert np.array_equal(getattr(anew, key), getattr(opened, key)), key


def test_the_summary_of_a_training(drawn: DrawnSet) -> None:
    drawn.json["train"]["images"].append(drawn.json["train"]["images"][0] | {"id": 50})  # without boxes
    annotations, *_ = read_annotations(drawn.config(DataFormat.coco), "train")
    good = summarise(annotations, 128, np.array([[40.0, 24.0]]), 0.2)
    counts = "6 images (1 without boxes), 10 boxes, 2 classes"
    assert good.line() == f"{counts}, recall of the anchors 1.0000 at IoU 0.2" and good.warning() is None
    bad = summarise(annotations, 128, np.array([[400.0, 240.0]]), 0.2)
    assert bad.overlap == 0 and "fix: model.anchors=auto" in str(bad.warning()) and "100.0%" in str(bad.warning())
    darknet = summarise(annotations, 128, np.array([[400.0, 240.0]]), None)
    assert darknet.line() == f"{counts}, mean IoU with the best anchor 0.010" and darknet.warning() is None
