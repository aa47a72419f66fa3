"""export.py: its files, its output, and what it leaves behind after an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import export as program
from conf.entry import compose
from conf.programs import run
from conf.schema import ExportConfig, TrainConfig
from export import export
from models import Darknet, ModelError, save_darknet_weights, zoo_cfg
from models.export import METADATA_FILE, DetectorGraph, write_torch
from tests.random_network import save_random_network
from tests.test_programs import start

TINY = ["model=yolov3-tiny", "model.width=0.125", "model.weights=tiny.weights"]
NAMES = ["circle", "square", "star"]
Says = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with Darknet weights and names for three classes."""
    save_darknet_weights(Darknet(zoo_cfg("yolov3-tiny"), 3, 0.125), tmp_path / "tiny.weights")
    (tmp_path / "three.names").write_text("\n".join(NAMES) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def error_of(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    """The one sentence that ``export.py <arguments>`` prints to stderr; it may leave no file."""

    def called(*arguments: str) -> str:
        before = set(folder.iterdir())
        monkeypatch.setattr(sys, "argv", ["export.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            run("export")
        lines = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
        assert set(folder.iterdir()) == before
        return lines[0].removeprefix("error: ")

    return called


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no weights are given. fix: ckpt="),
        (["ckpt=nowhere"], "nowhere"),
        (["ckpt=a.pt", *TINY], "ckpt and model exclude one another"),
        ([*TINY, "names=three.names", "opset=9"], "opset must lie in 18..25"),
        ([*TINY, "names=three.names", "nms=true", "candidates=5"], "candidates=5 must not be below max_detections=100"),
        ([*TINY, "names=three.names", "image_size=[64,64,64]"], "[height, width] or null"),
        (
            [*TINY, "names=three.names", "image_size=[50,64]"],
            "not a multiple of the network's stride 32. fix: image_size=[64,64]",
        ),
        ([*TINY, "names=three.names", "out=model.pt2"], "fix: out=model.onnx"),
        ([*TINY, "names=three.names", "out=nowhere/model.onnx"], "nowhere/model.onnx cannot be written"),
    ],
)
def test_what_does_not_fit_is_one_sentence(error_of: Says, arguments: list[str], said: str) -> None:
    assert said in error_of(*arguments)


def test_onnx_without_its_packages_names_the_extra(error_of: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> object | None:
        return None if name == "onnxscript" else object()

    monkeypatch.setattr("importlib.util.find_spec", installed)
    said = error_of(*TINY, "names=three.names")
    assert said == "format=onnx needs the packages of the extra (onnxscript missing). fix: uv sync --extra export"


def test_a_file_is_replaced_only_by_one_that_agrees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tiny.pt2").write_bytes(b"an earlier one")
    options = [*TINY, "names=three.names", "format=torch", "image_size=64"]
    config = compose("export", ExportConfig, options)
    other = DetectorGraph(Darknet(zoo_cfg("yolov3-tiny"), 3, 0.125), None)
    with monkeypatch.context() as patched, pytest.raises(ModelError, match="the export differs from the network"):
        patched.setattr(program, "write_torch", lambda graph, *rest: write_torch(other, *rest))
        export(config)
    assert (folder / "tiny.pt2").read_bytes() == b"an earlier one"
    assert sorted(path.name for path in folder.iterdir()) == ["three.names", "tiny.pt2", "tiny.weights"]
    assert export(config) == Path("tiny.pt2")
    module = torch.export.load("tiny.pt2").module()
    assert [value.shape for value in module(torch.rand(1, 3, 64, 64))] == [(1, 60, 4), (1, 60, 3)]


@pytest.mark.parametrize("file_format", ["torch", "onnx"])
def test_the_printed_lines_run_a_file_of_any_size(
    file_format: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "names=three.names", f"format={file_format}", "image_size=64", "dynamic_size=true"]
    path = export(
        compose("export", ExportConfig, [*options, f"out='my file.{'onnx' if file_format == 'onnx' else 'pt2'}'"])
    )
    lines = "\n".join(line.strip() for line in capsys.readouterr().out.split("run it:\n")[1].splitlines())
    assert "height and width multiples of 32" in lines
    for height, width in ((64, 64), (96, 32)):
        images = torch.rand(1, 3, height, width)
        values = {"images": images if file_format == "torch" else images.numpy()}
        exec(lines, values)
        assert values["boxes_xyxy"].shape[2] == 4
    if file_format == "onnx":
        known = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    else:
        extra = {METADATA_FILE: ""}
        with pytest.raises(RuntimeError, match=r"= 80 to be of the form 32\*"):
            torch.export.load(path, extra_files=extra).module()(torch.rand(1, 3, 64, 80))
        known = json.loads(extra[METADATA_FILE])
    assert (json.loads(known["stride"]), json.loads(known["open"])) == (32, ["height", "width"])


@pytest.mark.slow
def test_the_command_leaves_a_file_that_runs_as_it_says(tmp_path: Path) -> None:
    """A checkpoint in a run folder, another process, and the lines of Python that it prints."""
    config = compose("train", TrainConfig, ["model=yolov3-tiny", "model.width=0.125", "train.image_size=96"])
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save_random_network(tmp_path / "run" / "checkpoints" / "best.pt", config, NAMES, [1, 2, 3], seed=0, gain=30)

    done = start(tmp_path, "export.py", "ckpt=run", "nms=true", "batch_size=2", "max_detections=50")
    assert done.code == 0 and not done.err, done.err
    assert "on drawn pictures, noise and black its boxes are within" in done.out
    path = tmp_path / "run" / "checkpoints" / "best.onnx"
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".pt"] == [path.name]
    known = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(known["names"]) == NAMES and json.loads(known["image_size"]) == [96, 96]
    assert json.loads(known["stride"]) == 32 and known["made_by"].startswith("hydra-yolov3-spp ")

    lines = done.out.split("run it:\n")[1].replace("run/checkpoints", str(path.parent))
    values = {"images": np.random.default_rng(0).random((2, 3, 96, 96), dtype=np.float32)}
    exec("\n".join(line.strip() for line in lines.splitlines()), values)
    assert values["boxes"].shape == (2, 50, 4) and values["classes"].max() <= 2 and values["counts"].min() > 0
    assert (values["counts"] == (values["scores"] > 0).sum(axis=1)).all()
