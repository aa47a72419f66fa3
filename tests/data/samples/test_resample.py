"""Pictures of a whole batch at once, against interpolation by hand."""

from __future__ import annotations

import pytest
import torch

from data.samples import resample as module
from data.samples.resample import resample
from tests.host_reads import HostReads

EYE = torch.eye(3)


def shifted(x: float, y: float) -> torch.Tensor:
    """A picture whose point 0, 0 shows the image's point x, y."""
    matrix = EYE.clone()
    matrix[0, 2], matrix[1, 2] = x, y
    return matrix


def ramp(height: int, width: int, start: int = 0) -> torch.Tensor:
    """Channels that tell the column, the row and the image: 10 and 20 levels a pixel."""
    x, y = torch.arange(width).expand(height, width), torch.arange(height)[:, None].expand(height, width)
    return torch.stack((10 * x, 20 * y, torch.full_like(x, start))).to(torch.uint8)


def test_interpolates_at_pixel_centres_and_repeats_edges() -> None:
    (drawn,) = resample([ramp(3, 4)], torch.tensor([[0]]), shifted(0.25, 0.5)[None, None], (3, 5))
    assert drawn[:, :, 0].tolist() == [[2, 12, 22, 30, 114]] * 2 + [[114] * 5]  # half a level rounds to even
    assert drawn[:, :, 1].tolist() == [[10] * 4 + [114], [30] * 4 + [114], [114] * 5]


def test_a_later_tile_covers_an_earlier_one_and_grey_is_what_none_covers() -> None:
    images = [ramp(2, 2, 1), ramp(4, 4, 2), ramp(1, 9, 3)]
    tiles = torch.tensor([[1, 0], [0, 1], [2, -1], [-1, -1]])
    drawn = resample(images, tiles, EYE.expand(4, 2, 3, 3), (4, 4))[..., 2]
    over = torch.full((4, 4), 2, dtype=torch.uint8)
    over[:2, :2] = 1
    assert torch.equal(drawn[0], over) and (drawn[1] == 2).all()
    assert (drawn[2, 0] == 3).all() and (drawn[2, 1:] == 114).all() and (drawn[3] == 114).all()


def test_parts_of_a_batch_give_the_same_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, 9 + n, 14 - n), dtype=torch.uint8, generator=generator) for n in range(5)]
    tiles = torch.randint(-1, 5, (7, 4), generator=generator)
    maps = EYE + torch.randn((7, 4, 3, 3), generator=generator) * torch.tensor([0.3, 0.3, 3])
    maps[:, :, 2] = torch.tensor([0.01, -0.01, 1])
    with HostReads() as counted:
        whole = resample(images, tiles, maps, (12, 10))
    assert not counted.reads and not counted.copies, counted
    monkeypatch.setattr(module, "PIXELS", 2 * 12 * 10)
    assert torch.equal(resample(images, tiles, maps, (12, 10)), whole)
    alone = [resample(images, tiles[n : n + 1], maps[n : n + 1], (12, 10))[0] for n in range(7)]
    assert torch.equal(torch.stack(alone), whole)
