"""The data set check: its report, its exit codes, and no side effects."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
import torch

from conf.build.report import announce
from conf.entry import compose
from conf.programs import run
from conf.schema import TrainConfig
from conf.schema_tools import CheckDataConfig
from data import DataFormat, open_annotations
from models import Darknet, zoo_cfg
from scripts.check_data import check
from tests.data.bad_images import exif, with_segment
from tests.data.drawn_set import DrawnSet
from train_utils.distributed import World
from train_utils.log import RunLog


def overrides(drawn: DrawnSet, out: Path) -> list[str]:
    drawn.config(DataFormat.coco)  # writes the json files
    return [
        "data=coco", "data.name=drawn", f"data.root={drawn.root}", f"data.index_dir={out.parent}/index",
        "data.train={annotations: train.json, images: images/train}",
        "data.val={annotations: val.json, images: images/val}",
        "model=yolov3-tiny", "image_size=64", "pictures=4", f"out={out}",
    ]  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Modes, times and content of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


def test_the_report_and_a_set_that_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = DrawnSet(tmp_path / "set")
    for name in ("train", "val"):
        drawn.json[name]["categories"][0]["name"] = "<cat> & $dog$"
    drawn.copy("train", 0, "val", 7)
    drawn.image("train", 2).write_bytes(b"")
    drawn.json["train"]["annotations"][9]["bbox"] = [100, 50, 40, 20]
    config = compose("check_data", CheckDataConfig, overrides(drawn, tmp_path / "out"))
    before = snapshot(drawn.root)
    checked = check(config)
    assert snapshot(drawn.root) == before, "the data set was changed"
    assert not (tmp_path / "index").exists()

    printed = capsys.readouterr().out.splitlines()
    out = tmp_path / "out"
    assert printed[-1] == f"3 problems in 9 images, report: {out / 'report.txt'}"
    assert (out / "report.txt").read_text().splitlines()[:-1] == printed[:-1]
    assert {(entry.split, entry.kind) for entry in checked.problems} == {
        ("train", "images that cannot be read"),
        ("train", "boxes that reach out of their image and are cut there"),
        ("train and val", "images given twice, once in each set"),
    }
    assert {path.name for path in out.iterdir()} == {"report.txt", "labels.jpg"}
    sheet = cv2.imread(str(out / "labels.jpg"))
    assert sheet.std() > 10 and sheet.shape[1] > 4 * 440


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a clean set, 1 for problems, 2 for wrong options or no data set."""
    drawn = DrawnSet(tmp_path / "set")
    options = [*overrides(drawn, tmp_path / "out"), "pictures=0"]

    def start(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["scripts/check_data.py", *options, *more])
        run("check_data")
        return capsys.readouterr().out

    assert start().splitlines()[-1].startswith("0 problems in 8 images, report: ")
    assert not list((tmp_path / "out").glob("*.jpg"))
    with pytest.raises(SystemExit, match=r"^2$"):
        start("data.root=nowhere")
    assert "error: data.train.annotations: there is no " in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        start("min_iou=1.5")
    drawn.image("val", 1).unlink()
    with pytest.raises(SystemExit, match=r"^1$"):
        start()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 problem in 7 images, report: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model=yolov3-tiny"], "recall of the anchors 1.0000 at IoU 0.2"),
        (["model=yolov3-tiny", "loss.anchor_iou=0.6"], "recall of the anchors 0.0000 at IoU 0.6"),
        (["model=yolov3-tiny", "loss=darknet"], "mean IoU with the best anchor 0.536"),
    ],
)
def test_a_training_says_what_its_sets_are_like(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = DrawnSet(tmp_path / "set")
    drawn.image("train", 2).write_bytes(with_segment(drawn.image("train", 2).read_bytes(), exif(3)))
    drawn.json["train"]["annotations"][0]["bbox"] = [-4, 30, 44, 24]
    data = [option for option in overrides(drawn, tmp_path / "out") if option.startswith("data")]
    config = compose("train", TrainConfig, [*data, "train.image_size=128", *options])
    train_set, val_set = (open_annotations(config.data, split) for split in ("train", "val"))
    model = Darknet(zoo_cfg("yolov3-tiny"), 2, 0.125)
    world = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
    sampler = SimpleNamespace(steps_per_epoch=1, images_per_rank=5, accumulate=1)
    announce(RunLog(None, True), tmp_path, config, world, train_set, val_set, sampler, model)
    about, *lines = capsys.readouterr().out.splitlines()
    assert about == f"data: drawn, coco of {drawn.root}"
    assert lines[0].startswith(f"train: 5 images, 10 boxes, 2 classes, {said}")
    warned = [line for line in lines if line.startswith("warning: ")]
    assert len(warned) == ("0.0000" in said) and all("fix: model.anchors=auto" in line for line in warned)
    told = [line for line in lines if line.startswith("train: ")][1:]
    assert told == [
        "train: images turned upright by their EXIF tag (1), first: 2.jpg",
        "train: boxes that reach out of their image and are cut there (1), first: "
        f"{drawn.root}/train.json: annotation 0 of 0.jpg, box [-4, 30, 44, 24] (x, y, w, h), reaches 4.00 px out of "
        "its image of 128 x 96 pixels",
    ]
    assert lines[3 + len(warned)].startswith("val: 3 images, 6 boxes, 2 classes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "problems"),
    [
        ("bccd", {}),
        (
            "bccd_voc",
            {("train", "boxes without area"): 1, ("val", "boxes without area that are scored unchanged"): 1},
        ),
    ],
)
def test_bccd_has_the_faults_that_are_known(
    data: str, problems: dict[tuple[str, str], int], shared_dir: Path, tmp_path: Path
) -> None:
    options = [f"data={data}", f"data.root={shared_dir}/data/bccd", f"out={tmp_path}", "pictures=0"]
    checked = check(compose("check_data", CheckDataConfig, options))
    assert {(entry.split, entry.kind): entry.count for entry in checked.problems} == problems
    assert not checked.notes and [len(part) for part in checked.splits.values()] == [205, 87]
    assert len(checked.splits["train"].classes) == 2804
    assert checked.recall["train"] > 0.99
