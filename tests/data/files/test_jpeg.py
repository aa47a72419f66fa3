"""The first rows of a JPEG against OpenCV's full decoding."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data import images as jpeg
from data.images import AS_STORED

pytest.importorskip("simplejpeg")


def picture(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    planes = [127 + 100 * np.sin(x * f + y * g) for f, g in ((0.11, 0.02), (0.03, 0.17), (0.2, 0.09))]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    return (np.stack(planes, axis=2) + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("sampling", [0x111111, 0x211111, 0x121111, 0x221111, 0x411111])
@pytest.mark.parametrize("progressive", [0, 1])
@pytest.mark.parametrize("size", [(97, 131), (240, 160), (33, 40)])
def test_rows_are_those_of_opencv(sampling: int, progressive: int, size: tuple[int, int]) -> None:
    flags = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
    data = cv2.imencode(".jpg", picture(*size), flags)[1].tobytes()
    whole = cv2.imdecode(np.frombuffer(data, np.uint8), AS_STORED)
    for rows in (1, 8, 17, size[0] // 2, size[0] - 1, size[0]):
        found = jpeg.decode_rows(data, size[0], rows)
        assert found is not None and found.shape[0] >= rows and found.shape[1:] == whole.shape[1:]
        assert np.array_equal(found[:rows], whole[:rows])


def test_what_it_does_not_take_is_left_to_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    data = cv2.imencode(".jpg", picture(64, 64))[1].tobytes()
    assert jpeg.decode_rows(data[: len(data) // 2], 64, 64) is None  # truncated
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert jpeg.decode_rows(data, 64, 64) is None
