"""An ONNX file in the place of a checkpoint finds what the checkpoint finds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

from conf.checkpoints import complete_detection, complete_from_checkpoint, model_or_checkpoint
from conf.entry import compose
from conf.programs import run
from conf.schema import EvalConfig, ExportConfig, PredictConfig, TrainConfig
from data import ShapesConfig, ensure_shapes
from data.shapes import CLASSES, draw_image
from eval import evaluate
from export import export
from predict import predict
from tests.data.test_images import with_orientation
from tests.models.cfg_writer import cfg, conv, head
from tests.random_network import save_random_network

# onnxruntime adds up in another order than torch, so the last bits of pixels and scores differ.
PIXELS, SCORES = 1e-3, 1e-5
SIZE, STRIDE = 96, 16
SIZES = ((64, 64), (40, 200), (300, 90), (96, 96), (17, 23), (130, 131))  # height, width: to shrink and to enlarge
NETWORKS = {  # classes, and options of export.py
    "any": (CLASSES, ["dynamic_batch=true", "dynamic_size=true"]),
    "fixed": (["thing"], []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many kinds, and two checkpoints, each with its ONNX file."""
    path = tmp_path_factory.mktemp("exported")
    (path / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for height, width in SIZES:
        image = draw_image(512, generator).image[:height, :width]
        cv2.imwrite(str(path / "pictures" / f"{height}x{width}.png"), image)
    cv2.imwrite(str(path / "pictures" / "grey.jpg"), draw_image(120, generator).image.mean(2)[:70])
    cv2.imwrite(str(path / "upright.jpg"), draw_image(160, generator).image[:100])
    (path / "pictures" / "turned.jpg").write_bytes(with_orientation((path / "upright.jpg").read_bytes(), 6))
    (path / "a.cfg").write_text(
        cfg(conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), head(0, 1, 2, anchors="12,16, 30,24, 60,70"))
    )
    for name, (names, options) in NETWORKS.items():
        config = compose("train", TrainConfig, [f"model.cfg={path / 'a.cfg'}", f"train.image_size={SIZE}"])
        save_random_network(path / f"{name}.pt", config, names, range(1, len(names) + 1), seed=3, gain=6)
        given = [f"ckpt={path / name}.pt", *options]
        assert export(compose("export", ExportConfig, given, model_or_checkpoint)) == path / f"{name}.onnx"
    return path


def predicted(folder: Path, ckpt: str, *options: str) -> dict[str, np.ndarray]:
    """The detections of predict.py by picture, as rows x1, y1, x2, y2, score, class."""
    out = folder / "predicted"
    shutil.rmtree(out, ignore_errors=True)
    given = [f"ckpt={folder / ckpt}", f"source={folder / 'pictures'}", f"out={out}", "draw=false", "save_txt=false"]
    predict(compose("predict", PredictConfig, [*given, "device=cpu", *options], complete_detection))
    images, rows = (json.loads((out / f"{name}.json").read_text()) for name in ("images", "detections"))
    found: dict[str, list[list[float]]] = {image["file_name"]: [] for image in images["images"]}
    names = {image["id"]: image["file_name"] for image in images["images"]}
    for row in rows:
        x, y, width, height = row["bbox"]
        found[names[row["image_id"]]].append([x, y, x + width, y + height, row["score"], row["category_id"] - 1])
    return {name: np.array(rows).reshape(-1, 6) for name, rows in found.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], least: int) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        ours = np.array(found[name]).reshape(-1, 6)
        assert ours.shape == rows.shape and (ours[:, 5] == rows[:, 5]).all(), name
        assert (np.abs(ours - rows) <= [PIXELS] * 4 + [SCORES, 0]).all(), name
    assert sum(map(len, expected.values())) >= least


def test_the_onnx_file_finds_in_predict_what_its_checkpoint_finds(folder: Path) -> None:
    for name, options, same in (
        ("any", [], []),
        ("any", ["batch_size=3", "multi_label=true", "resize=stretch"], []),
        ("any", ["merge_nms=true", "nms_iou=0.3"], []),
        ("fixed", ["resize=stretch", "confidence=0.6"], []),
        ("fixed", ["confidence=0.6", "batch_size=4"], ["rect=false"]),
    ):  # fmt: skip
        expected = predicted(folder, f"{name}.pt", *options, *same)
        assert_same(predicted(folder, f"{name}.onnx", *options), expected, least=10)
    merged, best = (predicted(folder, "any.pt", "nms_iou=0.3", f"merge_nms={merge}") for merge in ("true", "false"))
    apart = np.abs(np.concatenate([*merged.values()]) - np.concatenate([*best.values()])).max(0)
    assert (apart[:4] > 1).all() and not apart[4:].any(), "the boxes move; scores, classes and order stay"


