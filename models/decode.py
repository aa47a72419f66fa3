"""Boxes: their formats and overlaps, decoding (shared with the losses), and suppression.

Formats are x1, y1, x2, y2 corners, or cx, cy, w, h centres and sizes, in pixels. torchvision is
imported where it is used, because that takes as long as importing torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from models.cfg import ModelError
from models.config import IouKind
from models.heads import Anchors, Head, HeadAnchors

EPS = 1e-7  # keeps quotients finite for boxes without area; far below any area in pixels
MAX_LOG_SIZE = math.log(1e3)  # a box is at most a thousand anchors wide: exp stays finite early in training
FIRST_CANDIDATES = 10  # for each detection wanted: how many candidates are tried before all others
FEW_BOXES = 48  # up to here a CPU compares all pairs faster than it starts one run for each class
MAX_PAIRS = 2**24  # of boxes that an accelerator compares at once, in about 2 GB
ROUNDS = 8  # of suppression between two looks at what changed
NOT_FINITE = "the network computes values that are not finite", "weights of this very network, or precision=float32"


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64: the types of losses and overlaps."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """(..., 4) centres and sizes to corners."""
    centre, size = boxes_cxcywh.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def areas(sizes: Tensor) -> Tensor:
    """Widths and heights (..., 2) to areas. The backward pass of ``prod`` would read zeros back."""
    return sizes[..., 0] * sizes[..., 1]


def wh_iou(sizes1: Tensor, sizes2: Tensor) -> Tensor:
    """IoU (n, m) of sizes (n, 2) and (m, 2) around a common centre: how alike two shapes are."""
    intersection = areas(torch.minimum(sizes1[:, None], sizes2))
    union = areas(sizes1)[:, None] + areas(sizes2) - intersection
    return intersection / union.clamp(min=EPS)


def box_iou_aligned(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor, kind: IouKind) -> Tensor:
    """Overlap (...) of two tensors of boxes (..., 4), pair by pair, in float32 or float64.

    GIoU (Rezatofighi et al. 2019) subtracts the share of the enclosing box that neither covers.
    DIoU (Zheng et al. 2020) subtracts the squared distance of the centres over the squared diagonal
    of the enclosing box. CIoU also subtracts the difference of the aspect ratios; its weight alpha
    gets no gradient, as its authors define it.
    """
    # Half precision would lose EPS and, above 2048, whole pixels.
    low1, high1 = at_least_float32(boxes1_xyxy).split(2, -1)
    low2, high2 = at_least_float32(boxes2_xyxy).split(2, -1)
    size1 = high1 - low1
    size2 = high2 - low2
    intersection = areas((torch.minimum(high1, high2) - torch.maximum(low1, low2)).clamp(min=0))
    union = areas(size1) + areas(size2) - intersection
    iou = intersection / union.clamp(min=EPS)
    if kind is IouKind.iou:
        return iou
    enclosing = torch.maximum(high1, high2) - torch.minimum(low1, low2)
    if kind is IouKind.giou:
        area = areas(enclosing).clamp(min=EPS)
        return iou - (area - union) / area
    distance = ((low1 + high1 - low2 - high2) / 2).square().sum(-1)
    diou: Tensor = iou - distance / enclosing.square().sum(-1).clamp(min=EPS)
    if kind is IouKind.diou:
        return diou
    angle1 = torch.atan(size1[..., 0] / size1[..., 1].clamp(min=EPS))
    angle2 = torch.atan(size2[..., 0] / size2[..., 1].clamp(min=EPS))
    aspect = (2 / math.pi * (angle1 - angle2)).square()
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect).clamp(min=EPS)
    return diou - alpha * aspect


def cell_offsets(raw_xy: Tensor, head: Head) -> Tensor:
    """Box centres from their cell's corner, in cells; scale_x_y above 1 reaches past the cell."""
    if head.linear_xy:
        return raw_xy
    return raw_xy.sigmoid() * head.scale_x_y - (head.scale_x_y - 1) / 2


