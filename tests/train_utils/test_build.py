"""``model.cfg=`` with any .cfg, in every program; files in the place of names."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.cli.program import start as start_program
from conf.options import option
from data import Exif, Medium
from data.media import read_picture
from models import Darknet, save_darknet_weights
from tests.models.cfg_writer import cfg, conv, head
from train_utils.inference import open_checkpoint
from train_utils.inference.detector import Detector

SHAPES = [
    "data=shapes", "data.root=shapes", "data.index_dir=index", "data.workers=0",
    "data.shapes={train_images: 6, val_images: 2, image_size: 64}",
]  # fmt: skip
PLAIN = "logger.pictures=false"
SMALL = cfg(conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), head(0, 1))


PROGRAMS = {  # with the other options that each needs
    "train": [*SHAPES, *"train.epochs=1 train.batch_size=2 train.image_size=64 device=cpu".split(), PLAIN],
    "eval": [*SHAPES, "device=cpu"],
    "predict": ["source=picture.png", "device=cpu", "out=found", "draw=false"],
    "export": ["format=torch"],
    "anchors": [*SHAPES, "rounds=5", "image_size=64"],
    "check_data": [*SHAPES, "image_size=64", "pictures=0", "out=report"],
    "convert": ["out=a.pt"],
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``<program> <arguments>`` says in an empty folder: an error, or ""."""
    monkeypatch.chdir(tmp_path)

    def started(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *PROGRAMS[name], *arguments])
        try:
            start_program(name)
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err.strip().removeprefix("error: ").replace("\nfix: ", " fix: ")
        return ""

    return started


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cfg_and_its_weights_are_enough(name: str, start: Callable[..., str], tmp_path: Path) -> None:
    classes = 5 if "data=shapes" in PROGRAMS[name] else 2
    (tmp_path / "a.cfg").write_text(SMALL)
    save_darknet_weights(Darknet(tmp_path / "a.cfg", classes), tmp_path / "a.weights")
    cv2.imwrite("picture.png", np.zeros((64, 48, 3), np.uint8))
    assert start(name, "model.cfg=a.cfg", "model.weights=a.weights") == ""


def test_an_option_read_back_by_shell_and_hydra_is_what_it_was() -> None:
    generator, parser = np.random.default_rng(0), OverridesParser.create()
    characters = [*"ab/ =,#{}[]()'\"\\~$*?;&|<>!:%@+-.^`üж\t"]
    values = characters + [f"a{character}b" for character in characters]
    values += ["".join(generator.choice(characters, generator.integers(1, 7))) for _ in range(300)]
    for value in values:
        (typed,) = shlex.split(option("key", value))
        assert parser.parse_override(typed).value() == value


@pytest.mark.release
@pytest.mark.parametrize("name", ["eval", "predict", "export", "convert"])
def test_a_file_that_is_no_checkpoint_is_told_what_is_read(name: str, start: Callable[..., str]) -> None:
    cv2.imwrite("picture.png", np.zeros((64, 48, 3), np.uint8))
    for file in ("a.onnx", "a.pt2", "a.weights", "a.cfg"):
        Path(file).write_bytes(b"something")
        said = start(name, f"ckpt={file}", *["out=b.weights"] * (name == "convert"))
        if name == "predict" and file in ("a.onnx", "a.pt2"):
            assert said.startswith(f"{file} cannot be read (") and said.endswith(". fix: a file of export.py"), said
            continue
        assert said.startswith(f"{file} is not a checkpoint: ckpt takes run folders and their .pt files")
        assert ("exported from>" in said) == (file in ("a.onnx", "a.pt2")), said


