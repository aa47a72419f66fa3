"""predict.py finds what an evaluation finds and writes it in all its formats."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from conf.batches import open_split
from conf.checkpoints import complete_from_checkpoint, model_or_checkpoint
from conf.entry import compose
from conf.network import model_from_checkpoint
from conf.programs import run
from conf.schema import EvalConfig, PredictConfig, TrainConfig
from data import DataFormat, Frame, InputFit, ShapesConfig, cut_at_edges, ensure_shapes
from data.shapes import CLASSES
from eval import Evaluator, evaluate
from models import Darknet, save_darknet_weights
from predict import predict
from tests.data.tagged import stored_picture, upright, write_set
from tests.data.test_media import picture, video
from tests.models.cfg_writer import cfg, conv, head
from tests.random_network import save_random_network
from tests.test_programs import start
from train_utils.checkpoint import load_checkpoint
from train_utils.distributed import init_distributed_mode

IDS = [30, 10, 20, 50, 40]  # category ids that are not the order of the classes
EVERYTHING = ["confidence=0.001", "nms_iou=0.6", "multi_label=true", "device=cpu"]  # as conf/evaluate/coco.yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn pictures, and the checkpoint of an untrained network."""
    path = tmp_path_factory.mktemp("predict")
    ensure_shapes(path / "shapes", ShapesConfig(train_images=3, val_images=9, image_size=64))
    config = train_config(path)
    names = open_split(config.data, "val", init_distributed_mode("cpu", 60)).names
    save_random_network(path / "random.pt", config, names, IDS, seed=1, gain=10)
    return path


def train_config(folder: Path) -> TrainConfig:
    shapes = "{train_images: 3, val_images: 9, image_size: 64}"
    return compose(
        "train",
        TrainConfig,
        [
            "data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0",
            f"data.shapes={shapes}", "model=yolov3-tiny", "model.width=0.125",
            "train.image_size=96",
        ],
    )  # fmt: skip


