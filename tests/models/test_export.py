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

from models import Darknet, ModelError, Postprocess, export, parse_cfg, with_box_bins, zoo_cfg
from models.decode import decode
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
            convolution = model.head_convolutions(head)[0].conv
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
    outputs = export.FixedSuppression(**OPTIONS | changes)(*decode(maps, HEADS[:heads]), SIDE)
    assert outputs[0].shape[1] == (OPTIONS | changes)["max_detections"]  # however few boxes there are
    assert_same_detections(outputs, postprocess(HEADS[:heads], maps, **changes))


def test_equal_scores_keep_their_order_and_an_image_without_objects_has_none() -> None:
    maps = [torch.zeros_like(raw) for raw in random_maps(2)]
    for raw in maps:
        raw[1, ..., 4] = -20
    for confidence, count in ((0.2, 100), (0.25, 0)):  # the second is the score of all
        changes = {"confidence": confidence, "nms_iou": 0.6}
        expected = postprocess(HEADS, maps, **changes)
        assert [len(detections) for detections in expected] == [count, 0]
        assert_same_detections(export.FixedSuppression(**OPTIONS | changes)(*decode(maps, HEADS), SIDE), expected)


def test_images_and_classes_do_not_suppress_one_another_however_many_there_are() -> None:
    images, classes, side = 6, 300, 64
    boxes = torch.tensor([[0, 0, 64, 64], [-500, -500, 600, 600], [-60, 10, -20, 50], [63, 63, 100, 100]]).float()
    boxes = boxes.repeat(images, classes, 1)
    labels = torch.arange(classes).repeat_interleave(4)
    scores = torch.nn.functional.one_hot(labels) * torch.linspace(0.5, 1, 4 * classes)[:, None]
    scores = scores.repeat(images, 1, 1)
    room = export.FixedSuppression(**OPTIONS | {"max_detections": 5 * classes, "candidates": 10 * classes})
    assert room(boxes, scores, side)[3].tolist() == [4 * classes] * images
    twice = room(boxes.repeat(1, 2, 1), torch.cat((scores * 0.9, scores), dim=1), side)
    assert twice[3].tolist() == [4 * classes] * images, "a second, better one in each place"
    assert twice[1].equal(room(boxes, scores, side)[1])


@pytest.fixture(scope="module")
def small() -> Darknet:
    torch.manual_seed(0)
    return random_network(parse_cfg(cfg_text(4), "small.cfg"), width=1)


def write(folder: Path, kind: str, graph: export.DetectorGraph, example: Tensor, dynamic: dict[int, str]) -> Path:
    path = folder / f"detector.{kind}"
    (export.write_onnx if kind == "onnx" else export.write_torch)(graph, example, dynamic, METADATA, path)
    return path


@pytest.mark.release
@pytest.mark.parametrize(("kind", "found"), [("onnx", "none or one"), ("pt2", "as many as there is room for")])
def test_a_file_finds_what_the_network_finds(kind: str, found: str, small: Darknet, tmp_path: Path) -> None:
    images = torch.rand(4, 3, 16, 24)
    best, second = decode(small(images), small.heads)[1].flatten().topk(2).values.tolist()
    limits = OPTIONS | {"confidence": (best + second) / 2 if found == "none or one" else 0.0, "max_detections": 20}
    graph = export.DetectorGraph(small, export.FixedSuppression(**limits), show_candidates=True)
    path = write(tmp_path, kind, graph, images[:1], ANY_SHAPE)
    run = export.run_onnx(path) if kind == "onnx" else export.run_torch(path)
    batches = [*images.split(1), images, torch.rand(2, 3, 32, 8), torch.rand(1, 3, 2, 2)]
    counts = set()
    for batch in batches:
        outputs = run(batch)[:4]
        assert_same_detections(outputs, postprocess(small.heads, small(batch), **limits), max(batch.shape[2:]))
        counts |= {*outputs[3].tolist()}
    assert (counts >= {0, 1}) if found == "none or one" else (max(counts) == 20)
    assert max(export.check_file(path, small, graph, batches)) < 1e-5


@pytest.mark.release
def test_files_hold_their_metadata_and_one_that_differs_is_found_out(small: Darknet, tmp_path: Path) -> None:
    graph = export.DetectorGraph(small, export.FixedSuppression(**OPTIONS), show_candidates=True)
    onnx_file, archive_file = (write(tmp_path, kind, graph, torch.rand(1, 3, 16, 24), {}) for kind in ("onnx", "pt2"))
    model = onnx.load(onnx_file)
    assert {prop.key: prop.value for prop in model.metadata_props} == METADATA
    assert [output.name for output in model.graph.output] == ["boxes", "scores", "classes", "counts"]
    assert PLACE not in onnx_file.read_bytes()
    extra = {export.METADATA_FILE: ""}
    torch.export.load(archive_file, extra_files=extra)
    assert json.loads(extra[export.METADATA_FILE]) == METADATA
    with zipfile.ZipFile(archive_file) as archive:
        assert not [name for name in archive.namelist() if PLACE in archive.read(name) or "detector" in name]
    images = [torch.rand(1, 3, 16, 24)]
    other = copy.deepcopy(small)
    bias = other.head_convolutions(other.heads[0])[0].conv.bias
    bias.data[4] += 1e-2
    with pytest.raises(ModelError, match=r"the file differs from the network: boxes by .* scores by 0\.00"):
        export.check_file(onnx_file, other, graph, images)
    bias.data[4] = float("nan")
    with pytest.raises(ModelError, match=r"scores by nan|not finite"):
        export.check_file(onnx_file, other, graph, images)
    other_limits = export.DetectorGraph(
        small, export.FixedSuppression(**OPTIONS | {"nms_iou": 0.6}), show_candidates=True
    )
    with pytest.raises(ModelError, match="non-maximum suppression differs"):
        export.check_file(onnx_file, small, other_limits, images)


@pytest.mark.release
@pytest.mark.parametrize("name", ["yolov4-tiny", "yolov3-tiny-decoupled"])
def test_onnx_equals_the_network(name: str, tmp_path: Path) -> None:
    cfg, images = zoo_cfg(name), torch.rand(2, 3, 96, 128)
    model = random_network(with_box_bins(cfg, 16) if "decoupled" in name else cfg)
    graph = export.DetectorGraph(model, None, show_candidates=True)
    path = write(tmp_path, "onnx", graph, images, {})
    assert max(export.check_file(path, model, graph, [images])) < 1e-5