def test_the_closing_line_of_a_training_can_be_pasted_into_a_shell(start, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.cfg").write_text(SMALL)
    run_dir = "my run, übung"
    assert start("train", "model.cfg=a.cfg", option("run_dir", run_dir).strip("'")) == ""
    log = (tmp_path / run_dir / "train.log").read_text(encoding="utf-8")
    (command,) = (line.partition("python ")[2] for line in log.splitlines() if "python eval.py" in line)
    program, *typed = shlex.split(command)
    assert program == "eval.py"
    monkeypatch.setattr(sys, "argv", [program, *typed, "device=cpu"])
    start_program("eval")
    assert "AP" in capsys.readouterr().out


def test_batch_norm_of_one_value_is_refused_before_a_run_folder_is_made(start, tmp_path) -> None:
    options = ["train.image_size=16", "train.multi_scale=[0.5,1]"]
    (tmp_path / "a.cfg").write_text(SMALL)
    said = start("train", "model.cfg=a.cfg", "train.batch_size=1", *options)
    assert "fix: train.batch_size=2, a larger train.image_size" in said
    assert not (tmp_path / "runs").exists()
    frozen = ["train", "model.cfg=a.cfg", "train.batch_size=1", "model.freeze=3", *options]
    assert "a.cfg, whose weights are random. fix: model.freeze=0, or model.weights=" in start(*frozen)
    save_darknet_weights(Darknet(tmp_path / "a.cfg"), tmp_path / "a.weights")
    assert not start(*frozen, "model.weights=a.weights")  # its statistics stay


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
def test_rectangular_networks_detect_at_their_own_size(resize: str, start: Callable[..., str], tmp_path: Path) -> None:
    text = SMALL.replace("width=64", "width=96")
    (tmp_path / "a.cfg").write_text(text)
    torch.manual_seed(0)
    network = Darknet(tmp_path / "a.cfg").eval()
    save_darknet_weights(network, tmp_path / "a.weights")
    given = {"model.cfg": "a.cfg", "model.weights": "a.weights", "resize": resize, "rect": False, "confidence": 0.2}
    detector = Detector(**given)
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    images = torch.from_numpy(picture[..., ::-1].copy()).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        (expected,) = detector._predictor.postprocess(network(images))
    assert len(expected)
    np.testing.assert_allclose(detector(picture).scores, expected[:, 4], rtol=1e-4)
    np.testing.assert_allclose(detector(picture).boxes_xyxy[:, 0], expected[:, 0].clamp(0, 96), atol=1e-2)
    shape = detector._predictor.fit.prepare(
        read_picture(Medium(Path(), "0", image=np.zeros((50, 50, 3), np.uint8)), Exif.apply)
    )
    assert shape.canvas.shape == (64, 96, 3)
    assert Detector(**given, image_size=[32, 48])._predictor.network.image_size == [32, 48]


@pytest.mark.release
def test_rectangular_networks_in_the_other_programs(start: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text(SMALL.replace("width=64", "width=96"))
    save_darknet_weights(Darknet(tmp_path / "a.cfg", 5), tmp_path / "a.weights")
    given = ["model.cfg=a.cfg", "model.weights=a.weights"]
    for rect in ("true", "false"):
        assert not start("eval", *given, f"evaluate.rect={rect}")
    (tmp_path / "five.names").write_text("a\nb\nc\nd\ne\n")
    assert not start("convert", "model.cfg=a.cfg", "weights=a.weights", "names=five.names")
    assert open_checkpoint.open_checkpoint("a.pt").image_size == [64, 96]
    assert not start("export", "ckpt=a.pt")
    assert "evaluate.image_size=[64,97]" in start("eval", *given, "evaluate.image_size=[64,97]")
    assert "fix: train.image_size=[64,96]" in start("train", "model.cfg=a.cfg")
    own = ["model.cfg=a.cfg", "train.batch_size=2", "train.epochs=1", "augment.mosaic=1"]
    assert "fix: train.image_size=[56,96]" in start("train", *own, "train.image_size=[50,96]")
    assert "train.rect" in start("train", *own, "train.image_size=[64,96]", "train.rect=true")
    assert not start("train", *own, "train.image_size=[64,96]", "run_dir=run", "logger.pictures=true")
    assert open_checkpoint.open_checkpoint("run").image_size == [64, 96]
    assert not start("eval", "ckpt=run")
