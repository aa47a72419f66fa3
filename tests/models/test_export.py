"""Exported graphs and files against the network, its Postprocess, and real detections."""

from __future__ import annotations

import copy
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from models import Cfg, Darknet, Head, ModelError, Postprocess, load_darknet_weights, parse_cfg, zoo_cfg
from models.decode import decode
from models.export import (
    METADATA_FILE,
    DetectorGraph,
    FixedSuppression,
    check_onnx,
    check_torch,
    run_onnx,
    run_torch,
    write_onnx,
    write_torch,
)
from models.networks import Run, fuse_batch_norm
from tests.models.small_network import cfg_text

PLACE = str(Path(__file__).resolve().parents[2]).encode()
METADATA = {"names": '["a", "b"]'}
ANY_SHAPE = {0: "batch", 2: "height", 3: "width"}
OPTIONS: dict[str, Any] = {"confidence": 0.25, "nms_iou": 0.45, "max_detections": 100}
HEADS = [
    Head(layer=1, stride=32, anchors=((40, 30), (60, 90)), num_classes=4, scale_x_y=1.1),
    Head(layer=3, stride=16, anchors=((10, 14), (23, 27)), num_classes=4),
]
SIDE = 160


def random_network(cfg: Cfg | Path, width: float = 0.25) -> Darknet:
    """A network with random statistics, and heads scaled so that many boxes score well."""
    model = Darknet(cfg, width=width).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.2)
    with torch.no_grad():
        for raw, head in zip(model(torch.rand(1, 3, 128, 128)), model.heads, strict=True):
            convolution = model.head_convolution(head).conv
            assert convolution.bias is not None
            convolution.weight.mul_(1.2 / raw.std())
            convolution.bias.zero_()
    return model


