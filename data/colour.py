"""Apply gains on hue, saturation and value, per sample on the CPU or per batch on the device.

The two differ in rounding: the CPU path uses OpenCV's 8-bit HSV with 180 levels of hue, the device
path floats.
"""

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from data.geometry import Image

LEVELS = np.arange(256, dtype=np.float64)
HUES = 180  # of OpenCV's 8-bit HSV
MIN_DIVISOR = 1e-6  # far below the distance between two levels


def change_colour(image: Image, gains: NDArray[np.float64]) -> None:
    """Multiply hue, saturation and value of an RGB image by three gains, in place.

    Look-up tables act on OpenCV's 8-bit HSV. Hue in 0..179 wraps around, the others saturate at
    255; all round down.
    """
    if (gains == 1).all():
        return
    hue, saturation, value = gains.tolist()
    tables = (LEVELS * hue % HUES, np.minimum(LEVELS * saturation, 255), np.minimum(LEVELS * value, 255))
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    planes = cv2.split(hsv)
    for plane, table in zip(planes, tables, strict=True):
        cv2.LUT(plane, table.astype(np.uint8), dst=plane)
    cv2.merge(planes, dst=hsv)
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=image)


def network_input(images: torch.Tensor, gains: torch.Tensor | None = None) -> torch.Tensor:
    """Turn uint8 RGB images (B, 3, H, W) into floats in 0..1, with HSV gains (B, 3) applied.

    Hue wraps around at a full turn; saturation and value saturate at 1. None, and gains of shape
    (0, 3), leave the colours alone. Runs in float32 on the images' device without branches, and
    keeps their memory format. Training, evaluation and prediction all feed the network with it.
    """
    if gains is None or len(gains) == 0:
        return images.float().div_(255)
    hue_gain, saturation_gain, value_gain = gains.float().T[:, :, None, None]  # (B, 1, 1) each
    red, green, blue = (plane.float().div_(255) for plane in images.unbind(1))  # (B, H, W) each, contiguous
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    divisor = chroma.clamp(min=MIN_DIVISOR)
    # Hue in sixths of a turn; the largest channel decides the formula (Smith 1978).
    hue = torch.where(
        value == red,
        (green - blue).div_(divisor),
        torch.where(value == green, (blue - red).div_(divisor).add_(2), (red - green).div_(divisor).add_(4)),
    )
    hue = torch.where(hue < 0, hue + 6, hue).mul_(hue_gain)
    hue = torch.where(hue < 6, hue, hue - 6)  # a gain is at most 2, so hue is below 12
    saturation = chroma.div_(value.clamp(min=MIN_DIVISOR)).mul_(saturation_gain).clamp_(max=1)
    value.mul_(value_gain).clamp_(max=1)
    chroma = saturation.mul_(value)
    lowest = value.sub_(chroma)
    # Back to RGB: each channel is the lowest value plus a trapezoid of hue around its own hue.
    ramps = ((hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    planes = [torch.addcmul(lowest, chroma, ramp.clamp_(0, 1)) for ramp in ramps]
    # Without out=, which torch.compile supports only for contiguous tensors.
    if images.is_contiguous(memory_format=torch.channels_last):
        return torch.stack(planes, dim=-1).permute(0, 3, 1, 2)
    return torch.stack(planes, dim=1)
