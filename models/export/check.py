"""Check that an exported file computes what the network computes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.decode import decode
from models.errors import ModelError
from models.export.files import Run, run_onnx, run_onnx_with_candidates, run_torch
from models.export.graph import DetectorGraph, FixedSuppression
from models.network.darknet import Darknet

FIX = "fix: use another opset or format"


def check_onnx(
    path: Path, model: Darknet, graph: DetectorGraph, batches: Sequence[Tensor], tolerance: float
) -> tuple[float, float]:
    """Run an ONNX file of `graph` on batches of images and compare it with the unfused `model`.

    Returns the largest difference of a corner, relative to the longest side of image and box, and
    of a score. With suppression, scores that differ in the last digit may swap two boxes, and
    everything after that can change. So the file's boxes and scores are compared with the model's,
    and its detections with a suppression of its own boxes. Raises ModelError if a difference
    exceeds `tolerance`, or if detections differ.
    """
    run = run_onnx(path)
    if graph.suppression is None:
        return _compare(run, model, None, batches, tolerance)
    inside = run_onnx_with_candidates(path)

    def run_both(images: Tensor) -> tuple[Tensor, ...]:
        outputs = inside(images)
        _check_equal(run(images), outputs[:4])  # the file as it will be used
        return outputs

    return _compare(run_both, model, graph.suppression, batches, tolerance)


def check_torch(
    path: Path, model: Darknet, graph: DetectorGraph, batches: Sequence[Tensor], tolerance: float
) -> tuple[float, float]:
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
) -> tuple[float, float]:
    """Compare the outputs of `run`: detections if there is suppression, all boxes, all scores."""
    largest = torch.zeros(2)
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
            _check_equal(found, suppression(boxes, scores, side))
    if not (largest <= tolerance).all():  # not "any above": NaN must not pass
        raise ModelError(
            f"the export differs from the network: boxes by {largest[0]:.2g} of the image size, scores by"
            f" {largest[1]:.2g}, more than tolerance={tolerance:g}. {FIX}, or a larger tolerance"
        )
    return float(largest[0]), float(largest[1])


def _check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise ModelError if two suppressions of the same boxes differ."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-6, atol=1e-6):
            raise ModelError(f"the export differs from the network in its non-maximum suppression. {FIX}")
