"""The steps of an assignment against torchvision's IoU and plain loops."""

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou

from models import assignment
from models.assignment import (
    Anchors,
    all_cells,
    best_overlaps,
    centre_cells,
    first_best_targets,
    merge_classes,
    positives_by_shape,
)
from models.boxes import cxcywh_to_xyxy

SHAPE = (2, 3, 4, 5, 8)  # batch, anchors, rows, columns, values


@pytest.fixture(params=[2**18, 70], ids=["at once", "one by one"])
def boxes_and_targets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """60 boxes in each of three images, the last without a target; two targets are the same."""
    monkeypatch.setattr(assignment, "PAIRS_AT_ONCE", request.param)
    boxes = cxcywh_to_xyxy(torch.rand(3, 60, 4) * 60 + 4)
    targets = torch.cat((torch.randint(0, 2, (20, 1)), torch.randint(0, 5, (20, 1)), torch.rand(20, 4) * 60 + 4), 1)
    targets[7] = targets[3]
    return boxes, targets


def test_best_overlaps_are_those_of_torchvision(boxes_and_targets: tuple[Tensor, Tensor]) -> None:
    boxes, targets = boxes_and_targets
    best = best_overlaps(boxes, targets)
    first = first_best_targets(boxes, targets, best)
    for image in range(3):
        rows = (targets[:, 0] == image).nonzero()[:, 0]
        if len(rows) == 0:
            assert (best[image] == 0).all() and (first[image] == len(targets)).all()
            continue
        expected = box_iou(boxes[image], cxcywh_to_xyxy(targets[rows, 2:]))
        torch.testing.assert_close(best[image], expected.amax(1))
        touched = best[image] > 0
        assert first[image][touched].equal(rows[expected.argmax(1)][touched])
    assert (first != 7).all(), "of equal targets the first counts"


def test_without_targets_nothing_overlaps() -> None:
    boxes, none = torch.rand(2, 10, 4), torch.zeros(0, 6)
    best = best_overlaps(boxes, none)
    assert (best == 0).all() and (first_best_targets(boxes, none, best) == 0).all()


def test_cells_hold_the_centres_and_the_far_edge_belongs_to_the_last() -> None:
    targets = torch.tensor([[1.0, 0, 33, 95, 4, 4], [0, 0, 160, 128, 4, 4], [0, 0, 0, 0, 4, 4]])
    cells = centre_cells(targets, 32, SHAPE)
    assert cells.image.tolist() == [[1], [0], [0]] and cells.anchor.tolist() == [[0, 1, 2]]
    assert cells.row.tolist() == [[2], [3], [0]] and cells.column.tolist() == [[1], [4], [0]]


def test_flat_positions_are_those_of_the_flattened_map() -> None:
    assert all_cells(SHAPE, torch.device("cpu")).flat(SHAPE).equal(torch.arange(2 * 3 * 4 * 5))
    raw = torch.randn(SHAPE)
    cells = centre_cells(torch.rand(6, 6) * torch.tensor([2, 1, 160, 128, 9, 9]), 32, SHAPE)
    assert raw[tuple(cells)].equal(raw.flatten(0, 3)[cells.flat(SHAPE)])


def test_of_equal_anchors_the_first_is_the_best() -> None:
    """Scaled YOLOv4's cfg files list some anchors twice."""
    listed = torch.tensor([[10.0, 20.0], [30.0, 30.0], [10.0, 20.0], [11.0, 21.0]])
    target = torch.tensor([[0.0, 0, 40, 40, 10, 20]])

    def positive(mask: list[int], iou_thresh: float) -> list[float]:
        anchors = Anchors(listed[mask], listed, torch.tensor(mask))
        return positives_by_shape(target, anchors, 32, (1, len(mask), 4, 4), iou_thresh).weight.tolist()

    assert positive([0, 1], 1.0) == [1, 0] and positive([2, 3], 1.0) == [0, 0]
    assert positive([0, 1], 0.5) == [1, 0] and positive([2, 3], 0.5) == [1, 1]


def test_pairs_at_one_position_share_their_classes() -> None:
    position = torch.tensor([5, 9, 5, 5, 2, 9])
    weight = torch.tensor([1.0, 0, 1, 0, 1, 1])
    classes, count = merge_classes(position, weight, torch.tensor([0, 1, 2, 3, 1, 0]), 4)
    five, nine, two = [1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]
    assert classes.tolist() == [five, nine, five, five, two, nine]
    assert count.tolist() == [2, 1, 2, 2, 1, 1]
