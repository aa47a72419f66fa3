"""export.py: its files, and an ONNX file in the place of a checkpoint."""

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from conf.entry import compose
from conf.programs import run
from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from data.shapes import CLASSES, draw_image
from eval import evaluate
from export import export
from models import ModelError
from models import export as files
from predict import predict
from tests.models.cfg_writer import cfg, conv, head
from tests.random_network import save_random_network
from tests.test_programs import start

# onnxruntime adds up in another order than torch, so the last bits of pixels and scores differ.
PIXELS, SCORES = 1e-3, 1e-5
SIZE = 96
SIZES = ((64, 64), (40, 200), (300, 90), (96, 96), (17, 23), (130, 131))  # height, width: to shrink and to enlarge
NETWORKS = {  # classes, and options of export.py
    "any": (CLASSES, ["dynamic_batch=true", "dynamic_size=true"]),
    "fixed": (["thing"], []),
}
ZOO = ["model=yolov3-tiny", "model.weights=tiny.weights"]
Error = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many sizes, and two checkpoints, each with its ONNX file."""
    path = tmp_path_factory.mktemp("exported")
    (path / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for height, width in SIZES:
        image = draw_image(512, generator).image[:height, :width]
        cv2.imwrite(str(path / "pictures" / f"{height}x{width}.png"), image)
    (path / "a.cfg").write_text(
        cfg(conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), head(0, 1, 2, anchors="12,16, 30,24, 60,70"))
    )
    for name, (names, options) in NETWORKS.items():
        config = compose("train", TrainConfig, [f"model.cfg={path / 'a.cfg'}", f"train.image_size={SIZE}"])
        save_random_network(path / f"{name}.pt", config, names, range(1, len(names) + 1), seed=3, gain=6)
        given = [f"ckpt={path / name}.pt", *options]
        assert export(given) == path / f"{name}.onnx"
    return path


@pytest.fixture
def error_of(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Error:
    """The one sentence of a program that is called with these arguments; it may leave no file."""
    monkeypatch.chdir(folder)

    def called(program: str, *arguments: str) -> str:
        before = set(folder.iterdir())
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(program)
        lines = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
        assert set(folder.iterdir()) == before
        return lines[0]

    return called


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no weights are given. fix: ckpt="),
        (["ckpt=nowhere"], "nowhere"),
        (["ckpt=any.onnx"], "any.onnx is not a checkpoint"),
        (["ckpt=any.pt", *ZOO], "ckpt and model exclude one another"),
        (["ckpt=any.pt", "image_size=[64,64,64]"], "[height, width] or null"),
        (["ckpt=any.pt", "image_size=[50,64]"], "fix: image_size=[48,64]"),
        (["ckpt=any.pt", "out=model.pt2"], "fix: out=model.onnx"),
    ],
)
def test_what_does_not_fit_is_one_sentence(error_of: Error, arguments: list[str], message: str) -> None:
    assert message in error_of("export", *arguments)


@pytest.mark.parametrize("ckpt", ["any.pt", "any.onnx"])
def test_missing_packages_are_named_with_their_extra(
    ckpt: str, error_of: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ckpt == "any.pt":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
        message = error_of("export", "ckpt=any.pt")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        message = error_of("predict", "ckpt=any.onnx", "source=pictures")
    assert message.endswith("fix: uv sync --extra export")


def test_a_file_is_replaced_only_by_one_that_agrees(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "tiny.pt2"
    options = [f"ckpt={folder}/any.pt", "format=torch", f"out={out}"]
    assert export(options) == out
    before, write = out.read_bytes(), files.write_torch

    def write_another(graph: files.DetectorGraph, *rest: object) -> None:
        wrong = copy.deepcopy(graph)
        wrong.network.head_convolution(wrong.network.heads[0]).conv.bias.add_(0.1)
        write(wrong, *rest)

    monkeypatch.setattr(files, "write_torch", write_another)
    with pytest.raises(ModelError, match="the file differs from the network"):
        export(options)
    assert out.read_bytes() == before and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("file_format", ["torch", "onnx"])
def test_the_printed_lines_run_a_file_of_any_size(
    file_format: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"my file.{'onnx' if file_format == 'onnx' else 'pt2'}"
    options = [f"ckpt={folder}/any.pt", f"format={file_format}", "image_size=64", "dynamic_size=true", f"out='{path}'"]
    assert export(options) == path
    lines = "\n".join(line.strip() for line in capsys.readouterr().out.split("run it:\n")[1].splitlines())
    assert "height and width multiples of 16" in lines
    for height, width in ((64, 64), (96, 32)):
        images = torch.rand(1, 3, height, width)
        values = {"images": images if file_format == "torch" else images.numpy()}
        exec(lines, values)
        assert values["boxes_xyxy"].shape[2] == 4
    if file_format == "torch":
        extra = {files.METADATA_FILE: ""}
        with pytest.raises(RuntimeError, match=r"= 72 to be of the form 16\*"):
            torch.export.load(path, extra_files=extra).module()(torch.rand(1, 3, 64, 72))
        known = json.loads(extra[files.METADATA_FILE])
        assert (json.loads(known["stride"]), json.loads(known["open"])) == (16, ["height", "width"])


@pytest.mark.slow
def test_the_command_leaves_a_file_that_runs_as_it_says(folder: Path, tmp_path: Path) -> None:
    """A checkpoint in a run folder, another process, and the lines of Python that it prints."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copy(folder / "any.pt", tmp_path / "run" / "checkpoints" / "best.pt")
    done = start(tmp_path, "export.py", "ckpt=run", "nms=true", "batch_size=2", "max_detections=50", "confidence=0.01")
    assert done.code == 0 and not done.err, done.err
    path = tmp_path / "run" / "checkpoints" / "best.onnx"
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".pt"] == [path.name]
    known = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(known["names"]) == list(CLASSES) and json.loads(known["image_size"]) == [96, 96]
    assert known["made_by"].startswith("hydra-yolov3-spp ")

    lines = done.out.split("run it:\n")[1].replace("run/checkpoints", str(path.parent))
    values = {"images": np.random.default_rng(0).random((2, 3, 96, 96), dtype=np.float32)}
    exec("\n".join(line.strip() for line in lines.splitlines()), values)
    assert values["boxes"].shape == (2, 50, 4) and values["classes"].max() <= 4 and values["counts"].min() > 0
    assert (values["counts"] == (values["scores"] > 0).sum(axis=1)).all()


