"""A detector as one graph for export: fused network, decoding and, optionally, suppression.

Exporters demand fixed shapes. If the number of results depends on the image, the outputs have room
for the maximum and zeros after the last result.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.decode import decode
from models.network.darknet import Darknet
from models.network.layers import Convolution

REACH = 4  # image sides; far larger boxes would cost all others their precision


class FixedSuppression(nn.Module):
    """Postprocess without multi_label, with outputs of fixed shape.

    confidence: detections score above this. nms_iou: of two boxes of one class that overlap by more
    than this, the better one stays. max_detections: room for each image; the best ones are kept.
    candidates: the best-scored boxes of each image that enter suppression, each with its best
    class.

    The overlaps differ from those of Postprocess in two ways. Boxes are clipped REACH image sides
    outside the image. They are offset by class and image, which rounds corners: by up to 1e-6 of
    the image side with 80 classes and boxes near the image, and up to 1e-5 in a batch of 64.
    """

    def __init__(self, confidence: float, nms_iou: float, max_detections: int, candidates: int) -> None:
        super().__init__()
        assert max_detections <= candidates
        self.confidence = confidence
        self.nms_iou = nms_iou
        self.max_detections = max_detections
        self.candidates = candidates

    def forward(self, boxes_xyxy: Tensor, scores: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detections of each image, best first; rows beyond its count are zero.

        boxes_xyxy: (batch, n, 4) in pixels; scores: (batch, n, classes); side: the longer side of
        the image in pixels. Returns boxes_xyxy (batch, max_detections, 4), scores (batch,
        max_detections), classes int64 (batch, max_detections) and counts int64 (batch,).
        """
        best, best_classes = scores.max(dim=-1)
        # Zeros after the last box, so that there are enough candidates at any image size.
        values, order = _best_first(nn.functional.pad(best, (0, self.candidates)), self.candidates)
        order = order.clamp(max=best.shape[1] - 1)
        boxes, classes = _rows(boxes_xyxy, order), best_classes.gather(1, order)
        survives = self._survivors(boxes, values, classes, scores.shape[-1], side)

        values, place = _best_first(torch.where(survives, values, 0.0), self.max_detections)
        found = values > 0
        boxes = torch.where(found[..., None], _rows(boxes, place), 0.0)
        return boxes, values, torch.where(found, classes.gather(1, place), 0), found.sum(1)

    def _survivors(self, boxes: Tensor, values: Tensor, classes: Tensor, num_classes: int, side: int) -> Tensor:
        """Which candidates (batch, candidates) stay: one run over all images and classes.

        Each pair of image and class has its own cell in a square grid. In a single row of cells the
        coordinates would grow so large that float32 rounds them to whole pixels.
        """
        from torchvision.ops import nms  # not above: most programs import this module and export nothing

        images = torch.arange(values.shape[0], device=values.device)[:, None]
        cells = images * num_classes + classes
        columns = (cells.max() + 1).float().sqrt().ceil().long()
        corners = torch.stack((cells % columns, cells // columns), dim=-1)
        enough = (values > self.confidence)[..., None]
        cut = torch.where(enough, boxes.clamp(-REACH * side, (REACH + 1) * side), 0.0)
        low, high = cut.min(), cut.max()
        moved = cut + torch.cat((corners, corners), dim=-1) * (high - low + 1)
        # Boxes that score too low go to one place outside the grid, where one suppresses all
        # others: time grows with the survivors. That place and a second one always hold a box,
        # because torch.export assumes that two boxes survive and its program fails with fewer.
        places = low + boxes.new_tensor(((-2.0, -2.0, -1.0, -1.0), (-4.0, -4.0, -3.0, -3.0)))
        moved = torch.cat((torch.where(enough, moved, places[0]).flatten(0, 1), places))
        kept = nms(moved, nn.functional.pad(values.flatten(), (0, len(places))), self.nms_iou)
        # The number of kept boxes is not known in advance, so they mark a tensor of known size.
        survives = torch.zeros_like(moved[:, 0], dtype=torch.bool)
        survives[kept] = True
        return survives[: -len(places)].view_as(values) & enough.squeeze(-1)


class DetectorGraph(nn.Module):
    """A fused copy of a network, its decoding and, if given, `suppression`.

    forward takes images as Darknet does: float32 (batch, 3, height, width), RGB in 0..1. Without
    suppression it returns all boxes_xyxy (batch, n, 4) and scores (batch, n, classes) as
    models.decode gives them; with it what FixedSuppression returns and, if `show_candidates`, all
    boxes and scores after that.
    """

    def __init__(self, model: Darknet, suppression: FixedSuppression | None, show_candidates: bool = False) -> None:
        super().__init__()
        self.network = fuse_batch_norm(model)
        self.suppression = suppression
        self.show_candidates = show_candidates and suppression is not None
        self.eval()
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Decode, or detect, ``images``: float32 (B, channels, H, W) from 0 to 1."""
        boxes_xyxy, scores = decode(self.network(images), self.network.heads)
        if self.suppression is None:
            return boxes_xyxy, scores
        side = torch.sym_max(images.shape[2], images.shape[3])  # max() would fix which one is larger
        detections: tuple[Tensor, ...] = self.suppression(boxes_xyxy, scores, side)
        return (*detections, boxes_xyxy, scores) if self.show_candidates else detections


@torch.no_grad()
def fuse_batch_norm(model: Darknet) -> Darknet:
    """A copy with batch normalisation, in evaluation, folded into the convolutions.

    It is computed in float64, so that only the result is rounded. Binary (xnor) convolutions keep
    their batch normalisation.
    """
    fused = copy.deepcopy(model).eval()
    for layer in fused.layers:
        if isinstance(layer, Convolution) and layer.norm is not None and not layer.xnor:
            dtype = layer.conv.weight.dtype
            layer.conv = fuse_conv_bn_eval(layer.conv.double(), layer.norm.double()).to(dtype)
            layer.norm = None
    return fused


def _best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their columns, in stable order, unlike topk."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _rows(boxes: Tensor, order: Tensor) -> Tensor:
    """Select boxes (batch, m, 4) from (batch, n, 4) by order (batch, m)."""
    return boxes.gather(1, order[..., None].expand(-1, -1, 4))
