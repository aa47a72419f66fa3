"""Exported graphs and files against the network and its Postprocess."""

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from models import Darknet, ModelError, Postprocess, parse_cfg, zoo_cfg
from models import export as files
from models.darknet import fuse_batch_norm
from models.decode import decode
from models.export import DetectorGraph, FixedSuppression
from tests.models.cfg_writer import cfg, conv, section
from tests.models.small_network import cfg_text
from tests.models.test_decode import HEADS

PLACE = str(Path(__file__).resolve().parents[2]).encode()
METADATA = {"names": '["a", "b"]'}
ANY_SHAPE = {0: "batch", 2: "height", 3: "width"}
OPTIONS: dict[str, Any] = {"confidence": 0.25, "nms_iou": 0.45, "max_detections": 100, "candidates": 1000}
SIDE = 160


def random_network(source: Any, width: float = 0.25) -> Darknet:
    """A network with random statistics, and heads scaled so that many boxes score well."""
    model = Darknet(source, width=width).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.2)
    with torch.no_grad():
        for raw, head in zip(model(torch.rand(1, 3, 128, 128)), model.heads, strict=True):
            convolution = model.head_convolution(head).conv
            convolution.weight.mul_(1.2 / raw.std())
            convolution.bias.zero_()
    return model


def postprocess(heads: Any, raw_maps: list[Tensor], **changes: Any) -> list[Tensor]:
    options = OPTIONS | {"candidates": 30000} | changes
    result: list[Tensor] = Postprocess(heads, multi_label=False, **options)(raw_maps)
    return result


