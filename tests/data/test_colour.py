"""Colour changes against OpenCV's formula, on the CPU and on the device."""

import colorsys
from dataclasses import replace

import cv2
import numpy as np
import torch

from data import Request, TrainDataset
from data.colour import change_colour, network_input
from data.config import Colour
from tests.data.conftest import NO_AUGMENT, CocoSet


def test_colour_equals_the_formula() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for seed in range(5):
        gains = 1 + np.random.default_rng(seed).uniform(-1, 1, 3) * [0.1, 0.7, 0.4]
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(np.float64) * gains
        hsv[..., 0] %= 180
        expected = cv2.cvtColor(np.minimum(hsv, 255).astype(np.uint8), cv2.COLOR_HSV2RGB)
        changed = image.copy()
        change_colour(changed, gains)
        assert np.array_equal(changed, expected)
    unchanged = image.copy()
    change_colour(unchanged, np.ones(3))
    assert np.array_equal(unchanged, image)


def test_colour_on_the_device_is_that_of_the_cpu(coco_set: CocoSet) -> None:
    images = coco_set.source()
    colourful = replace(NO_AUGMENT, mosaic=1, hsv_hue=0.1, hsv_saturation=0.7, hsv_value=0.4)
    on_cpu = TrainDataset(images.annotations, images, colourful, seed=0, epochs=1000)
    on_device = TrainDataset(images.annotations, images, replace(colourful, colour=Colour.device), seed=0, epochs=1000)
    requests = [Request(index, 96, 96, 0) for index in range(7)]
    here, there = on_cpu.__getitems__(requests), on_device.__getitems__(requests)
    assert here.targets.equal(there.targets) and here.gains.shape == (0, 3) and there.gains.shape == (7, 3)
    expected = network_input(here.images, here.gains)
    found = network_input(there.images, there.gains)
    assert expected.equal(here.images.float() / 255)
    assert float((found - expected).abs().mean()) < 1 / 255


def test_colour_on_the_device_is_that_of_colorsys_also_where_hue_wraps() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 3), dtype=np.uint8)
    for gains in ((1.9, 0.7, 1.3), (0.4, 1.5, 0.6)):
        changed = network_input(torch.from_numpy(pixels).view(1, 300, 1, 3).permute(0, 3, 1, 2), torch.tensor([gains]))
        for before, found in zip(pixels, changed[0, :, :, 0].T, strict=True):
            hue, *others = (x * gain for x, gain in zip(colorsys.rgb_to_hsv(*(before / 255)), gains, strict=True))
            expected = colorsys.hsv_to_rgb(hue % 1, *(min(x, 1) for x in others))
            np.testing.assert_allclose(found, expected, atol=1e-5)