def predicted(folder: Path, ckpt: str, *options: str) -> dict[str, np.ndarray]:
    """The detections of predict.py by picture, as rows x1, y1, x2, y2, score, class."""
    out = folder / "predicted"
    shutil.rmtree(out, ignore_errors=True)
    given = [f"ckpt={folder / ckpt}", f"source={folder / 'pictures'}", f"out={out}", "draw=false", "save_txt=false"]
    predict([*given, "device=cpu", *options])
    images, rows = (json.loads((out / f"{name}.json").read_text()) for name in ("images", "detections"))
    found: dict[str, list[list[float]]] = {image["file_name"]: [] for image in images["images"]}
    names = {image["id"]: image["file_name"] for image in images["images"]}
    for row in rows:
        x, y, width, height = row["bbox"]
        found[names[row["image_id"]]].append([x, y, x + width, y + height, row["score"], row["category_id"] - 1])
    return {name: np.array(rows).reshape(-1, 6) for name, rows in found.items()}


@pytest.mark.parametrize(
    ("name", "options", "of_ckpt"),
    [
        ("any", ["batch_size=3", "multi_label=true", "resize=stretch"], []),
        ("any", ["merge_nms=true", "nms_iou=0.3"], []),
        ("fixed", ["resize=stretch", "confidence=0.6"], []),
        ("fixed", ["confidence=0.6", "batch_size=4"], ["rect=false"]),
    ],
)
def test_the_onnx_file_finds_in_predict_what_its_checkpoint_finds(
    name: str, options: list[str], of_ckpt: list[str], folder: Path
) -> None:
    expected = predicted(folder, f"{name}.pt", *options, *of_ckpt)
    ours = predicted(folder, f"{name}.onnx", *options)
    assert ours.keys() == expected.keys() and sum(map(len, expected.values())) >= 10
    for picture, rows in expected.items():
        assert ours[picture].shape == rows.shape and (ours[picture][:, 5] == rows[:, 5]).all(), picture
        assert (np.abs(ours[picture] - rows) <= [PIXELS] * 4 + [SCORES, 0]).all(), picture


def test_eval_scores_the_onnx_file_as_its_checkpoint(folder: Path) -> None:
    ensure_shapes(folder / "shapes", ShapesConfig(train_images=1, val_images=9, image_size=64))
    shapes = ["data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0"]
    shapes += ["data.shapes={train_images: 1, val_images: 9, image_size: 64}", "device=cpu"]
    figures = [
        evaluate([*shapes, f"ckpt={folder / ckpt}", "evaluate.confidence=0.3"]) for ckpt in ("any.pt", "any.onnx")
    ]
    assert figures[1] == pytest.approx(figures[0], abs=1e-6) and max(figures[0].values()) > 0


def test_what_an_onnx_file_cannot_do_is_refused_by_name(folder: Path, error_of: Error) -> None:
    (folder / "broken.onnx").write_bytes(b"no model")
    model = onnx.load(folder / "any.onnx")
    model.metadata_props.add(key="suppression", value="[]")
    onnx.save(model, folder / "nms.onnx")
    del model.metadata_props[:]
    onnx.save(model, folder / "foreign.onnx")
    of_predict = ["source=pictures", "out=never"]
    for program, arguments, message in (
        ("predict", ["ckpt=foreign.onnx", *of_predict], "foreign.onnx cannot be read, or export.py did not write it"),
        ("predict", ["ckpt=broken.onnx", *of_predict], "broken.onnx cannot be read"),
        ("predict", ["ckpt=nowhere.onnx", *of_predict], "nowhere.onnx cannot be read"),
        ("predict", ["ckpt=nms.onnx", *of_predict], "exported with nms=true"),
        ("predict", ["ckpt=any.onnx", "device=cuda", *of_predict], "ckpt=any.onnx runs on the CPU"),
        ("predict", ["ckpt=any.onnx", "image_size=100", *of_predict], "fix: 96"),
        ("predict", ["ckpt=fixed.onnx", "image_size=64", *of_predict], "image_size=64 needs other sizes"),
        ("predict", ["ckpt=fixed.onnx", "rect=true", "resize=letterbox", *of_predict], "rect=True needs other sizes"),
        ("eval", ["ckpt=any.onnx"], "ckpt=any.onnx names no data. fix: add data=..."),
        ("eval", ["ckpt=any.onnx", "data=shapes", "evaluate.precision=bfloat16"], "fix: evaluate.precision=float32"),
    ):
        assert message in (sentence := error_of(program, *arguments)), sentence