def box_sizes(raw_wh: Tensor, anchors: Tensor, head: Head) -> Tensor:
    """Box widths and heights in pixels: exp(raw) anchors, or (2 sigmoid)^2 with new_coords.

    exp is bounded through its argument: clamping its result would turn inf into a NaN gradient.
    """
    if head.new_coords:
        return (2 * raw_wh.sigmoid()).square() * anchors
    return raw_wh.clamp(max=MAX_LOG_SIZE).exp() * anchors


def boxes_in_cells(coordinates: Tensor, anchors: Tensor, head: Head) -> Tensor:
    """Corners (..., 4) of boxes from their raw coordinates, in pixels from their cell's corner.

    anchors: (..., 2) in pixels. Differences of such small numbers lose no digits.
    """
    if head.box_bins:
        shares = coordinates.unflatten(-1, (4, head.box_bins)).softmax(-1)
        sides = (shares * torch.arange(head.box_bins, device=shares.device)).sum(-1)
        left_top, right_bottom = sides.split(2, -1)
        return (0.5 + torch.cat((-left_top, right_bottom), -1)) * head.stride
    xy, wh = coordinates.split(2, -1)
    centres = cell_offsets(xy, head) * head.stride
    return cxcywh_to_xyxy(torch.cat((centres, box_sizes(wh, anchors, head)), -1))


def decode(
    raw_maps: Sequence[Tensor], heads: Sequence[Head], anchors: Sequence[Anchors] | None = None
) -> tuple[Tensor, Tensor]:
    """Boxes and scores of every anchor of every cell, in float32.

    raw_maps: as Darknet returns them, or without heads the result itself, as of an exported file.
    anchors: those of the heads on the maps' device, copied there if not given. Returns boxes_xyxy
    (batch, n, 4) in pixels at network scale, not clipped to the image, and scores (batch, n,
    classes) = objectness * class probability. n runs over heads, anchors, rows, columns.
    """
    if not heads:
        return raw_maps[0], raw_maps[1]
    boxes = []
    scores = []
    anchors = anchors or HeadAnchors(heads)[raw_maps[0].device]
    for raw, head, sizes in zip(raw_maps, heads, anchors, strict=True):
        coordinates, objectness, classes = head.split(raw.float())
        boxes.append(decode_boxes(coordinates, sizes.own, head).flatten(1, 3))
        scores.append((objectness.sigmoid() * classes.sigmoid()).flatten(1, 3))
    return torch.cat(boxes, 1), torch.cat(scores, 1)


def decode_boxes(coordinates: Tensor, anchors: Tensor, head: Head) -> Tensor:
    """Corners (batch, anchors, rows, columns, 4) in pixels from the coordinates of a raw map."""
    rows, columns = coordinates.shape[2:4]
    y = torch.arange(rows, device=coordinates.device) * head.stride
    x = torch.arange(columns, device=coordinates.device) * head.stride
    y, x = torch.meshgrid(y, x, indexing="ij")
    return boxes_in_cells(coordinates, anchors[:, None, None], head) + torch.stack((x, y, x, y), -1)