def decoded(model: Darknet, images: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return decode(model(images), model.heads)


def postprocess(heads: list[Head], raw_maps: list[Tensor], **changes: Any) -> list[Tensor]:
    result: list[Tensor] = Postprocess(heads, multi_label=False, **OPTIONS | changes)(raw_maps)
    return result


def suppression(**changes: Any) -> FixedSuppression:
    return FixedSuppression(**{"candidates": 1000} | OPTIONS | changes)


def random_maps(batch: int) -> list[Tensor]:
    spread = torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0])
    return [torch.randn(batch, 2, SIDE // head.stride, SIDE // head.stride, 9) * spread for head in HEADS]


def assert_same_detections(outputs: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    """Outputs of fixed shape equal Postprocess to the last bit and end in zeros."""
    boxes, scores, classes, counts = outputs
    assert classes.dtype == counts.dtype == torch.int64
    assert counts.tolist() == [len(detections) for detections in expected]
    for image, detections in enumerate(expected):
        count = len(detections)
        assert boxes[image, :count].equal(detections[:, :4])
        assert scores[image, :count].equal(detections[:, 4])
        assert classes[image, :count].equal(detections[:, 5].long())
        assert not boxes[image, count:].any() and not scores[image, count:].any() and not classes[image, count:].any()


def test_fusing_keeps_what_the_network_computes_and_leaves_the_original_alone() -> None:
    model = random_network(zoo_cfg("yolov3-tiny"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fused = fuse_batch_norm(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    images = torch.rand(2, 3, 96, 64)
    with torch.no_grad():
        for ours, theirs in zip(fused(images), model(images), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [{}, {"confidence": 0.7}, {"nms_iou": 0.1}, {"max_detections": 7}, {"candidates": 110}, {"confidence": 0.0}],
)
def test_suppression_equals_postprocess(changes: dict[str, Any]) -> None:
    maps = random_maps(5)
    expected = postprocess(HEADS, maps, **changes)
    assert all(len(detections) >= 7 for detections in expected)
    assert_same_detections(suppression(**changes)(*decode(maps, HEADS), SIDE), expected)


def test_images_and_classes_do_not_suppress_one_another_however_many_there_are() -> None:
    """The same boxes in all classes and images, some larger than the image or outside it."""
    images, classes, side = 6, 300, 64
    boxes = torch.tensor([[0, 0, 64, 64], [-500, -500, 600, 600], [-60, 10, -20, 50], [63, 63, 100, 100]]).float()
    boxes = boxes.repeat(images, classes, 1)
    labels = torch.arange(classes).repeat_interleave(4)
    scores = torch.nn.functional.one_hot(labels) * torch.linspace(0.5, 1, 4 * classes)[:, None]
    scores = scores.repeat(images, 1, 1)
    room = suppression(max_detections=5 * classes, candidates=10 * classes)
    assert room(boxes, scores, side)[3].tolist() == [4 * classes] * images
    twice = room(boxes.repeat(1, 2, 1), torch.cat((scores * 0.9, scores), dim=1), side)
    assert twice[3].tolist() == [4 * classes] * images, "a second, better one in each place"
    assert twice[1].equal(room(boxes, scores, side)[1])


def test_equal_scores_keep_their_order_and_an_image_without_objects_has_none() -> None:
    maps = [torch.zeros_like(raw) for raw in random_maps(2)]
    for raw in maps:
        raw[1, ..., 4] = -20
    expected = postprocess(HEADS, maps, confidence=0.2, nms_iou=0.6)
    assert [len(detections) for detections in expected] == [100, 0]
    assert_same_detections(suppression(confidence=0.2, nms_iou=0.6)(*decode(maps, HEADS), SIDE), expected)


def test_the_room_does_not_depend_on_the_number_of_boxes() -> None:
    maps = random_maps(2)[:1]
    outputs = suppression(confidence=0.0, max_detections=300)(*decode(maps, HEADS[:1]), SIDE)
    assert outputs[0].shape == (2, 300, 4) and outputs[1].shape == outputs[2].shape == (2, 300)
    assert_same_detections(outputs, postprocess(HEADS[:1], maps, confidence=0.0, max_detections=300))


def test_a_trained_network_finds_what_darknet_finds(shared_dir: Path) -> None:
    folder = shared_dir / "darknet" / "yolo-fastest-1.1"
    model = Darknet(folder / "yolo-fastest-1.1.cfg").eval()
    load_darknet_weights(model, folder / "yolo-fastest-1.1.weights")
    images = torch.from_numpy(np.load(folder / "heads_dog.npz")["blob"])
    _, scores, classes, counts = DetectorGraph(model, suppression())(images)
    names = (folder / "coco.names").read_text().split("\n")
    best = zip(scores[0].tolist(), classes[0].tolist(), strict=True)
    found = [(names[label], round(score, 3)) for score, label in best]
    assert found[: counts[0]] == [
        ("car", 0.897), ("dog", 0.654), ("cat", 0.567), ("bicycle", 0.529), ("car", 0.444), ("bicycle", 0.313),
        ("person", 0.312),
    ]  # fmt: skip
    with torch.no_grad():
        assert_same_detections(suppression()(*decoded(model, images), 320), postprocess(model.heads, model(images)))


@dataclass
class Written:
    """An ONNX file, the network in it, and its session."""

    path: Path
    model: Darknet
    graph: DetectorGraph
    session: onnxruntime.InferenceSession

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(output) for output in self.session.run(None, {"images": images.numpy()}))


def write(folder: Path, model: Darknet, nms: bool, example: Tensor, dynamic: dict[int, str], opset: int) -> Written:
    graph = DetectorGraph(model, suppression() if nms else None, show_candidates=nms)
    path = folder / "model.onnx"
    write_onnx(graph, example, dynamic, opset, METADATA, path)
    return Written(path, model, graph, onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))


@pytest.fixture(scope="module")
def small() -> Darknet:
    torch.manual_seed(0)
    return random_network(parse_cfg(cfg_text(4), "small.cfg"), width=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, small: Darknet) -> Written:
    """A file with suppression, for any batch and image size."""
    return write(tmp_path_factory.mktemp("onnx"), small, True, torch.rand(1, 3, 16, 24), ANY_SHAPE, 20)


def assert_equals_network(written: Written, images: Tensor) -> None:
    for ours, theirs in zip(written(images), decoded(written.model, images), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def assert_detects_as_network(written: Written, images: Tensor) -> None:
    """The file agrees by the check of export.py and with Postprocess.

    The check also covers the boxes before suppression. Against Postprocess a few detections may
    differ, where an overlap is within rounding of the threshold or two scores are equal.
    """
    assert max(check_onnx(written.path, written.model, written.graph, [images], 1e-4)) < 1e-5
    with torch.no_grad():
        expected = postprocess(written.model.heads, written.model(images))
    boxes, scores, classes, counts = written(images)
    assert boxes.shape == (len(images), 100, 4) and scores.shape == classes.shape == (len(images), 100)
    for image, detections in enumerate(expected):
        count = int(counts[image])
        assert len(detections) >= 15 and abs(count - len(detections)) <= 2
        ours = torch.cat((boxes[image], scores[image, :, None], classes[image, :, None]), dim=1)
        differences = (ours[:count, None] - detections).abs().amax(-1)
        assert (differences.amin(0) < 1e-3).float().mean() > 0.95
        assert not ours[count:].any() and (scores[image, :count].diff() <= 0).all()


@pytest.mark.parametrize("shape", [(1, 3, 16, 24), (4, 3, 16, 24), (2, 3, 32, 8), (1, 3, 10, 12)])
def test_an_open_file_takes_every_batch_and_image_size(written: Written, shape: tuple[int, ...]) -> None:
    images = torch.rand(shape)
    assert_detects_as_network(written, images)


@pytest.mark.parametrize(
    ("name", "opset"),
    [("yolov3-tiny", 20), ("yolov4-tiny", 18), pytest.param("yolov3-spp", 25, marks=pytest.mark.slow)],
)
def test_onnx_equals_the_network(name: str, opset: int, tmp_path: Path) -> None:
    """With suppression for one image, and without for two of another size.

    With suppression the check compares all boxes, too.
    """
    model = random_network(zoo_cfg(name))
    single, double = torch.rand(1, 3, 96, 128), torch.rand(2, 3, 64, 96)
    written = write(tmp_path, model, True, single, {}, opset)
    assert_detects_as_network(written, single)
    assert onnx.load(written.path).opset_import[0].version == opset
    described = [(output.name, output.type, output.shape) for output in written.session.get_outputs()]
    assert described == [
        ("boxes", "tensor(float)", [1, 100, 4]), ("scores", "tensor(float)", [1, 100]),
        ("classes", "tensor(int64)", [1, 100]), ("counts", "tensor(int64)", [1]),
    ]  # fmt: skip
    written = write(tmp_path, model, False, double, {}, opset)
    assert_equals_network(written, double)
    assert [output.name for output in written.session.get_outputs()] == ["boxes_xyxy", "scores"]


def test_torch_archive_equals_the_network(small: Darknet, tmp_path: Path) -> None:
    path = tmp_path / "detector.pt2"
    images = torch.rand(3, 3, 16, 24)
    graph = DetectorGraph(small, suppression())
    write_torch(graph, torch.rand(1, 3, 16, 24), {0: "batch"}, METADATA, path)
    assert max(check_torch(path, small, graph, [images, images[:1]], 1e-4)) < 1e-5
    with torch.no_grad():
        assert_same_detections(run_torch(path)(images), postprocess(small.heads, graph.network(images)))
    extra = {METADATA_FILE: ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra[METADATA_FILE]) == METADATA
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if PLACE in archive.read(name) or "detector" in name]


def test_onnx_files_hold_the_metadata_and_no_file_names_of_this_machine(written: Written) -> None:
    assert written.session.get_modelmeta().custom_metadata_map == METADATA
    assert PLACE not in written.path.read_bytes()


def test_a_file_that_cannot_run_is_one_sentence(written: Written) -> None:
    with pytest.raises(
        ModelError, match=r"the exported file fails on images \[1, 3, 17, 24\] \(.*\)\. fix: another opset"
    ):
        check_onnx(written.path, written.model, written.graph, [torch.rand(1, 3, 17, 24)], 1e-4)


def test_a_file_that_differs_is_found_out(written: Written) -> None:
    images = [torch.rand(1, 3, 16, 24)]
    other = copy.deepcopy(written.model)
    bias = other.head_convolution(other.heads[0]).conv.bias
    assert bias is not None
    bias.data[4] += 1e-2
    with pytest.raises(ModelError, match=r"the export differs from the network: boxes by .* scores by 0\.00"):
        check_onnx(written.path, other, written.graph, images, 1e-4)
    bias.data[4] = float("nan")
    with pytest.raises(ModelError, match="scores by nan"):
        check_onnx(written.path, other, written.graph, images, 1e-4)
    graph = DetectorGraph(written.model, suppression(nms_iou=0.6), show_candidates=True)
    with pytest.raises(ModelError, match="differs from the network in its non-maximum suppression"):
        check_onnx(written.path, written.model, graph, images, 1e-4)


CELL = 16
ROOM: dict[str, Any] = {"nms_iou": 0.45, "max_detections": 300, "candidates": 1000}
SHOWN: list[int | str] = ["black", 1, 2, "white", 3, "grey", "noise", 40, 0]
# A network whose boxes are known: every bright cell has two, the second one inside the first, of
# the class that is the cell's strongest colour. With both suppressed into one, there are as many
# detections as bright cells.
CELLS = f"""[net]
width=64
height=64
channels=3
[convolutional]
filters=16
size={CELL}
stride={CELL}
pad=0
activation=linear
[yolo]
mask=0,1
anchors=14,14, 12,12
classes=3
num=2
"""


def cell_detector() -> Darknet:
    model = Darknet(parse_cfg(CELLS, "cells.cfg")).eval()
    convolution = model.head_convolution(model.heads[0]).conv
    assert convolution.bias is not None
    with torch.no_grad():
        weight = torch.zeros(2, 8, 3, CELL, CELL)
        weight[:, 4] = 12 / (3 * CELL**2)  # objectness grows with the mean brightness, which is 0.5 where it is even
        weight[1, 4] *= 0.99  # no ties within a cell
        for colour in range(3):
            weight[:, 5 + colour, colour] = 6 / CELL**2
        bias = torch.zeros(2, 8)
        bias[:, 4] = -7
        convolution.weight.copy_(weight.flatten(0, 1))
        convolution.bias.copy_(bias.flatten())
    return model


def picture(height: int, width: int, bright: int | str) -> Tensor:
    """(3, height, width): a grey level, noise, or black with this many bright cells in colours."""
    if bright == "noise":
        return torch.rand(3, height, width, generator=torch.Generator().manual_seed(3))
    if isinstance(bright, str):
        return torch.full((3, height, width), {"black": 0.0, "grey": 0.5, "white": 1.0}[bright])
    image = torch.zeros(3, height, width)
    columns = width // CELL
    for number in range(bright):
        row, column = divmod(number * 7 % (columns * (height // CELL)), columns)
        cell = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        cell[:] = torch.tensor([0.7 + 0.002 * number, 0.9, 0.8]).roll(number)[:, None, None]
    return image


def assert_found(run: Run, network: Darknet, images: Tensor, room: FixedSuppression) -> list[int]:
    """What a file finds in a batch equals Postprocess of the network; returns the counts."""
    postprocess = Postprocess(
        network.heads, room.confidence, room.nms_iou, room.max_detections, multi_label=False, candidates=room.candidates
    )
    with torch.no_grad():
        expected = postprocess(network(images))
    boxes, scores, classes, counts = run(images)
    assert counts.tolist() == [len(rows) for rows in expected]
    for image, rows in enumerate(expected):
        count, side = len(rows), max(images.shape[2:])
        assert not boxes[image, count:].any() and not scores[image, count:].any() and not classes[image, count:].any()
        ours = torch.cat((boxes[image], scores[image, :, None], classes[image, :, None].float()), dim=1)[:count]
        # Scores that differ in the last digit only may be in another order.
        assert (ours[:, 4] - rows[:, 4]).abs().le(1e-5).all()
        alike = ((ours[:, None] - rows) / torch.tensor([side, side, side, side, 1, 1])).abs().amax(-1) < 1e-5
        assert not count or (alike.any(0).all() and alike.any(1).all())
    found: list[int] = counts.tolist()
    return found


def open_written(
    folder: Path, file_format: str, model: Darknet, example: Tensor, open_axes: bool, confidence: float
) -> Run:
    """Write a file with suppression and open it."""
    graph = DetectorGraph(model, FixedSuppression(confidence, **ROOM))
    path, axes = folder / f"file.{file_format}", ANY_SHAPE if open_axes else {}
    if file_format == "onnx":
        write_onnx(graph, example, axes, 20, {}, path)
        return run_onnx(path)
    write_torch(graph, example, axes, {}, path)
    return run_torch(path)


@pytest.mark.parametrize(
    ("file_format", "open_axes", "confidence"),
    [("torch", False, confidence) for confidence in (0.25, 0.0)]
    + [("torch", True, confidence) for confidence in (0.25, 0.9, 0.0)]
    + [("onnx", False, 0.25), ("onnx", True, 0.25), ("onnx", True, 0.0)],
)
def test_any_number_of_boxes(file_format: str, open_axes: bool, confidence: float, tmp_path: Path) -> None:
    """Batches of one and of three in files of that shape and in files with dynamic shapes.

    With dynamic shapes the images go down to one stride.
    """
    model = cell_detector()
    height, width = 9 * CELL, 13 * CELL
    batch = 1 if open_axes or confidence == 0.25 else 3
    run = open_written(tmp_path, file_format, model, torch.zeros(batch, 3, height, width), open_axes, confidence)
    other_shapes = [(4, height, width), (2, CELL, CELL), (1, 3 * CELL, CELL)] if open_axes else []
    for count, rows, columns in [(batch, height, width), *other_shapes]:
        for start in range(0, len(SHOWN), count):
            kinds = (SHOWN + SHOWN)[start : start + count]
            images = torch.stack([picture(rows, columns, kind) for kind in kinds])
            counts = assert_found(run, model, images, FixedSuppression(confidence, **ROOM))
            if confidence == 0.25 and rows == height:
                known = {"black": 0, "white": 9 * 13, "grey": 9 * 13} | {kind: kind for kind in (0, 1, 2, 3, 40)}
                assert all(known.get(kind, found) == found for kind, found in zip(kinds, counts, strict=True))


@pytest.mark.parametrize("nms_iou", [0.0, 1.0])
@pytest.mark.parametrize("confidence", [0.0, 0.5, 1.0])
def test_suppression_at_the_ends_of_its_options(confidence: float, nms_iou: float) -> None:
    model = cell_detector()
    room = FixedSuppression(confidence, nms_iou, 300, 300)
    images = torch.stack([picture(6 * CELL, 5 * CELL, kind) for kind in SHOWN])
    assert_found(DetectorGraph(model, room), model, images, room)
