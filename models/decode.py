"""Decoding (shared with the losses), scores and non-maximum suppression: raw maps to boxes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_iou, nms

from models.boxes import cxcywh_to_xyxy
from models.network.heads import Head

MAX_LOG_SIZE = math.log(1e3)  # at most a thousand anchors wide: exp stays finite early in training


def cell_offsets(raw_xy: Tensor, head: Head) -> Tensor:
    """Box centres from their cell's corner, in cells; scale_x_y above 1 reaches past the cell."""
    return raw_xy.sigmoid() * head.scale_x_y - (head.scale_x_y - 1) / 2


def box_sizes(raw_wh: Tensor, anchors: Tensor, head: Head) -> Tensor:
    """Box widths and heights in pixels: exp(raw) anchors, or (2 sigmoid)^2 with new_coords.

    exp is bounded through its argument: clamping its result would turn inf into a NaN gradient.
    """
    if head.new_coords:
        return (2 * raw_wh.sigmoid()).square() * anchors
    return raw_wh.clamp(max=MAX_LOG_SIZE).exp() * anchors


def decode(raw_maps: Sequence[Tensor], heads: Sequence[Head]) -> tuple[Tensor, Tensor]:
    """Boxes and scores of every anchor of every cell, in float32.

    raw_maps: as Darknet returns them. Returns boxes_xyxy (batch, n, 4) in pixels at network scale,
    not clipped to the image, and scores (batch, n, classes) = objectness * class probability.
    n runs over heads, anchors, rows, columns.
    """
    boxes, scores = [], []
    for raw, head in zip(raw_maps, heads, strict=True):
        coordinates, objectness, classes = raw.float().split((4, 1, head.num_classes), dim=-1)
        anchors = torch.tensor(head.anchors, device=raw.device)
        boxes.append(decode_boxes(coordinates, anchors, head).flatten(1, 3))
        scores.append((objectness.sigmoid() * classes.sigmoid()).flatten(1, 3))
    return torch.cat(boxes, dim=1), torch.cat(scores, dim=1)


def decode_boxes(coordinates: Tensor, anchors: Tensor, head: Head) -> Tensor:
    """Decode the first four values of a raw map to corners (batch, anchors, rows, columns, 4).

    The corners are in pixels at network scale. anchors: (anchors, 2), those of the head, on the
    map's device already, because copying them would block.
    """
    xy, wh = coordinates.split(2, dim=-1)
    rows = torch.arange(xy.shape[2], device=xy.device)
    columns = torch.arange(xy.shape[3], device=xy.device)
    cells_xy = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)  # (rows, columns, 2)
    centres = (cell_offsets(xy, head) + cells_xy) * head.stride
    return cxcywh_to_xyxy(torch.cat((centres, box_sizes(wh, anchors[:, None, None], head)), dim=-1))


@dataclass(frozen=True)
class Postprocess:
    """Turn raw maps into the detections of each image.

    confidence: detections score above this.
    nms_iou: of two boxes of one class that overlap by more than this, the better one stays.
    max_detections: how many detections an image keeps, over all classes, best first.
    multi_label: a box may be a detection of several classes; otherwise of its best class only.
    candidates: how many boxes, best first, enter non-maximum suppression. This bounds its time
        without a time limit, which would make results depend on speed.
    merge: a kept box becomes the mean, weighted by score, of all candidates of its class that
        overlap it by more than nms_iou, itself included.
    """

    heads: Sequence[Head]
    confidence: float
    nms_iou: float
    max_detections: int
    multi_label: bool
    candidates: int = 30000
    merge: bool = False

    @torch.no_grad()
    def __call__(self, raw_maps: Sequence[Tensor]) -> list[Tensor]:
        """For each image a float32 (n, 6), best first: x1, y1, x2, y2, score, class.

        Corners are in pixels at network scale. Each image is processed alone and equal scores keep
        the order of decode, so the other images of the batch do not change the result.
        """
        boxes, scores = decode(raw_maps, self.heads)
        return [self._one_image(boxes[index], scores[index]) for index in range(len(boxes))]

    def _one_image(self, boxes_xyxy: Tensor, scores: Tensor) -> Tensor:
        if self.multi_label:
            rows, classes = (scores > self.confidence).nonzero(as_tuple=True)
        else:
            rows = (scores.amax(1) > self.confidence).nonzero().squeeze(1)
            classes = scores[rows].argmax(1)
        best_first = scores[rows, classes].sort(descending=True, stable=True)
        order = best_first.indices[: self.candidates]
        rows, classes, values = rows[order], classes[order], best_first.values[: self.candidates]
        candidates = boxes_xyxy[rows]
        kept = nms_in_each_class(candidates, values, classes, self.nms_iou)[: self.max_detections]
        boxes = _merged(candidates, values, classes, kept, self.nms_iou) if self.merge else candidates[kept]
        return torch.cat((boxes, values[kept, None], classes[kept, None].float()), dim=1)


def nms_in_each_class(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Positions of the boxes (n, 4) that survive, ascending. Boxes come sorted, best first.

    Runs once per class present. The usual single run, with an offset between classes, is twenty
    times slower with many candidates (scripts/bench/evaluation.py) and rounds the corners.
    """
    by_class = classes.sort(stable=True).indices  # best first inside each class
    sizes = [size for size in torch.bincount(classes).tolist() if size]
    if not sizes:
        return by_class
    columns = (by_class, boxes_xyxy[by_class], scores[by_class])  # gathered once, then only cut
    groups = zip(*(column.split(sizes) for column in columns), strict=True)
    kept = [positions[nms(boxes, values, iou)] for positions, boxes, values in groups]
    return torch.cat(kept).sort().values


def _merged(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, kept: Tensor, iou: float) -> Tensor:
    """The boxes (k, 4) at positions `kept`, each averaged as Postprocess.merge describes."""
    alike = (box_iou(boxes_xyxy[kept], boxes_xyxy) > iou) & (classes[kept, None] == classes)
    alike[torch.arange(len(kept), device=kept.device), kept] = True  # a box without area overlaps itself by 0 / 0
    weights = alike * scores
    means: Tensor = weights @ boxes_xyxy / weights.sum(1, keepdim=True)
    return means