def found(folder: Path, source: Path | str, out: Path, *more: str) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, images.json and detections.json of a prediction."""
    options = [f"ckpt={folder / 'random.pt'}", f"source={source}", f"out={out}", *EVERYTHING, *more]
    out = predict(compose("predict", PredictConfig, options, model_or_checkpoint))
    return out, *(json.loads((out / f"{name}.json").read_text()) for name in ("images", "detections"))


@pytest.mark.parametrize(
    "options",
    [["resize=letterbox"], ["resize=stretch"], ["merge_nms=true", "multi_label=true"]],
)
def test_predictions_are_those_of_an_evaluation_at_any_batch_size(
    folder: Path, options: list[str], tmp_path: Path
) -> None:
    """The last bits may differ: those of a convolution depend on the number of images."""
    config = train_config(folder)
    world = init_distributed_mode("cpu", 60)
    annotations = open_split(config.data, "val", world)
    confidence = 0.7
    changes = [f"evaluate.{option}" for option in (*options, f"confidence={confidence}")]
    protocol = compose("train", TrainConfig, changes).evaluate
    model, _ = model_from_checkpoint(load_checkpoint(folder / "random.pt"))
    evaluation = Evaluator(annotations, protocol, 96, model, config.data, world)(model)
    assert evaluation is not None
    file_names = {number: annotations.file_name(i) for i, number in enumerate(annotations.image_ids.tolist())}
    expected = sorted(
        (file_names[int(row["image_id"])], IDS[row["class"]], float(row["score"]), *row["box_xywh"].tolist())
        for row in evaluation.detections
        if (row["box_xywh"][2:] > 0).all()
    )
    assert len(expected) > 50 and len({row[1] for row in expected}) > 1
    for batch_size in ("1", "4", "null") if len(options) == 1 else ("4",):
        more = (*options, f"batch_size={batch_size}", "draw=false", f"confidence={confidence}")
        _, images, detections = found(folder, annotations.image_root, tmp_path / batch_size, *more)
        names = {image["id"]: image["file_name"] for image in images["images"]}
        rows = sorted((names[r["image_id"]], r["category_id"], r["score"], *r["bbox"]) for r in detections)
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        assert np.abs(np.array([row[2:] for row in rows]) - [row[2:] for row in expected]).max() < 1e-3


def test_every_picture_has_its_own_files_and_they_agree(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    table = np.loadtxt(out / "labels" / "two" / "same.png.txt", ndmin=2)
    rows = np.array([(*r["bbox"], IDS.index(r["category_id"]), r["score"]) for r in detections if r["image_id"] == 4])
    table, rows = table[np.lexsort((table[:, 0], -table[:, 5]))], rows[np.lexsort((rows[:, 4], -rows[:, 5]))]
    assert len(table) == len(rows) > 5 and table[:, 0].tolist() == rows[:, 4].tolist()
    assert np.abs(np.sort(table[:, 3]) - np.sort(rows[:, 2] / 80)).max() < 1e-5
    assert np.abs(np.sort(table[:, 2]) - np.sort((rows[:, 1] + rows[:, 3] / 2) / 60)).max() < 1e-5
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"5 images, {len(detections)} detections, in {out}; ")
    less = [f"ckpt={folder / 'random.pt'}", f"source={tmp_path / 'pictures'}", f"out={tmp_path / 'less'}"]
    less += ["save_json=false", "draw=false", "device=cpu"]
    predict(compose("predict", PredictConfig, less, model_or_checkpoint))
    assert sorted(path.name for path in (tmp_path / "less").iterdir()) == ["labels"]


SETS = ("tagged", "upright", "stored")


def test_tagged_pictures_give_what_the_same_pictures_saved_upright_give(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both predict.py and eval.py turn tagged pictures, except with exif=ignore."""
    for name in SETS:
        write_set(tmp_path / name, DataFormat.coco, "png", name != "stored")
        content = json.loads((tmp_path / name / "set.json").read_text())
        content["categories"] = [{"id": number, "name": kind} for number, kind in enumerate(CLASSES, start=1)]
        (tmp_path / name / "set.json").write_text(json.dumps(content))
        for tag in range(1, 9) if name != "tagged" else ():  # the same picture without a tag
            image = upright(stored_picture(), tag) if name == "upright" else stored_picture()
            assert cv2.imwrite(str(tmp_path / name / "images" / f"{tag}.png"), image[..., ::-1])
    results = {}
    for name, more in (("tagged", ()), ("upright", ()), ("stored", ()), ("tagged", ("exif=ignore",))):
        out, images, detections = found(
            folder, tmp_path / name / "images", tmp_path / "out" / f"{name}{len(more)}", *more
        )
        drawn = {path.name: cv2.imread(str(path), cv2.IMREAD_UNCHANGED).tolist() for path in out.glob("*.png")}
        labels = {path.name: path.read_text() for path in (out / "labels").iterdir()}
        results[name, *more] = (images, detections, labels, drawn)
        capsys.readouterr()
    assert results["tagged",] == results["upright",]
    assert results["tagged", "exif=ignore"] == results["stored",]
    sizes = {image["id"]: (image["height"], image["width"]) for image in results["tagged",][0]["images"]}
    assert sizes == {tag: (64, 40) if tag > 4 else (40, 64) for tag in range(1, 9)} and results["tagged",][1]

    scored = []
    for name in SETS:
        options = [f"ckpt={folder / 'random.pt'}", "data=coco", f"data.root={tmp_path / name}", "data.workers=0"]
        options += ["data.val={annotations: set.json, images: images}", f"data.index_dir={tmp_path / 'index'}"]
        options += ["device=cpu", "evaluate.image_size=96", f"out={tmp_path / 'eval' / name}"]
        evaluate(compose("eval", EvalConfig, options, complete_from_checkpoint))
        scored.append(json.loads((tmp_path / "eval" / name / "detections.json").read_text()))
        assert ("turned upright by their EXIF tag (7)" in capsys.readouterr().out) == (name == "tagged")
    assert scored[0] == scored[1] != scored[2]


