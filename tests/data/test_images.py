"""Reading images as they were annotated, and telling what cannot be read."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from data import DataError, ImageSource, OnError


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG with an EXIF block of that one tag (TIFF 6.0: tag 0x0112, type SHORT)."""
    tiff = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    block = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


def test_images_are_rgb(empty_set) -> None:
    image = np.zeros((30, 40, 3), dtype=np.uint8)
    image[:10], image[10:20] = (255, 0, 0), (0, 0, 200)
    empty_set.add_image(image, [(1, [1, 1, 5, 5])])
    read = empty_set.source().read(0)
    assert read is not None and read.dtype == np.uint8 and np.array_equal(read, image)


@pytest.mark.parametrize("flag", ["grey", "alpha", "16 bit"])
def test_other_pixel_formats_become_rgb(flag: str, coco_set) -> None:
    path = coco_set.root / "images" / "11.png"
    colour = cv2.imread(str(path))
    other = {
        "grey": colour[..., 0],
        "alpha": np.dstack([colour, np.full(colour.shape[:2], 9, np.uint8)]),
        "16 bit": colour.astype(np.uint16) * 257,
    }[flag]
    assert cv2.imwrite(str(path), other)
    read = coco_set.source().read(1)
    expected = np.repeat(colour[..., :1], 3, axis=2) if flag == "grey" else colour[..., ::-1]
    assert read is not None and np.array_equal(read, expected)


def test_exif_is_followed_only_where_the_annotations_did(empty_set) -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    empty_set.add_image(image, [(1, [1, 1, 5, 5])])
    path = empty_set.root / "images" / "10.png"
    path.write_bytes(with_orientation(cv2.imencode(".jpg", image)[1].tobytes(), 6))
    stored = empty_set.source().read(0)
    assert stored is not None and stored.shape == (40, 64, 3)
    empty_set.json["images"][0] |= {"height": 64, "width": 40}
    turned = empty_set.source().read(0)
    assert turned is not None and np.array_equal(turned, np.rot90(stored, -1))


BROKEN = {
    "no image": (lambda path: path.write_bytes(b"no image"), r"11.png is not an image that OpenCV can read"),
    "empty": (lambda path: path.write_bytes(b""), r"11.png is not an image that OpenCV can read"),
    "gone": (Path.unlink, r"11.png does not exist any more"),
    "swapped": (
        lambda path: cv2.imwrite(str(path), np.zeros((20, 30, 3), np.uint8)),
        r"11.png has 30 x 20 pixels, its annotations are for \d+ x \d+",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_images(case: str, coco_set, caplog: pytest.LogCaptureFixture) -> None:
    annotations = coco_set.open()
    spoil, message = BROKEN[case]
    spoil(coco_set.root / "images" / "11.png")
    with pytest.raises(DataError, match=message + r".*fix: .*data.on_error=skip"):
        ImageSource(annotations, OnError.stop).read(1)
    source = ImageSource(annotations, OnError.skip)
    with caplog.at_level(logging.WARNING):
        assert source.read(1) is None and source.read(1) is None
    assert len(caplog.records) == 1 and "11.png" in caplog.text
    assert source.read(0) is not None
