"""export.py: its files, and what it leaves behind after an error."""

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from conf import ConfigError
from conf.cli.program import options_of
from conf.compose import compose
from conf.schema import ExportConfig, TrainConfig
from data import EvalDataset, ImageSource, OnError, Request, ShapesConfig, ensure_shapes, open_annotations
from data.shapes import CLASSES
from eval import evaluate
from export import calibration_batches, export
from models import Darknet, ModelError, count_parameters, parse_cfg, save_darknet_weights
from models.export import METADATA_FILE, DetectorGraph, read_metadata, run_onnx, write_onnx, write_torch
from models.quantise import equalise, neighbours, quantise
from predict import Detector
from tests.models.cfg_writer import cfg, conv, head
from tests.random_network import save_random_network
from train_utils.report.report_page import read_best

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
    for unread, read in (
        ("confidence=0.4", "nms=true"), ("calibration=9", "precision=int8"), ("max_drop=0.1", "check=ap"),
        ("data=bccd", "check=ap or precision=int8"), ("evaluate.nms_iou=0.5", "check=ap"),
    ):  # fmt: skip
        key = unread.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key} has no effect here: .* {read} only\. fix: leave {key} out$"):
            export(["ckpt=any.pt", unread])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match=f"fix: uv pip install --python {sys.executable} onnxscript"):
        export(["ckpt=any.pt"])
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a network of a few layers, for images that are not square."""
    folder = tmp_path_factory.mktemp("wide")
    text = cfg(*[conv(8, 3, 2)] * 5, head(0, 1)).replace("width=64", "width=96")
    (folder / "a.cfg").write_text(text)
    save_darknet_weights(Darknet(folder / "a.cfg").eval(), folder / "a.weights")
    return [f"model.cfg={folder}/a.cfg", f"model.weights={folder}/a.weights", "format=torch"]


def test_a_file_appears_only_if_it_agrees(wide: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_another(graph: DetectorGraph, *rest: object) -> None:
        wrong = copy.deepcopy(graph)
        wrong.network.head_convolutions(wrong.network.heads[0])[0].conv.bias.add_(0.1)
        write_torch(wrong, *rest)

    monkeypatch.setattr("models.export.write_torch", write_another)
    with pytest.raises(ModelError, match="the file differs from the network"):
        export([*wide, f"out={tmp_path / 'new' / 'a.pt2'}"])
    assert not list((tmp_path / "new").iterdir())


def test_a_cfg_for_images_that_are_not_square_is_exported_at_its_size(wide: list[str], tmp_path: Path) -> None:
    extra = {METADATA_FILE: ""}
    torch.export.load(export(wide), extra_files=extra)
    assert json.loads(json.loads(extra[METADATA_FILE])["image_size"]) == [64, 96]
    with pytest.raises(ConfigError, match=r"folder\.pt2 is a folder\. fix: out="):
        (tmp_path / "folder.pt2").mkdir()
        export([*wide, f"out={tmp_path}/folder.pt2"])


OF_RUN = "data.exif=ignore", "evaluate.rect=false"


@pytest.mark.release
def test_an_onnx_file_lies_beside_its_checkpoint(wide: list[str], tmp_path: Path) -> None:
    config = compose("train", TrainConfig, ["model=base", wide[0], "train.image_size=96", *OF_RUN])
    ids = [30, 10, 20, 50, 40]
    save_random_network(tmp_path / "run/checkpoints/best.pt", config, CLASSES, ids, seed=0, gain=30)
    more = "confidence=0.3 nms_iou=0.6 max_detections=50 image_size=[64,96] evaluate.resize=stretch licence=CC0".split()
    path = export([f"ckpt={tmp_path / 'run'}", "nms=true", "batch_size=2", *more])
    assert path == tmp_path / "run" / "checkpoints" / "best.onnx"
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".pt"] == [path.name]
    session = onnxruntime.InferenceSession(path)
    known = session.get_modelmeta().custom_metadata_map
    expected = {
        "names": list(CLASSES), "category_ids": ids, "image_size": [64, 96], "stride": 32, "open": [], "batch_size": 2,
        "precision": "float32", "resize": "stretch", "padding": 114, "licence": "CC0",
        "rect": False, "exif": "ignore",
        "suppression": {"confidence": 0.3, "nms_iou": 0.6, "max_detections": 50},
    }  # fmt: skip
    assert {key: json.loads(known[key]) for key in known.keys() - {"made_by", "origin"}} == expected
    assert known["made_by"].startswith("hydra-yolov3-spp ")
    images = np.random.default_rng(0).random((2, 3, 64, 96), dtype=np.float32)
    boxes, scores, classes, counts = session.run(None, {"images": images})
    assert boxes.shape == (2, 50, 4) and classes.max() <= 4 and counts.min() > 0
    assert (counts == (scores > 0).sum(axis=1)).all()
    config = options_of("predict", [f"ckpt={path}", "source=a", "confidence=0.4"])
    limits = config.confidence, config.nms_iou, config.max_detections
    assert (*limits, config.resize.value) == (0.4, 0.6, 50, "stretch"), "the file's, where none is typed"
    assert (
        not config.rect
        and config.exif == "ignore" == options_of("predict", [f"ckpt={tmp_path / 'run'}", "source=a"]).exif
    )
    detector = Detector(path)
    assert "all images at one size (rect=false), confidence=0.3, nms_iou=0.6, max_detections=50" in repr(detector)
    for refused in (
        lambda: Detector(path, confidence=0.2), lambda: Detector(path, max_detections=51),
        lambda: Detector(path, merge_nms=True), lambda: Detector(path, multi_label=True),
        lambda: detector(np.zeros((9, 9, 3), np.uint8), confidence=0.2),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"the file (drops|has dropped)( detections)?\. fix: "):
            refused()
    of_file = options_of("eval", [f"model_file={path}", "data=shapes", "evaluate.nms_iou=0.5"]).evaluate
    assert (of_file.confidence, of_file.nms_iou, of_file.resize.value) == (0.3, 0.5, "stretch")


@pytest.fixture(scope="module")
def data_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Drawn pictures, as large as the exported files of the checkpoint and smaller."""
    root = tmp_path_factory.mktemp("shapes")
    ensure_shapes(root, ShapesConfig(train_images=4, val_images=5, image_size=64))
    shapes = "{train_images: 4, val_images: 5, image_size: 64}"
    places = [f"data.root={root}", f"data.index_dir={root / 'index'}"]
    return ["data=shapes", *places, f"data.shapes={shapes}", "data.workers=0"]


