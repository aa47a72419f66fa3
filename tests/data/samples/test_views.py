"""Views of an image: they cover it, and boxes go to their pixels and back."""

from __future__ import annotations

import numpy as np
import pytest

from conf.entry import compose
from conf.schema import EvaluateConfig, TrainConfig
from data import Looks, Resize
from data.batches.samplers import input_shape


def options(*overrides: str) -> EvaluateConfig:
    return compose("train", TrainConfig, [f"evaluate.{override}" for override in overrides]).evaluate


@pytest.mark.parametrize("overlap", [0, 1, 20, 99])
@pytest.mark.parametrize("size", [(300, 250), (100, 100), (101, 100), (99, 1000), (20, 30), (640, 1)])
def test_slices_cover_an_image_and_share_the_overlap(size: tuple[int, int], overlap: int) -> None:
    windows = Looks((64,), slices=100, overlap=overlap).windows(size)
    height, width = size
    assert windows[0] == (0, 0, width, height)
    if max(size) <= 100:
        assert len(windows) == 1
        return
    tiles = np.array(windows[1:])
    assert (tiles[:, :2] >= 0).all() and (tiles[:, 2:] <= (width, height)).all()
    assert np.array_equal(np.unique(tiles[:, 2:] - tiles[:, :2], axis=0), [[min(width, 100), min(height, 100)]])
    for axis, side in ((0, width), (1, height)):
        starts = np.unique(tiles[:, axis])
        assert starts[0] == 0 and starts[-1] == max(0, side - 100)
        assert (np.diff(starts) <= 100 - overlap).all()
        assert len(starts) == (1 + -(-(side - 100) // (100 - overlap)) if side > 100 else 1), "more than are needed"
    assert len(windows) - 1 == len(np.unique(tiles[:, 0])) * len(np.unique(tiles[:, 1]))
    assert Looks((64,), slices=100, overlap=overlap, whole=False).windows(size) == windows[1:]


def test_options_become_views_with_sizes_that_the_network_takes() -> None:
    assert Looks.of(options("tta=none"), 320, 32) == Looks((320,))
    looks = Looks.of(options("tta=wbf", "tta_scales=[1.2,0.8,1,1.01]"), 320, 32)
    assert looks.image_sizes == (256, 320, 384) and looks.per_window == 6
    assert [(view.mirrored, view.image_size) for view in looks.views((50, 60))] == [
        (False, 256), (True, 256), (False, 320), (True, 320), (False, 384), (True, 384),
    ]  # fmt: skip
    looks = Looks.of(options("slices=200", "slice_overlap=0.25", "tta=nms", "tta_scales=[0.1]"), 320, 32)
    assert (looks.slices, looks.overlap, looks.image_sizes) == (200, 50, (32,))
    assert len(looks.views((200, 350))) == len(looks.seen((200, 350))) == 3 * 2


@pytest.mark.parametrize("resize", list(Resize))
@pytest.mark.parametrize("image_size", [96, 224])
def test_a_box_lies_where_its_view_draws_it(image_size: int, resize: Resize) -> None:
    image = np.zeros((130, 170, 3), dtype=np.uint8)
    image[60:75, 70:96] = 255
    box = np.array([[70, 60, 96, 75]], dtype=np.float64)
    looks = Looks((image_size, 160), (False, True), slices=96, overlap=40)
    drawn = full = 0
    for view, seen in zip(looks.views((130, 170)), looks.seen((130, 170)), strict=True):
        shape = input_shape(view.size, view.image_size, 32, True, upscale=True, resize=resize)
        canvas = np.full((*shape, 3), 7, dtype=np.uint8)
        letterbox = view.draw(canvas, image, resize, upscale=True)
        inside = (box[0, :2] >= seen[:2]).all() and (box[0, 2:] <= seen[2:]).all()
        there = letterbox.to_network(box)
        assert np.allclose(letterbox.to_original(there), box, atol=1e-4)
        if inside:
            rows, columns = np.nonzero(canvas[..., 0] > 190)
            found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert np.abs(found - there[0]).max() <= 1.5, view
            drawn += 1
        if canvas.shape[:2] == view.size:  # at full resolution
            left, top, right, bottom = view.window
            pixels = image[top:bottom, left:right]
            assert np.array_equal(canvas, pixels[:, ::-1] if view.mirrored else pixels)
            full += 1
    assert drawn > 8 and (full or image_size != 96)
