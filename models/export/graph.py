"""A detector as one graph for torch.export and ONNX: fused network, decoding and, if asked for, suppression.

Everything here keeps to fixed shapes, which exporters demand: where the number of results depends on the image, the
outputs have room for the most and are zero behind the last.
"""

import copy

import torch
from torch import Tensor, nn
from torchvision.ops import nms  # type: ignore[import-untyped]

from models.decode import decode
from models.network.darknet import Darknet
from models.network.layers import Convolution

REACH = 4  # sides of the image: far larger boxes would cost all others the digits behind the point


class FixedSuppression(nn.Module):
    """Non-maximum suppression in each class with outputs of fixed shape: what Postprocess does without multi_label.

    confidence: only scores above it are detections.
    nms_iou: of two boxes of one class that overlap by more than this, the better one stays.
    max_detections: room for each image; the best ones are kept.
    candidates: the best-scored boxes of each image that enter suppression, each with its best class.

    Two things differ from Postprocess, both for overlaps only. Boxes are cut REACH image sides outside the image; and
    they are moved apart by class and image, which rounds corners: with 80 classes and boxes that stay near the image by
    up to 1e-6 of its side, in a batch of 64 by up to 1e-5.
    """

    def __init__(self, confidence: float, nms_iou: float, max_detections: int, candidates: int) -> None:
        super().__init__()
        assert max_detections <= candidates
        self.confidence = confidence
        self.nms_iou = nms_iou
        self.max_detections = max_detections
        self.candidates = candidates

    def forward(self, boxes_xyxy: Tensor, scores: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detections of each image, best first; those beyond its count are all zero.

        boxes_xyxy: (batch, n, 4) in pixels; scores: (batch, n, classes); side: the longer side of the image in pixels.
        Returns boxes_xyxy (batch, max_detections, 4), scores (batch, max_detections), classes int64 (batch,
        max_detections) and counts int64 (batch,).
        """
        best, best_classes = scores.max(dim=-1)
        # Zeros behind the last box, so that there are enough candidates at any image size.
        values, order = _best_first(nn.functional.pad(best, (0, self.candidates)), self.candidates)
        order = order.clamp(max=best.shape[1] - 1)
        boxes, classes = _rows(boxes_xyxy, order), best_classes.gather(1, order)
        survives = self._survivors(boxes, values, classes, scores.shape[-1], side)

        values, place = _best_first(torch.where(survives, values, 0.0), self.max_detections)
        found = values > 0
        boxes = torch.where(found[..., None], _rows(boxes, place), 0.0)
        return boxes, values, torch.where(found, classes.gather(1, place), 0), found.sum(1)

    def _survivors(self, boxes: Tensor, values: Tensor, classes: Tensor, num_classes: int, side: int) -> Tensor:
        """Which candidates (batch, candidates) stay: one suppression over all images and classes of the batch.

        Each pair of image and class has a cell of its own in a square grid. In one row of cells the coordinates would
        grow so large that float32 rounds them to whole pixels.
        """
        images = torch.arange(values.shape[0], device=values.device)[:, None]
        cells = images * num_classes + classes
        columns = (cells.max() + 1).float().sqrt().ceil().long()
        corners = torch.stack((cells % columns, cells // columns), dim=-1)
        enough = (values > self.confidence)[..., None]
        cut = torch.where(enough, boxes.clamp(-REACH * side, (REACH + 1) * side), 0.0)
        low, high = cut.min(), cut.max()
        moved = cut + torch.cat((corners, corners), dim=-1) * (high - low + 1)
        # What scores too little goes to one place outside the grid, where one box suppresses all the others: the time
        # grows with the number of boxes that survive. That place and a second one hold a box in any case: torch.export
        # takes for granted that two boxes survive, and its program raises where fewer do.
        places = low + boxes.new_tensor(((-2.0, -2.0, -1.0, -1.0), (-4.0, -4.0, -3.0, -3.0)))
        moved = torch.cat((torch.where(enough, moved, places[0]).flatten(0, 1), places))
        kept = nms(moved, nn.functional.pad(values.flatten(), (0, len(places))), self.nms_iou)
        # The number of kept boxes is not known before they are, so they mark places in a tensor of known size.
        survives = torch.zeros_like(moved[:, 0], dtype=torch.bool)
        survives[kept] = True
        return survives[: -len(places)].view_as(values) & enough.squeeze(-1)


class DetectorGraph(nn.Module):
    """Images in, boxes and scores out: a fused copy of a network, its decoding, and `suppression` where there is one.

    forward takes images as Darknet does: float32 (batch, 3, height, width), RGB in 0..1. Without suppression it
    returns all boxes_xyxy (batch, n, 4) and scores (batch, n, classes) as models.decode gives them; with it what
    FixedSuppression returns and, if `show_candidates`, all boxes and scores after that.
    """

    def __init__(self, model: Darknet, suppression: FixedSuppression | None, show_candidates: bool = False) -> None:
        super().__init__()
        self.network = fuse_batch_norm(model)
        self.suppression = suppression
        self.show_candidates = show_candidates and suppression is not None
        self.eval()
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        boxes_xyxy, scores = decode(self.network(images), self.network.heads)
        if self.suppression is None:
            return boxes_xyxy, scores
        side = torch.sym_max(images.shape[2], images.shape[3])  # max() would settle which one is larger for good
        detections: tuple[Tensor, ...] = self.suppression(boxes_xyxy, scores, side)
        return (*detections, boxes_xyxy, scores) if self.show_candidates else detections


def fuse_batch_norm(model: Darknet) -> Darknet:
    """A copy whose convolutions do the work of their batch normalisations, with the statistics of evaluation.

    gamma * (conv(x) - mean) / sqrt(var + eps) + beta is a convolution with scaled kernels and a bias; both are computed
    in float64, so that only the result is rounded. Binary (xnor) convolutions keep their batch normalisation.
    """
    fused = copy.deepcopy(model).eval()
    for layer in fused.layers:
        if isinstance(layer, Convolution) and layer.norm is not None and not layer.xnor:
            _fuse(layer, layer.norm)
    return fused


@torch.no_grad()
def _fuse(layer: Convolution, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = layer.conv.weight.double() * scale[:, None, None, None]
    bias = norm.bias.double() - norm.running_mean.double() * scale
    layer.conv.weight = nn.Parameter(weight.to(layer.conv.weight.dtype))
    layer.conv.bias = nn.Parameter(bias.to(layer.conv.weight.dtype))
    layer.norm = None


def _best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their columns; equal ones keep their order, which topk does not promise."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _rows(boxes: Tensor, order: Tensor) -> Tensor:
    """Of boxes (batch, n, 4) those that order (batch, m) names: (batch, m, 4)."""
    return boxes.gather(1, order[..., None].expand(-1, -1, 4))