@pytest.mark.parametrize(
    "form", ["onnx", *(pytest.param(form, marks=pytest.mark.release) for form in ("torch", "openvino"))]
)
def test_a_file_finds_what_its_network_finds(checkpoint, data_options, form, tmp_path) -> None:
    if form == "openvino":
        pytest.importorskip("openvino")
    suffix = {"onnx": "onnx", "torch": "pt2", "openvino": "xml"}[form]
    file = export([f"ckpt={checkpoint}", f"format={form}", "batch_size=2", f"out={tmp_path}/a.{suffix}"])
    if form == "openvino":
        assert file.with_suffix(".bin").stat().st_size > 3 * count_parameters(Detector(checkpoint)._predictor.model)
    scored = ["device=cpu", "evaluate.confidence=0.5", *data_options]
    evaluate([f"ckpt={checkpoint}", *scored, "evaluate.rect=false", f"out={tmp_path}/network"])
    evaluate([f"model_file={file}", *scored, f"out={tmp_path}/file"])
    expected, found = (json.loads((tmp_path / name / "detections.json").read_text()) for name in ("network", "file"))
    assert len(expected) > 50
    rows = [
        np.array(sorted((one["image_id"], one["category_id"], one["score"]) for one in some))
        for some in (found, expected)
    ]
    assert np.abs(rows[0] - rows[1]).max() < 1e-4  # boxes of equal scores come in any order
    picture = np.random.default_rng(0).integers(0, 255, (50, 80, 3), dtype=np.uint8)
    by_network, by_file = (Detector(ckpt, rect=False, device="cpu")(picture) for ckpt in (checkpoint, file))
    assert len(by_network) > 0 and by_file.class_names == by_network.class_names
    assert np.allclose(by_file.boxes_xyxy, by_network.boxes_xyxy, atol=2e-3)
    with pytest.raises(ConfigError, match=r"image_size=64 is not the size of the exported file\. fix: image_size=96"):
        Detector(file, image_size=64)
    for wrong in ({"device": "cuda"}, {"precision": "bfloat16"}):
        with pytest.raises(ConfigError, match=r"runs on the CPU as it was exported\. fix: leave out device"):
            Detector(file, **wrong)
    with pytest.raises(ConfigError, match=r"names no data\. fix: add data="):
        evaluate([f"model_file={file}"])


