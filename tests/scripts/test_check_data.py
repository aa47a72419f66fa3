"""The data set check: its report, and no side effects."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf.compose import compose
from conf.schema import CheckDataConfig
from data import DataFormat
from data.io import Findings
from data.validate import CUT, SCORED_OUTSIDE, TINY_BOXES, UNLIKE
from scripts import check_data
from scripts.check_data import CheckedSet, check, check_dataset, text_report
from tests.data.drawn_set import DrawnSet
from train_utils.report.plots import draw_labels, save_plot

NETWORK = (128, np.array([[20.0, 20.0], [60.0, 40.0]]), 0.2)
Plant = Callable[["DrawnSet"], None]


def test_the_report_and_a_set_that_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    drawn, out = DrawnSet(tmp_path / "set"), tmp_path / "out"
    drawn.copy("train", 0, "val", 7)
    drawn.image("train", 2).write_bytes(b"")
    drawn.json["train"]["annotations"][9]["bbox"] = [100, 50, 40, 20]
    drawn.config(DataFormat.coco)  # writes the json files
    config = compose("check_data", CheckDataConfig, [
        "data=coco", "data.name=drawn", f"data.root={drawn.root}", f"data.index_dir={tmp_path}/index",
        "data.train={annotations: train.json, images: images/train}",
        "data.val={annotations: val.json, images: images/val}",
        "model=yolov3-tiny", "image_size=64", "pictures=4", f"out={out}",
    ])  # fmt: skip

    def snapshot() -> dict[Path, tuple[int, int]]:  # every write sets the time of the last change
        return {path: (path.lstat().st_mode, path.lstat().st_ctime_ns) for path in drawn.root.rglob("*")}

    before = snapshot()
    checked = check(config)
    assert snapshot() == before, "the data set was changed"
    assert not (tmp_path / "index").exists()
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"3 problems in 9 images, report: {out / 'report.txt'}"
    assert (out / "report.txt").read_text().splitlines()[:-1] == printed[:-1]
    assert set(counts(checked.problems)) == {
        ("train", "images that cannot be read"),
        ("train", "boxes that reach out of their image and are cut there"),
        ("train and val", "images in both sets"),
    }
    assert {path.name for path in out.iterdir()} == {"report.txt", "labels.jpg", "statistics.png"}
    sheet = cv2.imread(str(out / "labels.jpg"))
    assert sheet.std() > 10 and sheet.shape[1] > 4 * 440
    monkeypatch.setattr(check_data, "check", lambda _: checked)
    with pytest.raises(SystemExit, match="1"):
        check_data.main(config)


def test_a_report_without_pictures(drawn: DrawnSet, tmp_path: Path) -> None:
    config = compose("check_data", CheckDataConfig, ["data=shapes", "pictures=0", f"out={tmp_path}/out"])
    assert check(replace(config, data=drawn.config(COCO))).num_problems == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.txt"]


@pytest.fixture
def drawn(tmp_path: Path) -> DrawnSet:
    return DrawnSet(tmp_path / "set")


def check_of(drawn: DrawnSet, form: DataFormat) -> CheckedSet:
    return check_dataset(drawn.config(form), *NETWORK)


def counts(findings: dict[str, Findings]) -> dict[tuple[str, str], int]:
    found = {(split, kind): count for split, part in findings.items() for kind, count in part.counts.items()}
    found.pop(("test", "not checked"), None)  # most of these sets have no tests
    return found


def not_an_image(drawn: DrawnSet) -> None:
    drawn.image("val", 1).write_text("<html>404</html>")


def copied(split: str) -> Plant:
    return lambda drawn: drawn.copy("train", 0, split, 7)


def other_size(drawn: DrawnSet) -> None:
    drawn.json["train"]["images"][3]["height"] = 200


def box_twice(drawn: DrawnSet) -> None:
    boxes = drawn.json["train"]["annotations"]
    boxes.append(boxes[2] | {"id": 999})
    boxes.append(boxes[2] | {"id": 1000, "category_id": 5})  # another class, so no copy


def white_of_two_sizes(drawn: DrawnSet) -> None:
    for number, (height, width) in {0: (96, 128), 1: (128, 96)}.items():  # the same bytes
        cv2.imwrite(str(drawn.image("train", number)), np.full((height, width, 3), 255, np.uint8))
        drawn.json["train"]["images"][number] |= {"height": height, "width": width}
    drawn.copy("train", 3, "train", 7)


def damaged(drawn: DrawnSet) -> None:
    content = bytearray(drawn.image("train", 2).read_bytes())
    middle = content.index(b"\xff\xda") + 200  # of the scan
    content[middle : middle + 2] = b"\xff\xd5"  # a restart marker where none belongs
    drawn.image("train", 2).write_bytes(content)


def outside(split: str) -> Plant:
    return lambda drawn: drawn.json[split]["annotations"][4].update(bbox=[100, 50, 40, 20])


def rows(split: str, number: int, text: str) -> Plant:
    def plant(drawn: DrawnSet) -> None:
        with drawn.label(split, number).open("a") as file:
            file.write(text)

    return plant


COCO, YOLO = DataFormat.coco, DataFormat.yolo
PLANTED: dict[str, tuple[Plant, DataFormat, str, str, str]] = {
    "no image": (not_an_image, COCO, "val", "images that cannot be read", "val/1.jpg is not an image"),
    "image twice": (copied("train"), COCO, "train", "repeated images", "train/0.jpg and "),
    "leak": (copied("val"), COCO, "train and val", "images in both sets", "val/7.jpg"),
    "damage": (damaged, COCO, "train", "images that are damaged inside", "train/2.jpg: "),
    "two sizes": (white_of_two_sizes, COCO, "train", "repeated images", "train/3.jpg and "),
    "cut": (outside("train"), COCO, "train", CUT, "annotation 20"),
    "outside": (outside("val"), COCO, "val", SCORED_OUTSIDE, "annotation "),
    "size": (other_size, COCO, "train", "images that cannot be read", "train/3.jpg has 128 x 96"),
    "box twice": (box_twice, COCO, "train", "repeated boxes", "999 of 1.jpg, box [21, 30, 40, 24]"),
    "yolo pixels": (rows("val", 0, "1 60 50 20 20\n"), YOLO, "val", "rows that are not boxes", "0.txt:3 holds '1 60"),
    "yolo row": (rows("val", 2, "1 .5 .5 .1\n"), YOLO, "val", "rows that are not boxes", "2.txt:3 holds '1 .5"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_reported_and_nothing_else(drawn: DrawnSet, name: str) -> None:
    plant, form, split, kind, words = PLANTED[name]
    plant(drawn)
    report = check_of(drawn, form)
    assert counts(report.problems) == {(split, kind): 1} and report.num_problems == 1
    assert not counts(report.notes)
    (example,) = report.problems[split].examples[kind]
    assert words in example
    lines = text_report(report)
    assert f"  {split}: {kind} (1)" in lines and lines[-1].startswith("1 problem in ")
    assert words.split()[0] in "".join(line.strip() for line in lines)


def test_the_tests_are_checked_too_and_their_absence_is_said(drawn: DrawnSet) -> None:
    assert sum(line.startswith("  test: not checked (1)") for line in text_report(check_of(drawn, COCO))) == 1
    config = drawn.config(COCO)
    content = drawn.json["val"] | {"annotations": [{**drawn.json["val"]["annotations"][0], "bbox": [9, 9, 0, 5]}]}
    (drawn.root / "test.json").write_text(json.dumps(content))
    report = check_dataset(config, *NETWORK)
    assert [*report.splits] == ["train", "val", "test"] and {split for split, _ in counts(report.problems)} >= {"test"}
    alone = check_dataset(config, *NETWORK, ["test"])
    assert [*alone.splits] == ["test"] and alone.problems["test"].counts == report.problems["test"].counts
    assert report.problems["val and test"].counts["images in both sets"] == len(drawn.json["val"]["images"])
    assert any(line.split()[:2] == ["class", "train"] and "test boxes" in line for line in text_report(report))
    warned: list[str] = []
    save_plot(drawn.root / "new" / "statistics.png", warned.append, draw_labels, report.splits)
    assert not warned and cv2.imread(str(drawn.root / "new" / "statistics.png")).std() > 10


def test_the_boxes_of_each_class_are_counted_and_drawn_at_its_place(drawn: DrawnSet) -> None:
    checked = check_of(drawn, COCO)
    lines = [line.split() for line in text_report(checked) if line[:3] in ("cat", "dog")]
    assert lines == [["cat", "5", "3"], ["dog", "5", "3"]]
    found = replace(checked.splits["train"], names=[f"{'x' * 40}{n}" for n in range(40)])
    assert draw_labels({"train": found}).axes[0].lines[0].get_xdata().tolist() == [*range(40)]


def test_what_may_be_meant_so_is_a_note(drawn: DrawnSet) -> None:
    content = drawn.json["val"]
    content["annotations"] = [box for box in content["annotations"] if box["image_id"] != 1 and box["category_id"] == 1]
    content["annotations"].append({"id": 5, "image_id": 2, "category_id": 1, "bbox": [9, 9, 2, 3]})
    content["annotations"].append(content["annotations"][0] | {"id": 6, "iscrowd": 1})  # no copy
    checked = check_of(drawn, DataFormat.coco)
    assert not counts(checked.problems)
    assert counts(checked.notes) == {
        ("val", "images without boxes"): 1,
        ("val", "classes without boxes"): 1,
        ("val", "boxes that no anchor fits"): 1,
        ("val", "boxes too small to learn"): 1,  # 2 x 3 px, in an image that is not enlarged
    }
    assert checked.recall["val"] == pytest.approx(2 / 3)


def test_boxes_that_are_corners_or_fractions_are_a_problem(drawn: DrawnSet) -> None:
    for box in drawn.json["val"]["annotations"]:
        x, y, w, h = box["bbox"]
        box |= {"bbox": [x, y, x + w, y + h], "area": w * h}
    for box in drawn.json["train"]["annotations"]:
        box["bbox"] = [side / 128 for side in box["bbox"]]
    problems = counts(check_of(drawn, COCO).problems)
    assert problems["val", f"{UNLIKE}[left, top, right, bottom]"] == 6 and problems["train", TINY_BOXES] == 10


def test_classes_that_differ_are_a_problem(drawn: DrawnSet) -> None:
    drawn.json["val"]["categories"][1]["name"] = "wolf"
    config = replace(drawn.config(DataFormat.coco), names=None)
    report = check_dataset(config, *NETWORK)
    assert counts(report.problems) == {("train and val", "classes that differ"): 1}
    assert any(line.startswith("wolf") for line in text_report(report))