def by_score(row: dict[str, float]) -> tuple[float, ...]:
    return row["image_id"], row["category_id"], row["score"]


def test_eval_scores_the_onnx_file_as_its_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_shapes(folder / "shapes", ShapesConfig(train_images=1, val_images=9, image_size=64))
    shapes = ["data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0"]
    shapes += ["data.shapes={train_images: 1, val_images: 9, image_size: 64}", "device=cpu"]
    shapes += ["evaluate.confidence=0.3"]
    results = []
    for ckpt in ("any.pt", "any.onnx"):
        given = [*shapes, f"ckpt={folder / ckpt}", f"out={folder / 'scores' / ckpt}"]
        figures = evaluate(compose("eval", EvalConfig, given, complete_from_checkpoint))
        results.append((figures, json.loads((folder / "scores" / ckpt / "detections.json").read_text())))
    (figures, rows), (of_file, rows_of_file) = results
    assert of_file == pytest.approx(figures, abs=1e-6) and len(rows) == len(rows_of_file) > 50
    for one, other in zip(*(sorted(each, key=by_score) for each in (rows, rows_of_file)), strict=True):
        assert one["category_id"] == other["category_id"] and np.allclose(one["bbox"], other["bbox"], atol=PIXELS)
    assert "exported by hydra-yolov3-spp" in capsys.readouterr().out


@pytest.fixture
def refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The one sentence of a program that is called with these arguments."""
    monkeypatch.chdir(folder)

    def called(program: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(program)
        lines = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
        return lines[0]

    return called


def test_what_an_onnx_file_cannot_do_is_refused_by_name(folder: Path, refused: Callable[..., str]) -> None:
    (folder / "broken.onnx").write_bytes(b"no model")
    model = onnx.load(folder / "any.onnx")
    del model.metadata_props[:]
    onnx.save(model, folder / "foreign.onnx")
    onnx.helper.set_model_props(model, {key: "[]" for key in ("suppression", "made_by")})
    for prop in onnx.load(folder / "any.onnx").metadata_props:
        model.metadata_props.add(key=prop.key, value=prop.value)
    onnx.save(model, folder / "nms.onnx")
    of_predict = ["source=pictures", "out=never"]
    for program, arguments, said in (
        ("predict", ["ckpt=foreign.onnx", *of_predict], "its metadata lack made_by, names"),
        ("predict", ["ckpt=nms.onnx", *of_predict], "exported with nms=true"),
        ("predict", ["ckpt=broken.onnx", *of_predict], "broken.onnx is no ONNX file"),
        ("predict", ["ckpt=nowhere.onnx", *of_predict], "there is no "),
        ("predict", ["ckpt=any.onnx", "device=cuda", *of_predict], "ckpt=any.onnx runs on the CPU"),
        ("predict", ["ckpt=any.onnx", "model.width=0.5", *of_predict], "ckpt and model.width exclude one another"),
        ("predict", ["ckpt=any.onnx", "names=a.names", *of_predict], "ckpt and names exclude one another"),
        ("predict", ["ckpt=any.onnx", "image_size=100", *of_predict], "fix: 96"),
        ("predict", ["ckpt=fixed.onnx", "image_size=64", *of_predict], "image_size=64 needs other sizes"),
        ("predict", ["ckpt=fixed.onnx", "rect=true", "resize=letterbox", *of_predict], "rect=True needs other sizes"),
        ("eval", ["ckpt=any.onnx"], "ckpt=any.onnx names no data. fix: add data=..."),
        ("eval", ["ckpt=any.onnx", "data=shapes", "task=speed"], "task=speed times networks in torch"),
        ("eval", ["ckpt=any.onnx", "data=shapes", "evaluate.precision=bfloat16"], "fix: evaluate.precision=float32"),
        ("eval", ["ckpt=fixed.onnx", "data=shapes", "evaluate.image_size=64"], "evaluate.image_size=64"),
        ("export", ["ckpt=any.onnx"], "any.onnx is not a checkpoint"),
        ("convert", ["ckpt=any.onnx", "out=a.weights"], "any.onnx is not a checkpoint"),
    ):  # fmt: skip
        assert said in (sentence := refused(program, *arguments)), sentence
    assert not (folder / "never").exists()


def test_without_onnxruntime_the_extra_is_named(
    folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said = refused("predict", "ckpt=any.onnx", "source=pictures")
    assert said.endswith("any.onnx needs onnxruntime, which is not installed. fix: uv sync --extra export")
