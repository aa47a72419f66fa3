"""Broken and unusual images, labels and xml files; ``sets.py`` has what a case is."""

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
from tests.data.sets import GOOD_BOX, GOOD_BOXES, GOOD_ROW, HEIGHT, NAMES, PICTURE, WIDTH, Case, coco_content, config_of


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int, thumbnail: bytes = b"") -> bytes:
    """Exif data with that one tag, and whatever comes after (TIFF 6.0: tag 0x0112, type SHORT)."""
    return b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0) + thumbnail


def with_segment(jpeg: bytes, content: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + jpeg[2:]


def png_header(width: int, height: int) -> bytes:
    """A PNG file that ends where its pixels would begin."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">II4s", zlib.crc32(body), 0, b"IDAT")


def spoilt(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


WHOLE = Image.fromarray(PICTURE)
JPEG = encoded(WHOLE, "JPEG", quality=95)
PNG, TIFF, BMP = encoded(WHOLE, "PNG"), encoded(WHOLE, "TIFF", compression="tiff_lzw"), encoded(WHOLE, "BMP")
PALETTE = WHOLE.quantize(64)
THUMBNAIL = exif(1, encoded(WHOLE.resize((12, 8)), "JPEG"))


def images() -> dict[str, Case]:
    return good_images() | bad_images() | paths_without_image()


def good_images() -> dict[str, Case]:
    good = {
        "jpeg": ("b.jpg", JPEG),
        "jpeg with data after its end": ("b.jpg", JPEG + bytes(5000) + b"trailer"),
        "jpeg with a thumbnail": ("b.jpg", with_segment(JPEG, THUMBNAIL)),
        "jpeg behind 70 kB of profiles": ("b.jpg", with_segment(with_segment(JPEG, bytes(50000)), bytes(20000))),
        "cmyk jpeg": ("b.jpg", encoded(WHOLE.convert("CMYK"), "JPEG", quality=95)),
        "png named jpg": ("b.jpg", PNG),
        "16-bit png": ("b.png", cv2.imencode(".png", PICTURE[..., ::-1].astype(np.uint16) * 257)[1].tobytes()),
        "png with alpha": ("b.png", encoded(WHOLE.convert("RGBA"), "PNG")),
        "animated gif": ("b.gif", encoded(PALETTE, "GIF", save_all=True, append_images=[WHOLE.rotate(180).quantize()])),
        "tiff": ("b.tif", TIFF),
    }
    cases = {}
    for name, (file, content) in good.items():
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        cases[name] = Case(image_set(file, content), pixels=expected)
    return cases


def bad_images() -> dict[str, Case]:
    webp = encoded(WHOLE, "WEBP", lossless=True)
    undecodable = r"/b\.\w+ cannot be decoded: its {} data are damaged"
    unknown = r"/b\.\w+ is (0 x 0 pixels, or )?not an image of a known type \(JPEG, PNG,"
    bad = {
        "truncated jpeg": ("b.jpg", JPEG[: len(JPEG) * 6 // 10], r"/b\.jpg is cut short"),
        "jpeg cut in its header": ("b.jpg", JPEG[:100], unknown),
        "empty file": ("b.jpg", b"", unknown),
        "noise that starts as a jpeg": ("b.jpg", b"\xff\xd8\xff" + np.random.default_rng(1).bytes(5000), unknown),
        "truncated png": ("b.png", PNG[: len(PNG) // 2], undecodable.format("PNG")),
        "png with a wrong byte": ("b.png", spoilt(PNG, len(PNG) // 2), undecodable.format("PNG")),
        "truncated webp": ("b.webp", webp[: len(webp) // 2], unknown),
        "pgm of 10 bits": ("b.pgm", b"P5\n# x\n60 40 1023\n" + bytes(4800), r"b\.pgm cannot be decoded: .* go to 1023"),
        "pgm of 32 bits": ("b.pgm", b"Pf\n60 40\n-1.0\n" + bytes(9600), undecodable.format("PPM")),
        "30,000 x 30,000 pixels": ("b.png", png_header(30000, 30000), r"b\.png (has more than|is 0 x 0) .*pixels"),
    }
    return {name: Case(image_set(file, content), error, left=(1, 1)) for name, (file, content, error) in bad.items()}


def paths_without_image() -> dict[str, Case]:
    makers: dict[str, Callable[[Path], Any]] = {
        "folder named jpg": Path.mkdir,
        "pipe named jpg": os.mkfifo,
        "link to nothing": lambda path: path.symlink_to("nowhere.jpg"),
        "missing image": lambda path: None,
    }
    error = r"/(set\.json|list\.txt): (.*/)?b\.jpg is not in"
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


def yolo_set(label: bytes | Callable[[Path], Any]) -> Callable[[Path], DataConfig]:
    """A folder of two images; the second one's label file holds these bytes."""

    def write(root: Path) -> DataConfig:
        for folder in ("images", "labels"):
            (root / folder / "train").mkdir(parents=True)
        for stem in ("a", "b"):
            Image.fromarray(PICTURE).save(root / "images" / "train" / f"{stem}.png")
        (root / "labels" / "train" / "a.txt").write_text(GOOD_ROW)
        path = root / "labels" / "train" / "b.txt"
        if isinstance(label, bytes):
            path.write_bytes(label)
        else:
            label(path)
        return config_of(root, DataFormat.yolo, "images/train", ".", NAMES)

    return write


def labels() -> dict[str, Case]:
    good = {
        "label": (GOOD_ROW.encode(), GOOD_BOXES),
        "label with a byte order mark": (b"\xef\xbb\xbf" + GOOD_ROW.encode(), GOOD_BOXES),
        "label with crlf": (b"0 0.5 0.5 0.5 0.5\r\n1 .25 .25 .5 .5\r\n", [*GOOD_BOXES, [1, 0, 0, 30, 20]]),
        "empty label": (b"", []),
        "label half a pixel outside": (b"0 0.5 0.5 1.01 1", [[0, -0.3, 0, 60.6, 40]]),
        "label of a polygon": (b"1 .25 .25 .75 .25 .75 .75 .3 .7", [[1, *GOOD_BOX]]),
        "missing label": (lambda path: None, []),
    }
    cases = {name: Case(yolo_set(label), boxes=boxes) for name, (label, boxes) in good.items()}
    bad = {
        "nan": (b"0 0.5 nan 0.5 0.5", r"b\.txt:1 .* not finite"),
        "a polygon with nan": (b"0 .1 .1 nan .5 .9 .9", r"b\.txt:1 .* not finite"),
        "a negative centre": (b"0 -0.5 0.5 0.5 0.5", r"b\.txt:1 .* lies outside its image of 60 x 40"),
        "no height": (b"0 0.5 0.5 0.5 0", r"b\.txt:1 .* has no area"),
        "pixels": (b"0 30 20 30 20", r"/b\.txt:1 .*: 30 where YOLO has fractions"),
        "a class without name": (b"\n2 0.5 0.5 0.5 0.5", r"/b\.txt:2 .*: class 2, but there are names for 2 classes"),
        "a class by name": (b"cat 0.5 0.5 0.5 0.5", r"/b\.txt:1 .*: could not convert string to float: 'cat'"),
        "missing columns": (b"0 0.5 0.5 0.5", r"/b\.txt:1 .*: 4 columns instead of 5"),
        "noise": (b"\x89PNG" + np.random.default_rng(1).bytes(500), r"/b\.txt is not a text file in UTF-8\. fix: "),
    }
    cases |= {f"label with {name}": Case(yolo_set(label), error, (2, 1)) for name, (label, error) in bad.items()}
    over = b"0 0.9 0.5 0.5 0.5"
    cases["label with a box over the edge"] = Case(yolo_set(over), r"b\.txt:1 .* reaches 9\.00 px out", (2, 2))
    cases["label that is a folder"] = Case(yolo_set(Path.mkdir), boxes=[])
    cases["label that is a pipe"] = Case(yolo_set(os.mkfifo), boxes=[])
    return cases


# VOC xml


OBJECT = "<object><name>cat</name><bndbox>{}</bndbox></object>"
CORNERS = "<xmin>15</xmin><ymin>10</ymin><xmax>45</xmax><ymax>30</ymax>"
SIZE = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"


def voc_text(size: str = SIZE, corners: str = CORNERS) -> str:
    return f"<annotation><filename>b.png</filename>{size}{OBJECT.format(corners)}</annotation>"


def voc_set(content: bytes, listed: bytes = b"a\nb\n") -> Callable[[Path], DataConfig]:
    def write(root: Path) -> DataConfig:
        for folder in ("Annotations", "JPEGImages"):
            (root / folder).mkdir(parents=True)
        for stem in ("a", "b"):
            Image.fromarray(PICTURE).save(root / "JPEGImages" / f"{stem}.png")
        (root / "Annotations" / "a.xml").write_text(voc_text())
        (root / "Annotations" / "b.xml").write_bytes(content)
        (root / "list.txt").write_bytes(listed)
        return config_of(root, DataFormat.voc, "list.txt", ".", NAMES)

    return write


def xmls() -> dict[str, Case]:
    levels = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    laughs = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "ha">{levels}]>' + voc_text(corners="&e9;")
    invalid = r"/b\.xml is not valid XML"
    utf16 = f'<?xml version="1.0" encoding="utf-16"?>{voc_text()}'.encode("utf-16")
    bad = {
        "xml with a billion laughs": (laughs, invalid, (1, 1)),
        "truncated xml": (voc_text()[:-30], invalid, (1, 1)),
        "xml with a size of text": (voc_text(SIZE.replace("60", "sixty")), rf"{invalid} .* 'sixty'", (1, 1)),
        "xml without xmax": (voc_text(corners=CORNERS.replace("xmax", "xend")), r"b\.xml has no bndbox with", (2, 1)),
        "xml with nan": (voc_text(corners=CORNERS.replace("15", "NaN")), r"object 1 of b\.xml .* not finite", (2, 1)),
        "xml with an unknown class": (
            voc_text().replace("cat", "cta"),
            r"object 1 of b\.xml is of class 'cta'",
            (2, 1),
        ),
    }
    cases = {name: Case(voc_set(text.encode()), error, left) for name, (text, error, left) in bad.items()}
    plain = voc_text().encode()
    cases |= {
        "xml": Case(voc_set(plain), boxes=GOOD_BOXES),
        "xml without size": Case(voc_set(voc_text(size="").encode()), boxes=GOOD_BOXES),
        "xml in utf-16": Case(voc_set(utf16), boxes=GOOD_BOXES),
        "xml without objects": Case(voc_set(voc_text().replace("object", "thing").encode()), boxes=[]),
        "xml of another file's name": Case(voc_set(plain.replace(b"b.png", b"a")), boxes=GOOD_BOXES),
        "image list with crlf and blanks": Case(voc_set(plain, b"\xef\xbb\xbfa \r\n\r\nb\t\r\n"), boxes=GOOD_BOXES),
        "image list with a missing xml": Case(
            voc_set(plain, b"a\nc\n"), r"/c\.xml cannot be read \(No such file", (1, 1)
        ),
        "image list of other images": Case(
            voc_set(plain, b"x\ny\n"), r"/list\.txt names no image that has an xml file"
        ),
    }
    return cases
