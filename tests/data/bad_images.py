"""Broken and unusual images; see ``bad_inputs.py``."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from data import DataConfig, DataFormat, SplitConfig
from tests.data.bad_inputs import GOOD_ROW, HEIGHT, NAMES, PICTURE, WIDTH, Case, coco_content, config_of


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


WHOLE = Image.fromarray(PICTURE)
JPEG = encoded(WHOLE, "JPEG", quality=95)
PROGRESSIVE = encoded(WHOLE, "JPEG", quality=95, progressive=True)
PNG, TIFF, BMP = encoded(WHOLE, "PNG"), encoded(WHOLE, "TIFF", compression="tiff_lzw"), encoded(WHOLE, "BMP")
PALETTE = WHOLE.quantize(64)
THUMBNAIL = exif(1, encoded(WHOLE.resize((12, 8)), "JPEG"))


def top_down(bmp: bytes) -> bytes:
    """The same picture with its rows in the other order, which a negative height tells."""
    stride = WIDTH * 3
    rows = [bmp[54 + stride * row :][:stride] for row in reversed(range(HEIGHT))]
    return bmp[:22] + struct.pack("<i", -HEIGHT) + bmp[26:54] + b"".join(rows)


def images() -> dict[str, Case]:
    return good_images() | bad_images() | paths_without_image()


def good_images() -> dict[str, Case]:
    frames = {"save_all": True, "append_images": [Image.fromarray(255 - PICTURE)]}
    good = {
        "jpeg": ("b.jpg", JPEG),
        "progressive jpeg": ("b.jpg", PROGRESSIVE),
        "jpeg with data after its end": ("b.jpg", JPEG + bytes(5000) + b"trailer"),
        "jpeg of two pictures": ("b.jpg", JPEG + encoded(Image.fromarray(255 - PICTURE), "JPEG")),
        "jpeg with a thumbnail": ("b.jpg", with_segment(JPEG, THUMBNAIL)),
        "jpeg behind 70 kB of profiles": ("b.jpg", with_segment(with_segment(JPEG, bytes(50000)), bytes(20000))),
        "cmyk jpeg": ("b.jpg", encoded(WHOLE.convert("CMYK"), "JPEG", quality=95)),
        "grey jpeg": ("b.jpg", encoded(WHOLE.convert("L"), "JPEG", quality=95)),
        "png named jpg": ("b.jpg", PNG),
        "jpeg named png": ("b.png", JPEG),
        "16-bit png": ("b.png", cv2.imencode(".png", PICTURE[..., ::-1].astype(np.uint16) * 257)[1].tobytes()),
        "palette png": ("b.png", encoded(PALETTE, "PNG")),
        "png of one bit": ("b.png", encoded(WHOLE.convert("1"), "PNG")),
        "png with alpha": ("b.png", encoded(WHOLE.convert("RGBA"), "PNG")),
        "animated png": ("b.png", encoded(WHOLE, "PNG", **frames)),
        "animated gif": ("b.gif", encoded(PALETTE, "GIF", save_all=True, append_images=[WHOLE.rotate(180).quantize()])),
        "animated webp": ("b.webp", encoded(WHOLE, "WEBP", lossless=True, **frames)),
        "bmp from the top down": ("b.bmp", top_down(BMP)),
        "tiff": ("b.tif", TIFF),
        "capital suffix": ("b.JPG", JPEG),
    }
    cases = {}
    for name, (file, content) in good.items():
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        cases[name] = Case(image_set(file, content), pixels=expected)
    return cases


def bad_images() -> dict[str, Case]:
    webp = encoded(WHOLE, "WEBP", lossless=True)
    undecodable = r"/b\.\w+ cannot be decoded: its {} data are damaged"
    unknown = r"/b\.\w+ is not an image of a known type \(JPEG, PNG,"
    bad = {
        "truncated jpeg": ("b.jpg", JPEG[: len(JPEG) * 6 // 10], r"/b\.jpg is cut short"),
        "jpeg without its last two bytes": ("b.jpg", JPEG[:-2], r"/b\.jpg is cut short"),
        "truncated jpeg filled up": ("b.jpg", JPEG[: len(JPEG) // 2] + bytes(len(JPEG)), unknown),
        "truncated progressive jpeg": ("b.jpg", PROGRESSIVE[: len(PROGRESSIVE) * 8 // 10], r"/b\.jpg is cut short"),
        "truncated jpeg with a thumbnail": (
            "b.jpg",
            with_segment(JPEG, THUMBNAIL)[: -len(JPEG) // 3],
            r"/b\.jpg is cut short",
        ),
        "jpeg cut in its header": ("b.jpg", JPEG[:100], unknown),
        "empty file": ("b.jpg", b"", rf"/b\.jpg is empty|{unknown}"),
        "text named jpg": ("b.jpg", b"not a picture\n" * 50, unknown),
        "page named png": ("b.png", b"<!DOCTYPE html><html>404</html>", unknown),
        "noise": ("b.jpg", np.random.default_rng(1).bytes(5000), unknown),
        "noise that starts as a jpeg": ("b.jpg", b"\xff\xd8\xff" + np.random.default_rng(1).bytes(5000), unknown),
        "truncated png": ("b.png", PNG[: len(PNG) // 2], undecodable.format("PNG")),
        "png with a wrong byte": ("b.png", spoilt(PNG, len(PNG) // 2), undecodable.format("PNG")),
        "png of a header only": ("b.png", PNG[:33], unknown),
        "png without width": ("b.png", png(0, 5, zlib.compress(b"")), unknown),
        "truncated gif": ("b.gif", encoded(PALETTE, "GIF")[:1200], undecodable.format("GIF")),
        "truncated webp": ("b.webp", webp[: len(webp) // 2], unknown),
        "truncated bmp": ("b.bmp", BMP[: len(BMP) // 2], undecodable.format("BMP")),
        "truncated tiff": ("b.tif", TIFF[: len(TIFF) // 2], f"{unknown}|{undecodable.format('TIFF')}"),
        "30,000 x 30,000 pixels": (
            "b.png",
            bomb(),
            r"b\.png has more than the 178,956,970 pixels",
        ),
    }
    return {name: Case(image_set(file, content), error, left=(1, 1)) for name, (file, content, error) in bad.items()}


def paths_without_image() -> dict[str, Case]:
    makers: dict[str, Callable[[Path], Any]] = {
        "folder named jpg": Path.mkdir,
        "pipe named jpg": os.mkfifo,
        "link to nothing": lambda path: path.symlink_to("nowhere.jpg"),
        "link to itself": lambda path: path.symlink_to("b.jpg"),
        "missing image": lambda path: None,
    }
    error = r"names (.*/)?b\.jpg, which is not in"
    return {name: Case(image_set("b.jpg", make), error, left=(1, 1)) for name, make in makers.items()}


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