@dataclass(frozen=True)
class Postprocess:
    """Turn raw maps into the detections of each image."""

    heads: Sequence[Head]
    confidence: float  # detections score above this
    nms_iou: float  # of two boxes of one class that overlap by more than this, the better one stays
    max_detections: int  # of an image, over all classes, best first
    multi_label: bool  # a box may be a detection of several classes; otherwise of its best class only
    # How many boxes, best first, enter non-maximum suppression. This bounds its time without a time
    # limit, which would make results depend on speed.
    candidates: int = 30000
    # A surviving box becomes the mean, weighted by score, of itself and all candidates of its class
    # that overlap it by more than nms_iou.
    merge: bool = False
    # The numbers of the classes to report; None: all. Boxes of others count towards neither limit.
    classes: Sequence[int] | None = None
    refuse_nonfinite: bool = True  # raise ModelError for raw maps that are not finite

    @torch.no_grad()
    def __call__(self, raw_maps: Sequence[Tensor]) -> list[Tensor]:
        """For each image a float32 (n, 6) on the CPU, best first: x1, y1, x2, y2, score, class.

        Corners are in pixels at network scale. The result of an image does not depend on the others
        in the batch, and equal scores keep the order of decode.
        """
        if raw_maps[0].device.type != "cpu":
            return self.detect_at_once(raw_maps)
        detections = []
        for maps in zip(*(raw.split(1) for raw in raw_maps), strict=True):  # one image fits a CPU's cache
            detections += self.detect_at_once(maps)
        return detections

    def detect_at_once(self, raw_maps: Sequence[Tensor]) -> list[Tensor]:
        """The same for all images together, as accelerators need it.

        Their host waits six times, five times more if the best candidates of an image are not
        enough, and once more for each further MAX_PAIRS of boxes and each further ROUNDS.
        """
        boxes, scores = decode(raw_maps, self.heads, self._anchors[raw_maps[0].device])
        if self.classes is not None:
            wanted = _are_wanted(tuple(self.classes), scores.shape[2], scores.device)
            # Without multi_label a box is of its best class only, even if that is not wanted.
            scores = scores * (wanted if self.multi_label else wanted[scores.argmax(2, keepdim=True)])
        best = scores.amax(2)
        values = scores.flatten(1) if self.multi_label else best
        every = values > self.confidence
        masks = [every]
        if not self.merge:  # only better boxes suppress a box, so the best candidates mostly suffice
            first = min(FIRST_CANDIDATES * self.max_detections, best.shape[1])
            masks.insert(0, every & (values >= best.topk(first).values[:, -1:]))
        finite = torch.cat([torch.stack(raw.aminmax()) for raw in raw_maps]).isfinite().all()
        counted = torch.stack(masks).count_nonzero(2)
        *numbers, are_finite = torch.cat((counted, finite.expand(1, len(boxes)))).tolist()
        if self.refuse_nonfinite and not all(are_finite):
            raise ModelError(*NOT_FINITE)
        detections = {}
        for mask, counts in zip(masks, numbers, strict=True):
            missing = [image for image in range(len(boxes)) if image not in detections]
            by_image = mask.flatten().nonzero_static(size=sum(counts)).squeeze(1).split(counts)
            found = self._detections(missing, [by_image[image] for image in missing], values, boxes, scores)
            for image, rows in zip(missing, found, strict=True):
                had_all = min(counts[image], self.candidates) == min(numbers[-1][image], self.candidates)
                if had_all or len(rows) >= self.max_detections:
                    detections[image] = rows
            if len(detections) == len(boxes):
                break
        return [detections[image] for image in range(len(boxes))]

    @cached_property
    def _anchors(self) -> HeadAnchors:
        return HeadAnchors(self.heads)

    def _detections(
        self, numbers: list[int], positions: list[Tensor], values: Tensor, boxes: Tensor, scores: Tensor
    ) -> Sequence[Tensor]:
        """CPU detections (n, 6) of images; positions: int64, in the flattened values (batch, m)."""
        every = torch.cat(positions)
        # Bits of positive numbers rise with them, so one sort ranks the candidates of all images.
        ranks = (every // values.shape[1] << 32) - values.flatten()[every].view(torch.int32)
        in_order = every[ranks.sort(stable=True).indices].split([len(own) for own in positions])
        limited = [own[: self.candidates] for own in in_order]
        best = torch.cat(limited)
        num_classes = scores.shape[2]
        images = best // values.shape[1]
        rows = best % values.shape[1]
        if self.multi_label:
            classes = rows % num_classes
            rows = rows // num_classes
        else:
            classes = scores[images, rows].argmax(1)
        best_values = values.flatten()[best]
        sizes = [len(own) for own in limited]
        table = torch.cat((boxes[images, rows], torch.stack((best_values, classes), 1)), 1)
        groups = images * num_classes + classes
        if table.device.type == "cpu" and len(groups) > FEW_BOXES:
            survivors = nms_in_each_group(table[:, :4], best_values, groups, self.nms_iou)
        else:
            survivors = nms_at_once(table[:, :4], groups, self.nms_iou)
        every = torch.arange(len(boxes), device=table.device)
        ends = [0, *torch.searchsorted(images[survivors], every, right=True).tolist()]
        kept = [survivors[ends[image] : ends[image + 1]][: self.max_detections] for image in numbers]
        of_images = [len(own) for own in kept]
        found = table[torch.cat(kept)]
        if self.merge:
            for own, candidates in zip(found.split(of_images), table.split(sizes), strict=True):
                own[:, :4] = merged_boxes(own, candidates, self.nms_iou)
        detections: Sequence[Tensor] = found.cpu().split(of_images)
        return detections


@cache  # a copy to a GPU would block each time
def _are_wanted(classes: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Bool (count,): which numbers are among ``classes``."""
    return torch.tensor([number in classes for number in range(count)], device=device)


def nms_in_each_group(boxes_xyxy: Tensor, scores: Tensor, groups: Tensor, iou: float) -> Tensor:
    """Positions of the boxes (n, 4) that survive, ascending. Boxes come best first in each group.

    groups: int64 (n,), one number for each pair of image and class. A run for each is fastest on a
    CPU (docs/results/notebook.md).
    """
    from torchvision.ops import nms

    sorted_groups, by_group = groups.sort(stable=True)  # best first inside each group
    sizes = sorted_groups.unique_consecutive(return_counts=True)[1].tolist()
    boxes = boxes_xyxy[by_group].split(sizes)
    values = scores[by_group].split(sizes)
    survivors = []
    for positions, own, best_first in zip(by_group.split(sizes), boxes, values, strict=True):
        survivors.append(positions[nms(own, best_first, iou)])
    return torch.cat(survivors).sort().values


def nms_at_once(boxes_xyxy: Tensor, groups: Tensor, iou: float) -> Tensor:
    """``nms_in_each_group``, exactly, as an accelerator does it fast: all pairs are compared.

    A box stays if no better one of its group that stays overlaps it. From all boxes on, each round
    of this settles at least the next of every chain of overlaps, until nothing changes. The host
    waits for the number of pairs, for each MAX_PAIRS of them, and once in ROUNDS.
    """
    sorted_groups, by_group = groups.sort(stable=True)  # best first inside each group
    starts = torch.searchsorted(sorted_groups, sorted_groups)  # where its group starts, for each box
    ends = (torch.arange(len(groups), device=groups.device) - starts).cumsum(0)  # where its pairs end
    # Torch's gather of rows of 16 bytes takes ten times as long as four of single numbers.
    left, top, right, bottom = boxes_xyxy[by_group].T.contiguous()
    area = (right - left) * (bottom - top)
    count = int(ends[-1]) if len(groups) else 0
    found = [groups.new_zeros(2, 0)]  # pairs that overlap
    for start in range(0, count, MAX_PAIRS):
        pair = torch.arange(start, min(start + MAX_PAIRS, count), device=groups.device)
        worse = torch.searchsorted(ends, pair, right=True)
        better = starts[worse] + ends[worse] - 1 - pair
        width = torch.minimum(right[better], right[worse]) - torch.maximum(left[better], left[worse])
        height = torch.minimum(bottom[better], bottom[worse]) - torch.maximum(top[better], top[worse])
        both = width.clamp(min=0) * height.clamp(min=0)
        overlap = both / (area[better] + area[worse] - both)  # NaN without area: such boxes suppress none
        close = overlap.double() > iou  # float32 would round the limit
        found.append(torch.stack((better, worse))[:, close.nonzero().squeeze(1)])
    better, worse = torch.cat(found, 1)
    stays = torch.ones_like(groups)
    is_settled = False
    remaining = len(groups)
    while not is_settled:
        for _ in range(ROUNDS):
            before = stays
            suppressed = torch.zeros_like(stays).index_add_(0, worse, stays[better])
            stays = (suppressed == 0).long()
        is_settled, remaining = torch.stack(((stays != before).sum() == 0, stays.sum())).tolist()
    return by_group[stays.nonzero_static(size=remaining).squeeze(1)].sort().values


def merged_boxes(rows: Tensor, candidates: Tensor, iou: float) -> Tensor:
    """The boxes (k, 4) of detections, each averaged over candidates as Postprocess.merge says."""
    from torchvision.ops import box_iou

    alike = (box_iou(rows[:, :4], candidates[:, :4]) > iou) & (rows[:, 5:6] == candidates[:, 5])
    weights = alike * candidates[:, 4]
    total = weights.sum(1, keepdim=True)
    # A box without area overlaps itself by 0 / 0.
    return torch.where(total > 0, weights @ candidates[:, :4] / total, rows[:, :4])
