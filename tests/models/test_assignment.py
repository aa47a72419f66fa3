"""The steps of an assignment against torchvision's IoU and plain loops."""

import pytest
import torch
from torchvision.ops import box_iou

from models import assignment
from models.assignment import best_overlaps, positives_by_shape
from models.decode import cxcywh_to_xyxy
from models.heads import Anchors


@pytest.mark.parametrize("pairs_at_once", [2**18, 70])
def test_best_overlaps_are_those_of_torchvision(pairs_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 boxes in each of three images, the last without a target."""
    monkeypatch.setattr(assignment, "PAIRS_AT_ONCE", pairs_at_once)
    boxes = cxcywh_to_xyxy(torch.rand(3, 60, 4) * 60 + 4)
    targets = torch.cat((torch.randint(0, 2, (20, 1)), torch.randint(0, 5, (20, 1)), torch.rand(20, 4) * 60 + 4), 1)
    best = best_overlaps(boxes, targets)
    for image in range(2):
        expected = box_iou(boxes[image], cxcywh_to_xyxy(targets[targets[:, 0] == image, 2:]))
        torch.testing.assert_close(best[image], expected.amax(1))
    assert (best[2] == 0).all() and (best_overlaps(boxes, targets[:0]) == 0).all()


def test_of_equal_anchors_the_first_is_the_best() -> None:
    """Scaled YOLOv4's cfg files list some anchors twice."""
    listed = torch.tensor([[10.0, 20.0], [30.0, 30.0], [10.0, 20.0], [11.0, 21.0]])
    target = torch.tensor([[0.0, 0, 40, 40, 10, 20]])

    def positive(mask: list[int], iou_thresh: float) -> list[float]:
        anchors = Anchors(listed[mask], listed, torch.tensor(mask))
        return positives_by_shape(target, anchors, 32, (1, len(mask), 4, 4), iou_thresh)[0].tolist()

    assert positive([0, 1], 1.0) == [1, 0] and positive([2, 3], 1.0) == [0, 0]
    assert positive([0, 1], 0.5) == [1, 0] and positive([2, 3], 0.5) == [1, 1]
