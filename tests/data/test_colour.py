"""Colour changes against OpenCV's formula, on the CPU and on the device."""

import colorsys

import cv2
import numpy as np
import torch

from data.dataset import change_colour
from data.loader import network_input


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


def test_colour_on_the_device_is_that_of_colorsys_also_where_hue_wraps() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 3), dtype=np.uint8)
    for gains in ((1.9, 0.7, 1.3), (0.4, 1.5, 0.6)):
        changed = network_input(torch.from_numpy(pixels).view(1, 300, 1, 3).permute(0, 3, 1, 2), torch.tensor([gains]))
        for before, found in zip(pixels, changed[0, :, :, 0].T, strict=True):
            hue, *others = (x * gain for x, gain in zip(colorsys.rgb_to_hsv(*(before / 255)), gains, strict=True))
            expected = colorsys.hsv_to_rgb(hue % 1, *(min(x, 1) for x in others))
            np.testing.assert_allclose(found, expected, atol=1e-5)