def random_maps(batch: int) -> list[Tensor]:
    spread = torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0])
    return [torch.randn(batch, 2, SIDE // head.stride, SIDE // head.stride, 9) * spread for head in HEADS]


def assert_same_detections(outputs: tuple[Tensor, ...], expected: list[Tensor], side: int | None = None) -> None:
    """Outputs of fixed shape equal Postprocess and end in zeros.

    They do to the last bit or, with the side of the images, to 1e-5 of it and in any order of
    scores that differ in the last digit only.
    """
    boxes, scores, classes, counts = outputs
    assert classes.dtype == counts.dtype == torch.int64
    assert counts.tolist() == [len(detections) for detections in expected]
    tables = torch.cat((boxes, scores[..., None], classes[..., None].float()), dim=2)
    for table, rows in zip(tables, expected, strict=True):
        ours, room = table.split((len(rows), len(table) - len(rows)))
        assert not room.any()
        if side is None:
            assert ours.equal(rows)
        elif len(rows):
            assert (ours[:, 4] - rows[:, 4]).abs().le(1e-5).all()
            alike = ((ours[:, None] - rows) / torch.tensor([side, side, side, side, 1, 1])).abs().amax(-1) < 1e-5
            assert alike.any(0).all() and alike.any(1).all()


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
    [
        {}, {"confidence": 0.7}, {"nms_iou": 0.1}, {"max_detections": 7}, {"candidates": 110},
        {"confidence": 0.0, "max_detections": 300}, {"confidence": 1.0}, {"nms_iou": 0.0}, {"nms_iou": 1.0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("heads", [1, 2])
def test_suppression_equals_postprocess(heads: int, changes: dict[str, Any]) -> None:
    maps = random_maps(5)[:heads]
    outputs = FixedSuppression(**OPTIONS | changes)(*decode(maps, HEADS[:heads]), SIDE)
    assert outputs[0].shape[1] == (OPTIONS | changes)["max_detections"]  # however few boxes there are
    assert_same_detections(outputs, postprocess(HEADS[:heads], maps, **changes))


def test_equal_scores_keep_their_order_and_an_image_without_objects_has_none() -> None:
    maps = [torch.zeros_like(raw) for raw in random_maps(2)]
    for raw in maps:
        raw[1, ..., 4] = -20
    changes = {"confidence": 0.2, "nms_iou": 0.6}
    expected = postprocess(HEADS, maps, **changes)
    assert [len(detections) for detections in expected] == [100, 0]
    assert_same_detections(FixedSuppression(**OPTIONS | changes)(*decode(maps, HEADS), SIDE), expected)


def test_images_and_classes_do_not_suppress_one_another_however_many_there_are() -> None:
    """The same boxes in all classes and images, some larger than the image or outside it."""
    images, classes, side = 6, 300, 64
    boxes = torch.tensor([[0, 0, 64, 64], [-500, -500, 600, 600], [-60, 10, -20, 50], [63, 63, 100, 100]]).float()
    boxes = boxes.repeat(images, classes, 1)
    labels = torch.arange(classes).repeat_interleave(4)
    scores = torch.nn.functional.one_hot(labels) * torch.linspace(0.5, 1, 4 * classes)[:, None]
    scores = scores.repeat(images, 1, 1)
    room = FixedSuppression(**OPTIONS | {"max_detections": 5 * classes, "candidates": 10 * classes})
    assert room(boxes, scores, side)[3].tolist() == [4 * classes] * images
    twice = room(boxes.repeat(1, 2, 1), torch.cat((scores * 0.9, scores), dim=1), side)
    assert twice[3].tolist() == [4 * classes] * images, "a second, better one in each place"
    assert twice[1].equal(room(boxes, scores, side)[1])


@pytest.fixture(scope="module")
def small() -> Darknet:
    torch.manual_seed(0)
    return random_network(parse_cfg(cfg_text(4), "small.cfg"), width=1)


def write(folder: Path, model: Darknet, nms: bool, example: Tensor, dynamic: dict[int, str]) -> tuple[Path, Any]:
    graph = DetectorGraph(model, FixedSuppression(**OPTIONS) if nms else None, show_candidates=True)
    path = folder / f"{nms}.onnx"
    files.write_onnx(graph, example, dynamic, METADATA, path)
    return path, graph


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, small: Darknet) -> tuple[Path, Any]:
    """A file with suppression, for any batch and image size, and its graph."""
    return write(tmp_path_factory.mktemp("onnx"), small, True, torch.rand(1, 3, 16, 24), ANY_SHAPE)


def test_an_open_file_takes_every_batch_and_image_size(written: tuple[Path, Any], small: Darknet) -> None:
    batches = [torch.rand(shape) for shape in ((1, 3, 16, 24), (4, 3, 16, 24), (2, 3, 32, 8), (1, 3, 10, 12))]
    assert max(files.check(written[0], small, written[1], batches)) < 1e-5
    model = onnx.load(written[0])
    assert {prop.key: prop.value for prop in model.metadata_props} == METADATA
    assert [output.name for output in model.graph.output] == ["boxes", "scores", "classes", "counts"]
    assert PLACE not in written[0].read_bytes()


@pytest.mark.parametrize("name", ["yolov3-tiny", "yolov4-tiny", pytest.param("yolov3-spp", marks=pytest.mark.slow)])
def test_onnx_equals_the_network(name: str, tmp_path: Path) -> None:
    """With suppression for one image, and without for two of another size."""
    model = random_network(zoo_cfg(name))
    for nms, images in ((True, torch.rand(1, 3, 96, 128)), (False, torch.rand(2, 3, 64, 96))):
        path, graph = write(tmp_path, model, nms, images, {})
        assert max(files.check(path, model, graph, [images])) < 1e-5
        if nms:
            assert files.run_onnx(path)(images)[3].min() >= 15  # detections


def test_torch_archive_equals_the_network(small: Darknet, tmp_path: Path) -> None:
    path = tmp_path / "detector.pt2"
    images = torch.rand(3, 3, 16, 24)
    graph = DetectorGraph(small, FixedSuppression(**OPTIONS))
    files.write_torch(graph, torch.rand(1, 3, 16, 24), {0: "batch"}, METADATA, path)
    assert max(files.check(path, small, graph, [images, images[:1]])) < 1e-5
    with torch.no_grad():
        assert_same_detections(files.run_torch(path)(images), postprocess(small.heads, graph.network(images)))
    extra = {files.METADATA_FILE: ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra[files.METADATA_FILE]) == METADATA
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if PLACE in archive.read(name) or "detector" in name]


def test_a_file_that_differs_is_found_out(written: tuple[Path, Any], small: Darknet) -> None:
    path, graph = written
    images = [torch.rand(1, 3, 16, 24)]
    other = copy.deepcopy(small)
    bias = other.head_convolution(other.heads[0]).conv.bias
    bias.data[4] += 1e-2
    with pytest.raises(ModelError, match=r"the file differs from the network: boxes by .* scores by 0\.00"):
        files.check(path, other, graph, images)
    bias.data[4] = float("nan")
    with pytest.raises(ModelError, match="scores by nan"):
        files.check(path, other, graph, images)
    other_limits = DetectorGraph(small, FixedSuppression(**OPTIONS | {"nms_iou": 0.6}), show_candidates=True)
    with pytest.raises(ModelError, match="non-maximum suppression differs"):
        files.check(path, small, other_limits, images)


CELL = 16
SHOWN: list[int | str] = [0, 1, 2, "white", 3, "noise", 40]
# A network whose boxes are known: every bright cell has two, the second one inside the first, of
# the class that is the cell's strongest colour. With both suppressed into one, there are as many
# detections as bright cells.
CELLS = cfg(
    conv(16, CELL, CELL, "linear", pad=0, batch_normalize=0),
    section("yolo", mask="0,1", anchors="14,14, 12,12", classes=3, num=2),
)


def cell_detector() -> Darknet:
    model = Darknet(parse_cfg(CELLS, "cells.cfg")).eval()
    convolution = model.head_convolution(model.heads[0]).conv
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
    """(3, height, width): white, noise, or black with this many bright cells in colours."""
    if isinstance(bright, str):
        return torch.ones(3, height, width) if bright == "white" else torch.rand(3, height, width)
    image = torch.zeros(3, height, width)
    columns = width // CELL
    for number in range(bright):
        row, column = divmod(number * 7 % (columns * (height // CELL)), columns)
        cell = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        cell[:] = torch.tensor([0.7 + 0.002 * number, 0.9, 0.8]).roll(number)[:, None, None]
    return image


@pytest.mark.parametrize(
    ("file_format", "open_axes", "confidence"),
    [
        ("torch", False, 0.25), ("torch", False, 0.0), ("torch", True, 0.9), ("torch", True, 0.0),
        ("onnx", False, 0.25), ("onnx", True, 0.25), ("onnx", True, 0.0),
    ],
)  # fmt: skip
def test_any_number_of_boxes(file_format: str, open_axes: bool, confidence: float, tmp_path: Path) -> None:
    """Batches of one and of three in files of that shape and in files with dynamic shapes.

    With dynamic shapes the images go down to one stride.
    """
    limits = OPTIONS | {"confidence": confidence, "max_detections": 300}
    model, room = cell_detector(), FixedSuppression(**limits)
    height, width = 9 * CELL, 13 * CELL
    batch = 1 if open_axes or confidence == 0.25 else 3
    axes, path = ANY_SHAPE if open_axes else {}, tmp_path / "file"
    write_file = files.write_onnx if file_format == "onnx" else files.write_torch
    write_file(DetectorGraph(model, room), torch.zeros(batch, 3, height, width), axes, {}, path)
    run = files.run_onnx(path) if file_format == "onnx" else files.run_torch(path)
    other_shapes = [(4, height, width), (2, CELL, CELL), (1, 3 * CELL, CELL)] if open_axes else []
    for count, rows, columns in [(batch, height, width), *other_shapes]:
        for start in range(0, len(SHOWN), count):
            kinds = (SHOWN + SHOWN)[start : start + count]
            images = torch.stack([picture(rows, columns, kind) for kind in kinds])
            with torch.no_grad():
                expected = postprocess(model.heads, model(images), **limits)
            assert_same_detections(run(images), expected, max(rows, columns))
            if confidence == 0.25 and rows == height:
                assert all(kind in (len(one), "white", "noise") for kind, one in zip(kinds, expected, strict=True))