@pytest.fixture(scope="module")
def own_labels(checkpoint: Path, data_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The drawn pictures with what the network finds on them as labels, so that its AP is high."""
    root = tmp_path_factory.mktemp("own")
    evaluate([f"ckpt={checkpoint}", "device=cpu", "evaluate.confidence=0.5", *data_options, f"out={root / 'found'}"])
    content, found = (json.loads((root / "found" / f"{name}.json").read_text()) for name in ("images", "detections"))
    content["annotations"] = [row | {"id": number} for number, row in enumerate(found, start=1)]
    (root / "labels.json").write_text(json.dumps(content))
    images = next(folder for folder in Path(data_options[1].partition("=")[2]).rglob("val") if folder.is_dir())
    splits = [f"data.{split}={{annotations: {root}/labels.json, images: {images}}}" for split in ("train", "val")]
    return ["data=coco", f"data.index_dir={root / 'index'}", "data.workers=0", *splits]


@pytest.mark.release
def test_int8_says_its_ap_and_is_refused_if_it_loses_too_much(checkpoint, own_labels, tmp_path) -> None:
    options = [f"ckpt={checkpoint}", "precision=int8", "check=ap", "licence=CC0", "calibration=3", *own_labels]
    known = read_metadata(export([*options, "max_drop=1", f"out={tmp_path}/a.onnx"]))
    assert json.loads(known["precision"]) == "int8" and json.loads(known["licence"]) == "CC0"
    scored, metrics = (
        json.loads(known["scored"]),
        evaluate([f"model_file={tmp_path}/a.onnx", *own_labels, f"out={tmp_path}/b"]),
    )
    low, high = scored["interval_of_difference"]
    assert scored["AP"] == metrics["AP"] and scored["images"] == 5
    assert scored["threshold"] == read_best(tmp_path / "b").at_best_f1["threshold"] != scored["threshold_of_network"]
    assert 0.05 < scored["AP"] < scored["AP_of_network"] - 0.02 and scored["AP_of_network"] > 0.2
    assert low <= scored["AP"] - scored["AP_of_network"] <= high < 0
    with pytest.raises(ModelError, match=r"the file has 0\.\d+ AP, the network 0\.\d+, and max_drop=0\.02 .* fix: "):
        export([*options, "batch_size=4", f"out={tmp_path}/b.onnx"])  # more than calibration=3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b"]
    for wrong, fix in (("format=torch", "fix: format=onnx"), ("format=openvino nms=true", "fix: nms=false")):
        with pytest.raises(ConfigError, match=fix):
            export([*options, *wrong.split()])


CHAIN = cfg(
    conv(8, 3, 2, batch_normalize=0), conv(8, 3, 2, "relu", groups=8, batch_normalize=0),
    conv(16, 1, 2, "linear", batch_normalize=0), head(0, 1),
)  # fmt: skip


@pytest.mark.release
def test_scaled_channels_change_no_result_and_share_a_range(tmp_path: Path) -> None:
    model = Darknet(parse_cfg(CHAIN, "chain.cfg")).eval()
    with torch.no_grad():
        model.layers[0].conv.weight.mul_(torch.logspace(-2, 2, 8)[:, None, None, None])
    path, images = tmp_path / "a.onnx", [torch.rand(1, 3, 64, 64) for _ in range(3)]
    write_onnx(DetectorGraph(model, None), images[0], {}, {}, path)
    expected, proto = run_onnx(path)(images[0]), onnx.load(path)
    assert len(neighbours(proto.graph)) == 3
    proto = equalise(path, images)
    first = onnx.numpy_helper.to_array(
        next(w for w in proto.graph.initializer if w.name.endswith("layers.0.conv.weight"))
    )
    ranges = np.abs(first).max((1, 2, 3))
    assert ranges.max() / ranges.min() < 100, "10,000 before"
    onnx.save(proto, tmp_path / "scaled.onnx")
    for ours, theirs in zip(run_onnx(tmp_path / "scaled.onnx")(images[0]), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    for symmetric in (False, True):
        quantised = tmp_path / f"{symmetric}.onnx"
        shutil.copy(path, quantised)
        quantise(quantised, images, symmetric)
        graph = onnx.load(quantised).graph
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        assert sum(values.dtype == np.int8 and values.ndim == 4 for values in stored.values()) == 3
        assert [name for name, values in stored.items() if name.endswith("layers.3.conv.weight")]
        zeros = [stored[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
        assert {str(zero.dtype) for zero in zeros} == {"int8" if symmetric else "uint8"}
        assert not symmetric or not any(map(np.any, zeros))
        for node in graph.node:
            weights = stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
            if weights is not None and weights.ndim == 4:
                scales = stored[node.input[1]]
                assert scales.shape == (len(weights),), "one for each channel"
                ranges = np.abs(weights).max((1, 2, 3)) * scales
                assert weights.shape[1] != 3 or ranges.max() / ranges.min() < 100, "10,000 before"


def test_calibration_takes_images_of_the_training_set_from_all_over_it(tmp_path: Path) -> None:
    drawn = "data.shapes={train_images: 11, val_images: 3, image_size: 64}"
    of_data = ["data=shapes", f"data.root={tmp_path}/shapes", f"data.index_dir={tmp_path}/index", drawn]
    config = replace(compose("export", ExportConfig, [*MODEL, *of_data]), calibration=4, batch_size=3)
    train_set = open_annotations(config.data, "train")
    images = EvalDataset(train_set, ImageSource(train_set, OnError.stop), config.evaluate.resize)
    wanted = images.__getitems__([Request(index, 64, 64, 0) for index in (0, 3, 6, 10, 0, 3)]).network_input()
    assert torch.equal(torch.cat(list(calibration_batches(config, (64, 64)))), wanted)
