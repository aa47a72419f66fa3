"""Reading images as they were annotated, and telling what cannot be read."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data import DataError, ImageSource, OnError
from data.headers import TooLargeError, read_header
from data.images import is_cut_short
from tests.data.bad_images import exif, with_segment


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    return with_segment(jpeg, exif(orientation))


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
    "no image": (lambda path: path.write_bytes(b"no image"), r"11.png is not an image of a known type"),
    "empty": (lambda path: path.write_bytes(b""), r"11.png is empty"),
    "gone": (Path.unlink, r"11.png does not exist"),
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


def sample_files() -> dict[str, bytes]:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (45, 70, 3), dtype=np.uint8))
    files = {}
    Image.init()
    for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF"):
        if kind not in Image.SAVE:  # Pillow is built without the last two here and there
            continue
        file = io.BytesIO()
        picture.save(file, kind)
        files[kind] = file.getvalue()
    file = io.BytesIO()
    picture.save(file, "WEBP", lossless=True)
    extended = io.BytesIO()
    picture.convert("RGBA").save(extended, "WEBP", quality=50, exif=exif(1))
    big_endian = cv2.imencode(".tif", np.asarray(picture))[1].tobytes()
    return files | {"lossless WEBP": file.getvalue(), "extended WEBP": extended.getvalue(), "OpenCV's TIFF": big_endian}


FILES = sample_files()


@pytest.mark.parametrize("kind", FILES)
def test_headers_give_type_and_size_and_never_fail(kind: str) -> None:
    content = FILES[kind]
    header = read_header(content)
    assert header is not None and (header.width, header.height) == (70, 45)
    assert header.kind.replace(" ", "").upper() in {kind.rsplit(maxsplit=1)[-1], "NETPBM"}
    for end in range(min(len(content), 2000)):
        part = read_header(content[:end])
        assert part is None or (part.kind, part.width, part.height) == (header.kind, 70, 45), end
    generator = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(content[:400])
        for place in generator.integers(0, len(spoilt), 5):
            spoilt[place] = generator.integers(256)
        with contextlib.suppress(TooLargeError):
            read_header(bytes(spoilt))  # whatever it says, it says it without another error


@given(st.binary(max_size=200))
def test_headers_of_anything(content: bytes) -> None:
    starts = [b"", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*", b"RIFF0000WEBPVP8 ", b"0000ftypavif", b"P6 "]
    for start in (*starts, b"\xff\xd8\xff\xe1\0\xd0Exif\0\0"):
        with contextlib.suppress(TooLargeError):
            read_header(start + content)


def test_orientation_tags_equal_pillow_s() -> None:
    for orientation in range(1, 9):
        content = with_orientation(FILES["JPEG"], orientation)
        header = read_header(content)
        assert header is not None and header.orientation == orientation
        assert Image.open(io.BytesIO(content)).getexif()[0x0112] == orientation
    two = FILES["JPEG"] + with_orientation(FILES["JPEG"], 6)
    for content in (*FILES.values(), two):  # what comes after a picture is another one
        header = read_header(content)
        assert header is not None and header.orientation == 1


def test_real_photographs_are_whole_and_lose_it_at_any_cut(shared_dir: Path) -> None:
    """All pictures of coco128 and bccd are read; a few of them, cut anywhere, are not."""
    paths = sorted((shared_dir / "data").rglob("*.jpg"))
    assert len(paths) == 620
    for number, path in enumerate(paths):
        content = path.read_bytes()
        header = read_header(content)
        assert header is not None and not is_cut_short(content), path
        if number % 60 == 0:
            for share in (0.02, 0.3, 0.9, 0.999):
                assert is_cut_short(content[: int(len(content) * share)])
            decoded = cv2.imdecode(np.frombuffer(content, dtype=np.uint8), cv2.IMREAD_COLOR)
            assert decoded.shape[:2] == (header.height, header.width)
