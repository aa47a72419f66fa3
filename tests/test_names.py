"""Files, folders and classes whose names are not UTF-8 go through every program."""

import json
import os
import shutil
import sys

import cv2
import numpy as np
import onnx
import pytest
import yaml

from conf.cli.command_line import override
from conf.cli.program import start as start_program
from data.errors import printable
from data.shapes import draw_image
from tests.data.test_media import video
from tests.models.cfg_writer import cfg, conv, head

NAMES = ["caf\udce9", "\U0001f600", "日本"]  # the first is Latin-1 where UTF-8 is meant
CLASSES = [*NAMES, "\ud800"]  # half a letter of UTF-16, which no file can be called


@pytest.mark.release
def test_any_name_goes_through_every_program(tmp_path, monkeypatch, capsys) -> None:
    home = tmp_path / "".join(NAMES)
    images, labels, out = home / "images", home / "labels", home / "out"
    for folder in (images, labels):
        folder.mkdir(parents=True)
    for number, name in enumerate([*NAMES, "plain"]):
        pixels = draw_image(64, np.random.default_rng(number)).image
        (images / f"{name}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
        (labels / f"{name}.txt").write_text(f"{number} .5 .5 .4 .4\n")
        if name != "plain":
            os.rename(video(tmp_path / "clip.avi", 2, size=(96, 64)), images / f"{name} film.avi")
    (home / "data.yaml").write_text(yaml.safe_dump({"train": "images", "val": "images", "names": CLASSES}))
    monkeypatch.chdir(home)

    def start(program: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        start_program(program)

    (home / f"{NAMES[0]}.cfg").write_text(cfg(conv(8, 3, 8), conv(8, 3, 4), head(0, 1, classes=len(CLASSES))))
    network = [override("model.cfg", home / f"{NAMES[0]}.cfg")]
    training = ["train.image_size=64", "train.batch_size=4", "device=cpu", "data.workers=0"]
    start("train", override("data", home), *network, *training, "train.epochs=1")
    (folder,) = (home / "runs" / home.name).iterdir()
    start("train", override("resume", folder), "train.epochs=2", "device=cpu", "logger.pictures=false")
    ckpt, written = override("ckpt", folder), override("out", out)
    scored, checked = home / "scored", home / "checked"
    start("eval", ckpt, override("out", scored), "device=cpu")
    with pytest.raises(SystemExit, match=r"^1$"):  # both sets have the same images
        start("check_data", override("data", home), *network, override("out", checked))
    detecting = [ckpt, "device=cpu", "confidence=0.0001"]
    start("predict", *detecting, override("source", images), written, "save_txt=true")
    start("export", ckpt, "format=torch", override("out", out / f"{home.name}.pt2"))
    weights = shutil.copy(folder / "checkpoints" / "best.pt", out / f"{NAMES[0]}.pt")
    of_weights = [override("model.weights", weights), override("names", home / "data.yaml"), "image_size=64"]
    start("export", *network, *of_weights, override("out", out / f"{home.name}.onnx"))
    assert "was not" not in capsys.readouterr().out, "a plot or the report is missing"
    for path in (folder / "train.log", folder / "report.html", checked / "report.txt"):
        assert all(printable(name) in path.read_text("utf-8") for name in CLASSES), path
    for path in (folder / "train_batch.jpg", folder / "plots" / "val_detections.jpg", checked / "labels.jpg"):
        assert cv2.imdecode(np.fromfile(path, np.uint8), 1) is not None, path
    assert list(json.loads((scored / "per_class.json").read_text())) == list(map(printable, CLASSES))
    content = json.loads((out / "images.json").read_text())
    assert [category["name"] for category in content["categories"]] == list(map(printable, CLASSES))
    assert {image["file_name"] for image in content["images"]} == {path.name for path in images.iterdir()}
    for name in NAMES:
        assert (out / f"{name}.png").stat().st_size and (out / f"{name} film.mp4").stat().st_size
        assert (out / "labels" / f"{name}.txt").is_file()
    metadata = {entry.key: entry.value for entry in onnx.load(out / f"{home.name}.onnx").metadata_props}
    assert json.loads(metadata["names"]) == list(map(printable, CLASSES))
