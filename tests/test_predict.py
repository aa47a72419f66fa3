"""predict.py finds what an evaluation finds and writes it in all its formats."""

import json
import pkgutil
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from conf import TrainError
from conf.cli.program import PROGRAMS, options_of, start
from conf.compose import compose
from conf.schema import TrainConfig
from data import DataError, Frame, InputFit, ShapesConfig, ensure_shapes
from data.errors import UserError
from data.shapes import CLASSES
from eval import evaluate
from models.cfg import ModelError
from predict import predict
from tests.data.sets import a_few_of
from tests.data.test_media import picture, video
from tests.file_server import serving_folder
from tests.random_network import save_random_network

IDS = [30, 10, 20, 50, 40]  # category ids that are not the order of the classes
EVERYTHING = ["confidence=0.001", "nms_iou=0.6", "multi_label=true", "device=cpu"]  # as conf/evaluate/coco.yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn pictures, and the checkpoint of an untrained network."""
    path = tmp_path_factory.mktemp("predict")
    ensure_shapes(path / "shapes", ShapesConfig(train_images=3, val_images=9, image_size=64))
    config = compose("train", TrainConfig, ["model=yolov3-tiny", "model.width=0.125", "train.image_size=96"])
    save_random_network(path / "random.pt", config, CLASSES, IDS, seed=1, gain=10)
    return path


