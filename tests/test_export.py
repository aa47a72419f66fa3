"""export.py: its files, and what it leaves behind after an error."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from conf import ConfigError
from conf.compose import compose
from conf.schema import TrainConfig
from data.shapes import CLASSES
from export import export
from models import Darknet, ModelError, save_darknet_weights, zoo_cfg
from models.export import METADATA_FILE, DetectorGraph, write_torch
from tests.random_network import save_random_network

MODEL = ["model=yolov3-tiny", "model.width=0.125"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "any.pt"
    config = compose("train", TrainConfig, [*MODEL, "train.image_size=96"])
    save_random_network(path, config, CLASSES, [1, 2, 3, 4, 5], seed=0, gain=30)
    return path


def test_what_does_not_fit_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    for given, message in (
        ([], "no weights are given. fix: ckpt="),
        (["ckpt=any.pt", *MODEL], "ckpt and model exclude one another"),
        (["ckpt=any.pt", "image_size=[50,64]"], r"fix: image_size=\[64,64\]"),
        (["ckpt=any.pt", "out=model.pt2"], "fix: out=model.onnx"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            export(given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match=f"fix: uv pip install --python {sys.executable} onnxscript"):
        export(["ckpt=any.pt"])
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_a_file_appears_only_if_it_agrees(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"ckpt={checkpoint}", "format=torch", f"out={tmp_path / 'new' / 'tiny.pt2'}"]

    def write_another(graph: DetectorGraph, *rest: object) -> None:
        wrong = copy.deepcopy(graph)
        wrong.network.head_convolutions(wrong.network.heads[0])[0].conv.bias.add_(0.1)
        write_torch(wrong, *rest)

    monkeypatch.setattr("export.write_torch", write_another)
    with pytest.raises(ModelError, match="the file differs from the network"):
        export(options)
    assert not list((tmp_path / "new").iterdir())


def test_a_cfg_for_images_that_are_not_square_is_exported_at_its_size(tmp_path: Path) -> None:
    text = re.sub("height=.*", "height=64", re.sub("width=.*", "width=96", zoo_cfg("yolov3-tiny").read_text(), count=1))
    (tmp_path / "wide.cfg").write_text(text)
    save_darknet_weights(Darknet(tmp_path / "wide.cfg", width=0.125).eval(), tmp_path / "wide.weights")
    options = [f"model.cfg={tmp_path}/wide.cfg", f"model.weights={tmp_path}/wide.weights", *MODEL[1:], "format=torch"]
    extra = {METADATA_FILE: ""}
    torch.export.load(export(options), extra_files=extra)
    assert json.loads(json.loads(extra[METADATA_FILE])["image_size"]) == [64, 96]
    with pytest.raises(ConfigError, match=r"folder\.pt2 is a folder\. fix: out="):
        (tmp_path / "folder.pt2").mkdir()
        export([*options, f"out={tmp_path}/folder.pt2"])


def test_an_archive_refuses_sizes_that_are_no_multiples_of_the_stride(checkpoint: Path, tmp_path: Path) -> None:
    out = export([f"ckpt={checkpoint}", "format=torch", "dynamic_size=true", f"out={tmp_path}/a.pt2"])
    extra = {METADATA_FILE: ""}
    detector = torch.export.load(out, extra_files=extra).module()
    assert detector(torch.rand(1, 3, 64, 160))[0].shape[2] == 4
    with pytest.raises(RuntimeError, match=r"= 80 to be of the form 32\*"):
        detector(torch.rand(1, 3, 64, 80))
    known = json.loads(extra[METADATA_FILE])
    assert (json.loads(known["stride"]), json.loads(known["open"])) == (32, ["height", "width"])


@pytest.mark.slow
def test_an_onnx_file_lies_beside_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copy(checkpoint, tmp_path / "run" / "checkpoints" / "best.pt")
    path = export([f"ckpt={tmp_path / 'run'}", "nms=true", "batch_size=2", "max_detections=50"])
    assert path == tmp_path / "run" / "checkpoints" / "best.onnx"
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".pt"] == [path.name]
    session = onnxruntime.InferenceSession(path)
    known = session.get_modelmeta().custom_metadata_map
    assert json.loads(known["names"]) == list(CLASSES) and json.loads(known["image_size"]) == [96, 96]
    assert known["made_by"].startswith("hydra-yolov3-spp ")
    images = np.random.default_rng(0).random((2, 3, 96, 96), dtype=np.float32)
    boxes, scores, classes, counts = session.run(None, {"images": images})
    assert boxes.shape == (2, 50, 4) and classes.max() <= 4 and counts.min() > 0
    assert (counts == (scores > 0).sum(axis=1)).all()
