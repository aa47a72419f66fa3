"""Which of overlapping boxes stay, for all images and classes of a batch.

torchvision is imported where it is used: that takes as long as torch, and many programs need none.
"""

import torch
from torch import Tensor

REACH = 2**18  # pixels from the origin; boxes are cut there
PER_PIXEL = 2**18  # steps of a coordinate, about float32's own at 48 pixels


def nms_in_each_group(boxes_xyxy: Tensor, scores: Tensor, groups: Tensor, iou: float) -> Tensor:
    """Positions of the boxes (n, 4) that survive, ascending. Boxes come best first in each group.

    groups: int64 (n,), one number for each pair of image and class. There is one run for each, the
    fastest way on a CPU: a single run compares all pairs (scripts/bench/scoring.py).
    """
    from torchvision.ops import nms

    if not len(groups):
        return groups
    sorted_groups, by_group = groups.sort(stable=True)  # best first inside each group
    sizes = sorted_groups.unique_consecutive(return_counts=True)[1].tolist()
    columns = (by_group, boxes_xyxy[by_group], scores[by_group])  # gathered once, then only cut
    parts = zip(*(column.split(sizes) for column in columns), strict=True)
    kept = [positions[nms(boxes, values, iou)] for positions, boxes, values in parts]
    return torch.cat(kept).sort().values


def nms_at_once(boxes_xyxy: Tensor, images: Tensor, classes: Tensor, iou: float) -> Tensor:
    """The same in one run, for which the host of an accelerator waits once.

    images, classes: int64 (n,) below 65,536. They move boxes apart, each on its axis. Corners are
    rounded to whole steps before, and float64 holds these exactly wherever they are moved, so that
    the other boxes of a call do not change what stays. Rounding may decide otherwise than float32
    where an overlap equals ``iou`` to six digits.
    """
    from torchvision.ops import nms

    steps = (boxes_xyxy.double().clamp(-REACH, REACH) * PER_PIXEL).round()
    places = torch.stack((classes, images, classes, images), dim=1)
    in_order = torch.arange(len(boxes_xyxy), 0, -1, dtype=torch.float64, device=boxes_xyxy.device)
    kept: Tensor = nms(steps + places * (2 * REACH * PER_PIXEL), in_order, iou)
    return kept


def merged(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, kept: Tensor, iou: float) -> Tensor:
    """The boxes (k, 4) at positions `kept`, each averaged as Postprocess.merge describes."""
    from torchvision.ops import box_iou

    alike = (box_iou(boxes_xyxy[kept], boxes_xyxy) > iou) & (classes[kept, None] == classes)
    alike[torch.arange(len(kept), device=kept.device), kept] = True  # a box without area overlaps itself by 0 / 0
    weights = alike * scores
    means: Tensor = weights @ boxes_xyxy / weights.sum(1, keepdim=True)
    return means
