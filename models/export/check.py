"""Check that an exported file computes what the network computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.boxes import cxcywh_to_xyxy
from models.decode import decode
from models.errors import ModelError
from models.export.files import CANDIDATES, DETECTIONS, Run, run_onnx, run_onnx_part, run_torch
from models.export.graph import DetectorGraph, FixedSuppression
from models.network.darknet import Darknet

CLASSES_IN_USE = 4  # of the invented boxes: few, so that many share a class and overlap
FIX = "fix: use another opset or format"


@dataclass(frozen=True)
class Comparison:
    """The differences between a file and the network, over all images compared.

    boxes: largest difference of a corner, relative to the longest side of image and box.
    scores: largest difference of a score.
    detections, invented: number of equal detections, on the images and on invented boxes.
    """

    boxes: float
    scores: float
    detections: int = 0
    invented: int = 0


def check_onnx(
    path: Path, model: Darknet, graph: DetectorGraph, batches: Sequence[Tensor], tolerance: float
) -> Comparison:
    """Run an ONNX file of `graph` on batches of images and compare it with the unfused `model`.

    With suppression, scores that differ in the last digit may swap two boxes, and everything after
    that can change. So the file's boxes and scores are compared with the model's, and its
    detections with a suppression of its own boxes. Images may show nothing, so its suppression also
    runs on invented boxes. Raises ModelError if a measure of Comparison exceeds `tolerance`.
    """
    run = run_onnx(path)
    if graph.suppression is None:
        return _compare(run, model, None, batches, tolerance)
    detect = run_onnx_part(path, ["images"], [*DETECTIONS, *CANDIDATES])

    def run_both(images: Tensor) -> tuple[Tensor, ...]:
        outputs = detect(images)
        _count_equal(run(images), outputs[:4])  # the file as it will be used
        return outputs

    measured = _compare(run_both, model, graph.suppression, batches, tolerance)
    suppress, invented = run_onnx_part(path, ["images", *CANDIDATES], DETECTIONS), 0
    generator = torch.Generator().manual_seed(0)
    for images in batches:
        boxes, scores = _invented_boxes(model, images, generator)
        expected = graph.suppression(boxes, scores, max(images.shape[2:]))
        invented += _count_equal(suppress(images, boxes, scores), expected)
    return Comparison(measured.boxes, measured.scores, measured.detections, invented)


def check_torch(
    path: Path, model: Darknet, graph: DetectorGraph, batches: Sequence[Tensor], tolerance: float
) -> Comparison:
    """Like check_onnx, for a torch.export archive.

    The archive runs the operators of `graph`, so their boxes and scores before suppression agree.
    """
    run = run_torch(path)
    if graph.suppression is None:
        return _compare(run, model, None, batches, tolerance)

    def with_candidates(images: Tensor) -> tuple[Tensor, ...]:
        return (*run(images), *decode(graph.network(images), graph.network.heads))

    return _compare(with_candidates, model, graph.suppression, batches, tolerance)


@torch.no_grad()
def _compare(
    run: Run, model: Darknet, suppression: FixedSuppression | None, batches: Sequence[Tensor], tolerance: float
) -> Comparison:
    """Compare the outputs of `run`: detections if there is suppression, all boxes, all scores."""
    largest = torch.zeros(2)
    detections = 0
    for images in batches:
        *found, boxes, scores = run(images)
        side = max(images.shape[2:])
        expected_boxes, expected_scores = decode(model(images), model.heads)
        if boxes.shape != expected_boxes.shape or scores.shape != expected_scores.shape:
            raise ModelError(f"the export differs from the network: boxes {list(boxes.shape)}. {FIX}")
        sides = (expected_boxes[..., 2:] - expected_boxes[..., :2]).amax(-1, keepdim=True).clamp(min=side)
        differences = ((boxes - expected_boxes) / sides).abs().max(), (scores - expected_scores).abs().max()
        largest = torch.maximum(largest, torch.stack(differences))
        if suppression is not None:
            detections += _count_equal(found, suppression(boxes, scores, side))
    if not (largest <= tolerance).all():  # not "any above": NaN must not pass
        raise ModelError(
            f"the export differs from the network: boxes by {largest[0]:.2g} of the image size, scores by"
            f" {largest[1]:.2g}, more than tolerance={tolerance:g}. {FIX}, or a larger tolerance"
        )
    return Comparison(float(largest[0]), float(largest[1]), detections)


def _count_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """The number of detections in two outputs of the same boxes; ModelError if they differ."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-6, atol=1e-6):
            raise ModelError(f"the export differs from the network in its non-maximum suppression. {FIX}")
    return int(expected[3].sum())


def _invented_boxes(model: Darknet, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Boxes and scores, shaped as the network's for `images`, with much to suppress."""
    batch, _, height, width = images.shape
    num_boxes = sum(len(head.anchors) * (height // head.stride) * (width // head.stride) for head in model.heads)
    centres, sizes = torch.rand(2, batch, num_boxes, 2, generator=generator) * torch.tensor([width, height])
    scores = torch.rand(batch, num_boxes, model.num_classes, generator=generator) / 2
    scores[..., :CLASSES_IN_USE] *= 2
    return cxcywh_to_xyxy(torch.cat((centres, sizes / 4), dim=-1)), scores
