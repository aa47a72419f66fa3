"""The steps of an assignment against torchvision's IoU and plain loops."""

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou

from models import Head, assignment
from models.assignment import best_overlaps, centre_cells, dynamic_positives, merge_classes, positives_by_shape
from models.config import PositivesBy
from models.decode import cxcywh_to_xyxy
from models.heads import Anchors, HeadAnchors, HeadMap

SHAPE = (2, 3, 4, 5, 8)  # batch, anchors, rows, columns, values


@pytest.fixture(params=[2**18, 70], ids=["at once", "one by one"])
def boxes_and_targets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """60 boxes in each of three images, the last without a target."""
    monkeypatch.setattr(assignment, "PAIRS_AT_ONCE", request.param)
    boxes = cxcywh_to_xyxy(torch.rand(3, 60, 4) * 60 + 4)
    targets = torch.cat((torch.randint(0, 2, (20, 1)), torch.randint(0, 5, (20, 1)), torch.rand(20, 4) * 60 + 4), 1)
    return boxes, targets


def test_best_overlaps_are_those_of_torchvision(boxes_and_targets: tuple[Tensor, Tensor]) -> None:
    boxes, targets = boxes_and_targets
    best = best_overlaps(boxes, targets)
    for image in range(2):
        expected = box_iou(boxes[image], cxcywh_to_xyxy(targets[targets[:, 0] == image, 2:]))
        torch.testing.assert_close(best[image], expected.amax(1))
    assert (best[2] == 0).all() and (best_overlaps(boxes, targets[:0]) == 0).all()


def test_cells_hold_the_centres_and_the_far_edge_belongs_to_the_last() -> None:
    targets = torch.tensor([[1.0, 0, 33, 95, 4, 4], [0, 0, 160, 128, 4, 4], [0, 0, 0, 0, 4, 4]])
    cells = centre_cells(targets, 32, SHAPE)
    assert cells.image.tolist() == [[1], [0], [0]] and cells.anchor.tolist() == [[0, 1, 2]]
    assert cells.row.tolist() == [[2], [3], [0]] and cells.column.tolist() == [[1], [4], [0]]


def test_flat_positions_are_those_of_the_flattened_map() -> None:
    raw = torch.randn(SHAPE)
    cells = centre_cells(torch.rand(6, 6) * torch.tensor([2, 1, 160, 128, 9, 9]), 32, SHAPE)
    assert raw[tuple(cells)].equal(raw.flatten(0, 3)[cells.flat(SHAPE)])


def test_of_equal_anchors_the_first_is_the_best() -> None:
    """Scaled YOLOv4's cfg files list some anchors twice."""
    listed = torch.tensor([[10.0, 20.0], [30.0, 30.0], [10.0, 20.0], [11.0, 21.0]])
    target = torch.tensor([[0.0, 0, 40, 40, 10, 20]])

    def positive(mask: list[int], iou_thresh: float) -> list[float]:
        anchors = Anchors(listed[mask], listed, torch.tensor(mask))
        return positives_by_shape(target, anchors, 32, (1, len(mask), 4, 4), iou_thresh)[0].tolist()

    assert positive([0, 1], 1.0) == [1, 0] and positive([2, 3], 1.0) == [0, 0]
    assert positive([0, 1], 0.5) == [1, 0] and positive([2, 3], 0.5) == [1, 1]


def test_pairs_at_one_position_share_their_classes() -> None:
    position = torch.tensor([5, 9, 5, 5, 2, 9])
    weight = torch.tensor([1.0, 0, 1, 0, 1, 1])
    classes, count = merge_classes(position, weight, torch.tensor([0, 1, 2, 3, 1, 0]), 4)
    five, nine, two = [1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]
    assert classes.tolist() == [five, nine, five, five, two, nine]
    assert count.tolist() == [2, 1, 2, 2, 1, 1]


def test_positives_are_those_that_overlap_most_and_reach_the_centre() -> None:
    """The corner of four cells is in reach of all four; a better box weighs more."""
    head = Head(layer=0, stride=32, anchors=((40.0, 40.0),), num_classes=3, scale_x_y=2)
    raw = torch.zeros(1, 1, 3, 4, 8)  # predicts a 40 x 40 box at the centre of each cell
    raw[0, 0, 1, 1, :2] = torch.tensor([(0.5 + 0.5) / 2 + 0.25] * 2).logit()  # centre (1.0, 1.0) of this cell: exact
    target = torch.tensor([[0.0, 2, 64, 64, 40, 40]])
    anchors = HeadAnchors([head])[target.device]
    ((weight, cells),) = dynamic_positives([HeadMap(head, anchors[0], raw)], target, 3, PositivesBy.overlap)
    learnt = {(int(r), int(c)): float(w) for w, r, c in zip(weight[0], cells.row[0], cells.column[0], strict=True) if w}
    assert learnt == {(1, 1): 1.0, (1, 2): learnt[1, 2], (2, 1): learnt[1, 2]}  # of equals the first, not (2, 2)
    shared = 24 * 24  # of boxes 16 pixels apart in both directions
    assert learnt[1, 2] == pytest.approx((shared / (3200 - shared)) ** 2, abs=1 / 512)


def test_an_anchor_that_two_objects_choose_learns_the_cheaper() -> None:
    head = Head(layer=0, stride=32, anchors=((40.0, 40.0),), num_classes=3)
    raw = torch.zeros(1, 1, 3, 4, 8)
    raw[0, 0, 1, 1, 5:] = torch.tensor([-2.0, -2, 3])
    targets = torch.tensor([[0.0, 0, 48, 48, 40, 40], [0.0, 2, 48, 48, 40, 38], [0.0, 1, 16, 16, 40, 40]])
    part = HeadMap(head, HeadAnchors([head])[targets.device][0], raw)
    chosen = {by: dynamic_positives([part], targets, 10, by)[0][0][:, 0].tolist() for by in list(PositivesBy)[2:]}
    assert chosen == {PositivesBy.overlap: [1, 0, 1], PositivesBy.alignment: [1, 0, 1], PositivesBy.cost: [0, 1, 1]}