def found(folder: Path, source: Path | str, out: Path, *more: str) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, images.json and detections.json of a prediction."""
    options = [f"ckpt={folder / 'random.pt'}", f"source={source}", f"out={out}", *EVERYTHING, *more]
    out = predict(options)
    return out, *(json.loads((out / f"{name}.json").read_text()) for name in ("images", "detections"))


def drawn_in(folder: Path) -> list[str]:
    shapes = "{train_images: 3, val_images: 9, image_size: 64}"
    return ["data=shapes", f"data.root={folder}/shapes", f"data.index_dir={folder}/index", f"data.shapes={shapes}"]


@pytest.mark.parametrize(
    "options", a_few_of([["rect=false", "image_size=[64,128]"], ["resize=stretch"], ["merge_nms=true"]])
)
def test_predictions_are_those_of_an_evaluation_at_any_batch_size(folder, options, tmp_path) -> None:
    """The last bits may differ: those of a convolution depend on the number of images."""
    options = [*options, "confidence=0.7"]
    root, data = folder / "shapes", drawn_in(folder)
    evaluate([
        f"ckpt={folder / 'random.pt'}", *data, "data.workers=0", "device=cpu", f"out={tmp_path / 'eval'}",
        *(f"evaluate.{option}" for option in options),
    ])  # fmt: skip
    (annotations,) = root.rglob("instances_val.json")
    names = {image["id"]: image["file_name"] for image in json.loads(annotations.read_text())["images"]}
    expected = sorted(
        (names[row["image_id"]], IDS[row["category_id"] - 1], row["score"], *row["bbox"])
        for row in json.loads((tmp_path / "eval" / "detections.json").read_text())
        if min(row["bbox"][2:]) > 0
    )
    assert len(expected) > 50 and len({row[1] for row in expected}) > 1
    for batch_size in ("1", "4", "null"):
        more = (*options, f"batch_size={batch_size}", "draw=false")
        _, images, detections = found(folder, annotations.parents[1] / "val", tmp_path / batch_size, *more)
        names = {image["id"]: image["file_name"] for image in images["images"]}
        rows = sorted((names[r["image_id"]], r["category_id"], r["score"], *r["bbox"]) for r in detections)
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        assert np.abs(np.array([row[2:] for row in rows]) - [row[2:] for row in expected]).max() < 1e-3


def test_every_picture_has_its_own_files_and_they_agree(folder, tmp_path, capsys) -> None:
    for name in ("one/same.jpg", "two/same.jpg", "two/same.png", "two/Other.BMP", "two/still.gif"):
        picture(tmp_path / "pictures" / name, 60, 80)
    out, images, detections = found(folder, tmp_path / "pictures", tmp_path / "out")
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "detections.json", "images.json", "labels/one/same.txt", "labels/two/Other.txt", "labels/two/same.jpg.txt",
        "labels/two/same.png.txt", "labels/two/still.txt", "one/same.jpg", "two/Other.BMP", "two/same.jpg",
        "two/same.png", "two/still.png",
    ]  # fmt: skip
    assert [(image["id"], image["file_name"]) for image in images["images"]] == [
        (1, "one/same.jpg"), (2, "two/Other.BMP"), (3, "two/same.jpg"), (4, "two/same.png"), (5, "two/still.gif"),
    ]  # fmt: skip
    assert [category["id"] for category in images["categories"]] == IDS
    for name in ("two/same.png", "two/Other.BMP"):
        before = cv2.imread(str(tmp_path / "pictures" / name))
        after = cv2.imread(str(out / name))
        assert after.shape == before.shape and (after != before).any(), "nothing was drawn"
    of_png = [IDS.index(row["category_id"]) for row in detections if row["image_id"] == 4]
    labels = np.loadtxt(out / "labels" / "two" / "same.png.txt", ndmin=2)
    assert len(of_png) > 5 and labels[:, 0].tolist() == of_png
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"5 images, {len(detections)} detections, in {out}", "a pace of images that finish together"
    less = ["save_json=false", "draw=false", "device=cpu", "batch_size=8", f"out={tmp_path / 'less'}"]
    predict([f"ckpt={folder / 'random.pt'}", f"source={tmp_path / 'pictures'}", *less])
    assert [path.name for path in (tmp_path / "less").iterdir()] == ["labels"]


def test_a_video_becomes_a_drawn_video_and_results_by_frame(folder, tmp_path, capsys) -> None:
    clip = video(tmp_path / "clip.avi", 11, size=(96, 64))
    out, images, detections = found(folder, clip, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["clip.mp4", "detections.json", "images.json"]
    assert [(image["id"], image["frame"]) for image in images["images"]] == [(n, n) for n in range(1, 12)]
    assert {image["file_name"] for image in images["images"]} == {"clip.avi"} and detections
    assert re.search(r"^11 images, .*; [.\d]+ ms per image$", capsys.readouterr().out, re.MULTILINE)
    drawn = cv2.VideoCapture(str(out / "clip.mp4"))
    assert drawn.get(cv2.CAP_PROP_FPS) == 10 and drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 11
    assert drawn.read()[1].shape == (64, 96, 3)


def test_what_was_found_in_a_video_that_ends_early_is_kept(folder, tmp_path, caplog) -> None:
    whole = video(tmp_path / "whole.avi", 20, size=(640, 480)).read_bytes()
    (tmp_path / "half.avi").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"half\.avi ends after \d+ of 20 frames\. fix: "):
        found(folder, tmp_path / "half.avi", tmp_path / "out", "draw=false")
    images = json.loads((tmp_path / "out" / "images.json").read_text())["images"]
    assert 2 < len(images) < 18
    _, again, _ = found(folder, tmp_path / "half.avi", tmp_path / "skip", "draw=false", "on_error=skip")
    assert again["images"] == images and f"ends after {len(images)} of 20 frames" in caplog.text


def test_a_picture_at_an_address_has_its_own_name_and_no_file_has_the_password(folder: Path, tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "b.png", 60, 80)
    _, _, expected = found(folder, tmp_path / "pictures" / "b.png", tmp_path / "by path")
    with serving_folder(tmp_path / "pictures") as port:
        address = f"'http://me:secret@127.0.0.1:{port}/b.png?key=secret'"
        out, images, detections = found(folder, address, tmp_path / "out")
    assert detections == expected and [image["file_name"] for image in images["images"]] == ["b.png"]
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert set(files) == {"b.png", "detections.json", "images.json", "labels/b.txt"}
    assert not any(b"secret" in path.read_bytes() for path in files.values())


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "pictures" / "a.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    shutil.copy(folder / "random.pt", tmp_path)
    for given, message in (
        (["model.weights=a.weights"], "model.weights does not say which network. fix: model.cfg="),
        (["ckpt=random.pt", "names=two.names"], "ckpt and names exclude one another"),
        (["ckpt=random.pt", "source=nowhere"], "source=nowhere is not a file or folder"),
        (["ckpt=random.pt", "out=pictures"], "pictures/a.png is there already and would be overwritten. fix: out="),
        (["ckpt=random.pt", "out=/proc/nothing"], "/proc/nothing cannot be written"),
        (["ckpt=random.pt", "out=found"], "broken.png is not an image of a known type"),
    ):
        with pytest.raises((UserError, ModelError), match=message):
            predict(["source=pictures", "device=cpu", *given])
    assert not (tmp_path / "runs").exists()


def test_no_error_shows_a_password(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        ("source=rtsp://me:secret@h/a?b=1", "cannot read the option source=rtsp://***@h/a?b=1.\nfix"),
        ("sources=rtsp://me:secret@h/a debug=true", "sources=rtsp://***@h/a is not an option here.\nfix: source="),
    ):
        monkeypatch.setattr(sys, "argv", ["predict.py", "ckpt=random.pt", *given.split()])
        with pytest.raises(SystemExit):
            start("predict")
        said = capsys.readouterr().err
        assert message in said and "secret" not in said


def test_no_program_overwrites_what_it_has_not_made(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels" / "model").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    for name in ("labels/a.txt", "labels/model/a.yaml", "n.pt", "n.pt2", "n.weights", "n.cfg", "config.yaml"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "linked" / "labels").symlink_to(tmp_path / "labels")
    (tmp_path / "link.pt2").symlink_to(tmp_path / "nowhere")
    picture(tmp_path / "pictures" / "a.png")
    ckpt, before = f"ckpt={folder / 'random.pt'}", {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    model = ["model=yolov3-tiny", "model.width=0.125"]
    drawn = drawn_in(folder)
    for program, *options in (
        ("predict", ckpt, f"source={tmp_path / 'pictures'}", "out=."),
        ("predict", ckpt, f"source={tmp_path / 'pictures'}", "out=linked"),
        ("eval", ckpt, *drawn, "out=."),
        ("export", ckpt, "format=torch", "out=n.pt2"),
        ("export", ckpt, "format=torch", "out=link.pt2"),
        ("convert", ckpt, "out=n.weights"),
        ("convert", ckpt, "out=new.weights", "cfg=n.cfg"),
        ("anchors", *model, *drawn, "out=labels/model/a.yaml"),
        ("check_data", *model, *drawn, "out=."),
        ("train", *model, *drawn, "run_dir=.", "train.batch_size=2", "train.micro_batch_size=2", "device=cpu"),
    ):
        with pytest.raises(TrainError, match=r" is there already and would be overwritten\. fix: "):
            pkgutil.resolve_name(PROGRAMS[program].function)(options_of(program, options))
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.release
def test_the_dog_of_darknet(shared_dir, tmp_path, monkeypatch, capsys) -> None:
    """The seven detections of shared_dir/darknet/README.md; a COCO json of names brings its ids."""
    network, names = shared_dir / "darknet" / "yolo-fastest-1.1", shared_dir / "data" / "coco128" / "annotations"
    monkeypatch.chdir(tmp_path)
    predict([
        f"model.cfg={network / 'yolo-fastest-1.1.cfg'}", "resize=stretch", "image_size=320", "device=cpu",
        f"model.weights={network / 'yolo-fastest-1.1.weights'}", f"names={names / 'instances_val2017.json'}",
        f"source={shared_dir / 'darknet' / 'dog.jpg'}",
    ])  # fmt: skip
    (out,) = (tmp_path / "runs" / "predict").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"1 image, 7 detections, in {out}"
    names = {c["id"]: c["name"] for c in json.loads((out / "images.json").read_text())["categories"]}
    assert names[90] == "toothbrush"
    rows = [(names[r["category_id"]], round(r["score"], 3)) for r in json.loads((out / "detections.json").read_text())]
    assert rows == [
        ("car", 0.897), ("dog", 0.654), ("cat", 0.567), ("bicycle", 0.529), ("car", 0.444), ("bicycle", 0.313),
        ("person", 0.312),
    ]  # fmt: skip
    assert cv2.imread(str(out / "dog.jpg")).shape == (576, 768, 3)
    assert len((out / "labels" / "dog.txt").read_text().splitlines()) == 7


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_folder_keeps_what_was_found(by, folder, tmp_path, monkeypatch) -> None:
    for number in range(40):
        picture(tmp_path / "pictures" / f"{number:02d}.png", 60, 80)
    prepare = InputFit.prepare

    def interrupted(self: InputFit, frame: Frame) -> Any:
        if frame.medium.name == "20.png":
            signal.raise_signal(by)
        return prepare(self, frame)

    monkeypatch.setattr(InputFit, "prepare", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        found(folder, tmp_path / "pictures", tmp_path / "out", "workers=1")
    assert ended.value.args == (() if by == signal.SIGINT else (128 + by,))
    images = json.loads((tmp_path / "out" / "images.json").read_text())["images"]
    drawn = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert drawn == [image["file_name"] for image in images] and 0 < len(drawn) < 40