def test_a_video_becomes_a_drawn_video_and_results_by_frame(folder: Path, tmp_path: Path) -> None:
    clip = video(tmp_path / "clip.avi", 11, size=(96, 64))
    out, images, detections = found(folder, clip, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["clip.mp4", "detections.json", "images.json"]
    assert [(image["id"], image["frame"]) for image in images["images"]] == [(n, n) for n in range(1, 12)]
    assert {image["file_name"] for image in images["images"]} == {"clip.avi"} and detections
    drawn = cv2.VideoCapture(str(out / "clip.mp4"))
    assert drawn.get(cv2.CAP_PROP_FPS) == 10 and drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 11
    assert drawn.read()[1].shape == (64, 96, 3)


@pytest.mark.slow
def test_what_does_not_fit_is_said_in_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "pictures" / "a.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    shutil.copy(folder / "random.pt", tmp_path)
    (tmp_path / "two.names").write_text("one\ntwo\n")
    (tmp_path / "three.names").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.cfg").write_text(cfg(conv(8, 3, 2), head(0)))
    save_darknet_weights(Darknet("a.cfg"), "a.weights")
    weights = ["model=yolov3-tiny", "model.weights=a.weights"]
    for arguments, said in (
        (["ckpt=random.pt"], "source has no value"),
        (["source=pictures"], "no weights are given. fix: ckpt="),
        (["source=pictures", "model.weights=a.weights"], "model.weights does not say which network. fix: model.cfg="),
        (["source=pictures", "ckpt=random.pt", *weights], "ckpt and model exclude one another"),
        (["source=pictures", "ckpt=random.pt", "names=two.names"], "ckpt and names exclude one another"),
        (["source=nowhere", "ckpt=random.pt"], "source=nowhere: there is no such file or folder"),
        (["source=pictures", "ckpt=random.pt", "image_size=50"], "image_size=50 is not a multiple"),
        (["source=pictures", "ckpt=random.pt", "batch_size=0"], "batch_size must be 1 or more, or null, got 0"),
        (["source=pictures", "ckpt=random.pt", "nms_iou=1.5"], "nms_iou must lie in 0..1, got 1.5"),
        (["source=87", "ckpt=random.pt"], "camera87 cannot be opened. fix: check that it is on"),
        (["source=pictures", "ckpt=random.pt", "out=pictures"], "out=pictures would overwrite"),
        (["source=pictures", "ckpt=random.pt", "out=/proc/nothing"], "/proc/nothing cannot be written"),
        (["source=pictures", *weights, "names=no.names"], "the class names no.names cannot be read"),
        (["source=pictures", "ckpt=random.pt", "out=found"], "broken.png is not an image of a known type"),
    ):
        assert said in error_of(monkeypatch, capsys, *arguments)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = error_of(monkeypatch, capsys, "ckpt=random.pt", "source=b")
    assert "predict.py runs in one process, but 2 were started" in said


def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["predict.py", "device=cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        run("predict")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2 and len(lines) == 1, lines
    return lines[0]


@pytest.mark.slow
def test_the_dog_of_darknet_as_users_start_it(shared_dir: Path, tmp_path: Path) -> None:
    """The seven detections of shared_dir/darknet/README.md, from Darknet's own files."""
    network = shared_dir / "darknet" / "yolo-fastest-1.1"
    done = start(
        tmp_path, "predict.py", f"model.cfg={network / 'yolo-fastest-1.1.cfg'}", "resize=stretch",
        f"model.weights={network / 'yolo-fastest-1.1.weights'}", f"names={network / 'coco.names'}", "image_size=320",
        f"source={shared_dir / 'darknet' / 'dog.jpg'}", "device=cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    (out,) = (tmp_path / "runs" / "predict").iterdir()
    assert done.out.splitlines()[-1].startswith(f"1 images, 7 detections, in {out}; ")
    names = {c["id"]: c["name"] for c in json.loads((out / "images.json").read_text())["categories"]}
    rows = [(names[r["category_id"]], round(r["score"], 3)) for r in json.loads((out / "detections.json").read_text())]
    assert rows == [
        ("car", 0.897), ("dog", 0.654), ("cat", 0.567), ("bicycle", 0.529), ("car", 0.444), ("bicycle", 0.313),
        ("person", 0.312),
    ]  # fmt: skip
    assert cv2.imread(str(out / "dog.jpg")).shape == (576, 768, 3)
    assert len((out / "labels" / "dog.txt").read_text().splitlines()) == 7


@pytest.mark.slow
def test_image_and_category_ids_are_coco_s_own(shared_dir: Path, tmp_path: Path) -> None:
    """Image ids come from the file names, category ids from names=<a COCO json>.

    shared_dir/darknet holds OpenCV's detections on the same pictures in that form, not clipped to
    the picture.
    """
    network, coco = shared_dir / "darknet" / "yolo-fastest-1.1", shared_dir / "data" / "coco128"
    chosen = sorted((coco / "images" / "val2017").iterdir())[:8]
    (tmp_path / "list.txt").write_text("\n".join(map(str, chosen)))
    options = [
        f"model.cfg={network / 'yolo-fastest-1.1.cfg'}", f"source={tmp_path / 'list.txt'}",
        f"model.weights={network / 'yolo-fastest-1.1.weights'}", f"out={tmp_path}", "device=cpu", "resize=stretch",
        f"names={coco / 'annotations' / 'instances_val2017.json'}", "multi_label=true", "draw=false",
    ]  # fmt: skip
    out = predict(compose("predict", PredictConfig, options, model_or_checkpoint))
    images = json.loads((out / "images.json").read_text())["images"]
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    assert sorted(sizes) == [int(path.stem) for path in chosen]
    theirs = json.loads((network / "opencv_coco128_val_results.json").read_text())
    theirs = [row for row in theirs if row["score"] > 0.25 and row["image_id"] in sizes]
    ours = json.loads((out / "detections.json").read_text())

    def key(row: dict[str, Any]) -> tuple[int, int, float]:
        return row["image_id"], row["category_id"], round(row["score"], 3)

    assert len(ours) == len(theirs) > 20
    for mine, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        assert key(mine)[:2] == key(other)[:2] and abs(mine["score"] - other["score"]) < 1e-4
        x, y, w, h = other["bbox"]
        corners = cut_at_edges(np.array([[x, y, x + w, y + h]]), sizes[mine["image_id"]])[0]
        assert np.abs(np.array(mine["bbox"]) - [*corners[:2], *(corners[2:] - corners[:2])]).max() < 0.05


def test_ctrl_c_in_a_folder_keeps_what_was_found(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for number in range(40):
        picture(tmp_path / "pictures" / f"{number:02d}.png", 60, 80)
    prepare = InputFit.prepare

    def interrupted(self: InputFit, frame: Frame) -> Any:
        if frame.medium.name == "20.png":
            signal.raise_signal(signal.SIGINT)
        return prepare(self, frame)

    monkeypatch.setattr(InputFit, "prepare", interrupted)
    with pytest.raises(SystemExit) as ended:
        found(folder, tmp_path / "pictures", tmp_path / "out", "workers=1")
    assert ended.value.code == 128 + signal.SIGINT and "stopped by SIGINT" in capsys.readouterr().err
    images = json.loads((tmp_path / "out" / "images.json").read_text())["images"]
    drawn = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert drawn == [image["file_name"] for image in images] and 0 < len(drawn) < 40
