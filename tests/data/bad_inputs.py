"""Broken and unusual inputs: how to write each, and the expected result.

Every set holds a good image ``a`` with one box and, beside it, the image, label or entry that the
case is about.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from data import DataConfig, DataFormat, Exif, ImageCache, OnError, SplitConfig

HEIGHT, WIDTH = 40, 60
NAMES = ["cat", "dog"]
GOOD_ROW = "0 0.5 0.5 0.5 0.5\n"
GOOD_BOX = [15.0, 10.0, 30.0, 20.0]


@dataclass(frozen=True)
class Case:
    """A case: how to make the set, and its ``error`` or else its pixels and boxes.

    ``left``: images and boxes that ``on_error=skip`` leaves; ``None``: the same error.
    """

    write: Callable[[Path], DataConfig]
    error: str | None = None  # a pattern
    left: tuple[int, int] | None = None
    pixels: np.ndarray | None = None  # of the image b
    boxes: list[list[float]] | None = None  # of the image b: class, left, top, width, height


def picture() -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 3)


PICTURE = picture()


def config_of(
    root: Path, data_format: DataFormat, annotations: str, images: str, names: list[str] | None
) -> DataConfig:
    part = SplitConfig(annotations, images)
    return DataConfig(
        name="bad",
        format=data_format,
        root=str(root),
        train=part,
        val=part,
        split=None,
        split_seed=0,
        names=names,
        shapes=None,
        single_class=False,
        outlines=False,
        exif=Exif.apply,
        on_error=OnError.stop,
        workers=0,
        cache=ImageCache.none,
        index_dir=str(root.parent / "index"),
    )


# Images


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int, thumbnail: bytes = b"") -> bytes:
    """Exif data with that one tag, and whatever comes after (TIFF 6.0: tag 0x0112, type SHORT)."""
    return b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0) + thumbnail


def with_segment(jpeg: bytes, content: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + jpeg[2:]


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 0) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """30,000 x 30,000 black pixels of one bit: 112 MB that take 110 kB."""
    packer = zlib.compressobj(1)
    row = bytes(1 + 30000 // 8)
    return png(30000, 30000, b"".join(packer.compress(row * 100) for _ in range(300)) + packer.flush(), depth=1)


def spoilt(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


def images() -> dict[str, Case]:
    whole = Image.fromarray(PICTURE)
    jpeg, progressive = encoded(whole, "JPEG", quality=95), encoded(whole, "JPEG", quality=95, progressive=True)
    plain, palette = encoded(whole, "PNG"), whole.quantize(64)
    frames = {"save_all": True, "append_images": [Image.fromarray(255 - PICTURE)]}
    webp, tiff = encoded(whole, "WEBP", lossless=True), encoded(whole, "TIFF", compression="tiff_lzw")
    bmp = encoded(whole, "BMP")
    rows = range(HEIGHT)
    stride = WIDTH * 3
    top_down = bmp[:22] + struct.pack("<i", -HEIGHT) + bmp[26:54]
    top_down += b"".join(bmp[54 + stride * (HEIGHT - 1 - row) :][:stride] for row in rows)
    thumbnail = encoded(whole.resize((12, 8)), "JPEG")
    good = {
        "jpeg": ("b.jpg", jpeg),
        "progressive jpeg": ("b.jpg", progressive),
        "jpeg with data after its end": ("b.jpg", jpeg + bytes(5000) + b"trailer"),
        "jpeg of two pictures": ("b.jpg", jpeg + encoded(Image.fromarray(255 - PICTURE), "JPEG")),
        "jpeg with a thumbnail": ("b.jpg", with_segment(jpeg, exif(1, thumbnail))),
        "jpeg behind 70 kB of profiles": ("b.jpg", with_segment(with_segment(jpeg, bytes(50000)), bytes(20000))),
        "cmyk jpeg": ("b.jpg", encoded(whole.convert("CMYK"), "JPEG", quality=95)),
        "grey jpeg": ("b.jpg", encoded(whole.convert("L"), "JPEG", quality=95)),
        "png named jpg": ("b.jpg", plain),
        "jpeg named png": ("b.png", jpeg),
        "16-bit png": ("b.png", cv2.imencode(".png", PICTURE[..., ::-1].astype(np.uint16) * 257)[1].tobytes()),
        "palette png": ("b.png", encoded(palette, "PNG")),
        "png of one bit": ("b.png", encoded(whole.convert("1"), "PNG")),
        "png with alpha": ("b.png", encoded(whole.convert("RGBA"), "PNG")),
        "animated png": ("b.png", encoded(whole, "PNG", **frames)),
        "animated gif": ("b.gif", encoded(palette, "GIF", save_all=True, append_images=[whole.rotate(180).quantize()])),
        "animated webp": ("b.webp", encoded(whole, "WEBP", lossless=True, **frames)),
        "bmp from the top down": ("b.bmp", top_down),
        "tiff": ("b.tif", tiff),
        "capital suffix": ("b.JPG", jpeg),
    }
    cases = {}
    for name, (file, content) in good.items():
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        cases[name] = Case(image_set(file, content), pixels=expected)
    undecodable = r"/b\.\w+ cannot be decoded: its {} data are damaged"
    unknown = r"/b\.\w+ is not an image of a known type \(JPEG, PNG,"
    bad = {
        "truncated jpeg": ("b.jpg", jpeg[: len(jpeg) * 6 // 10], r"/b\.jpg is cut short"),
        "jpeg without its last two bytes": ("b.jpg", jpeg[:-2], r"/b\.jpg is cut short"),
        "truncated jpeg filled up": ("b.jpg", jpeg[: len(jpeg) // 2] + bytes(len(jpeg)), r"/b\.jpg is cut short"),
        "truncated progressive jpeg": ("b.jpg", progressive[: len(progressive) * 8 // 10], r"/b\.jpg is cut short"),
        "truncated jpeg with a thumbnail": (
            "b.jpg",
            with_segment(jpeg, exif(1, thumbnail))[: -len(jpeg) // 3],
            r"/b\.jpg is cut short",
        ),
        "jpeg cut in its header": ("b.jpg", jpeg[:100], unknown),
        "empty file": ("b.jpg", b"", r"/b\.jpg is empty"),
        "text named jpg": ("b.jpg", b"not a picture\n" * 50, unknown),
        "page named png": ("b.png", b"<!DOCTYPE html><html>404</html>", unknown),
        "noise": ("b.jpg", np.random.default_rng(1).bytes(5000), unknown),
        "noise that starts as a jpeg": ("b.jpg", b"\xff\xd8\xff" + np.random.default_rng(1).bytes(5000), unknown),
        "truncated png": ("b.png", plain[: len(plain) // 2], undecodable.format("PNG")),
        "png with a wrong byte": ("b.png", spoilt(plain, len(plain) // 2), undecodable.format("PNG")),
        "png of a header only": ("b.png", plain[:33], undecodable.format("PNG")),
        "png without width": ("b.png", png(0, 5, zlib.compress(b"")), r"b\.png is 0 x 5 pixels|has 0 x 5 pixels"),
        "truncated gif": ("b.gif", encoded(palette, "GIF")[:1200], undecodable.format("GIF")),
        "truncated webp": ("b.webp", webp[: len(webp) // 2], undecodable.format("WebP")),
        "truncated bmp": ("b.bmp", bmp[: len(bmp) // 2], undecodable.format("BMP")),
        "truncated tiff": ("b.tif", tiff[: len(tiff) // 2], f"{unknown}|{undecodable.format('TIFF')}"),
        "30,000 x 30,000 pixels": (
            "b.png",
            bomb(),
            r"b\.png (is|has) 30,000 x 30,000 pixels, more than the 178,956,970",
        ),
    }
    for name, (file, content, error) in bad.items():
        cases[name] = Case(image_set(file, content), error, left=(1, 1))
    for name, make in (
        ("folder named jpg", Path.mkdir),
        ("pipe named jpg", os.mkfifo),
        ("link to nothing", lambda path: path.symlink_to("nowhere.jpg")),
        ("link to itself", lambda path: path.symlink_to("b.jpg")),
        ("missing image", lambda path: None),
    ):
        cases[name] = Case(image_set("b.jpg", make), r"names (.*/)?b\.jpg, which is not in", left=(1, 1))
    return cases


def coco_content(second: str = "b.png") -> dict[str, Any]:
    return {
        "images": [
            {"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH}
            for number, name in ((1, "a.png"), (2, second))
        ],
        "annotations": [
            {"id": 10 + number, "image_id": number, "category_id": 1, "bbox": GOOD_BOX, "area": 600, "iscrowd": 0}
            for number in (1, 2)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES, start=1)],
    }


def image_set(file: str, content: bytes | Callable[[Path], None]) -> Callable[[Path], DataConfig]:
    """A COCO and a YOLO set of the same two images at once; the test reads both."""

    def write(root: Path) -> DataConfig:
        (root / "images").mkdir(parents=True)
        (root / "labels").mkdir()
        Image.fromarray(PICTURE).save(root / "images" / "a.png")
        path = root / "images" / file
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        for stem in ("a", "b"):
            (root / "labels" / f"{stem}.txt").write_text(GOOD_ROW)
        (root / "list.txt").write_text(f"images/a.png\nimages/{file}\n")
        (root / "set.json").write_text(json.dumps(coco_content(file)))
        return config_of(root, DataFormat.yolo, "list.txt", ".", NAMES)

    return write


def as_coco(config: DataConfig) -> DataConfig:
    """The other one of the two sets that ``image_set`` writes."""
    part = SplitConfig("set.json", "images")
    return replace(config, format=DataFormat.coco, train=part, val=part)
