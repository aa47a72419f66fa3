"""Picture files of every type with an EXIF tag: one bright object on dark ground, with its box."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from data import DataConfig, DataFormat
from tests.data.bad_inputs import exif, with_segment
from tests.data.sets import config_of

HEIGHT, WIDTH = 40, 64
BOX = (4, 6, 16, 12)  # of the object in the stored pixels: x, y, w, h
BRIGHT = (250, 120, 30)


def stored_picture(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Four quarters of different grey, so that no two orientations look alike, and the object."""
    image = np.zeros((height, width, 3), dtype=np.uint8)
    for number, (rows, columns) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        part = image[rows * height // 2 :, columns * width // 2 :]
        part[:] = 20 + 25 * number
    x, y, w, h = BOX
    image[y : y + h, x : x + w] = BRIGHT
    return image


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """What Pillow makes of the tag."""
    file = io.BytesIO()
    tags = Image.Exif()
    tags[0x0112] = orientation
    Image.fromarray(image).save(file, "PNG", exif=tags)
    return np.asarray(ImageOps.exif_transpose(Image.open(file)))


def upright_box(orientation: int, height: int = HEIGHT, width: int = WIDTH) -> list[float]:
    """The object's box (x, y, w, h) in the turned picture, found in its pixels."""
    mask = upright(stored_picture(height, width), orientation)[..., 0] > 200
    ys, xs = np.nonzero(mask)
    return [float(xs.min()), float(ys.min()), float(np.ptp(xs) + 1), float(np.ptp(ys) + 1)]


def _jpeg(image: np.ndarray, orientation: int, progressive: int = 0) -> bytes:
    flags = [cv2.IMWRITE_JPEG_QUALITY, 98, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
    flags += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
    content = cv2.imencode(".jpg", image[..., ::-1] if image.ndim == 3 else image, flags)[1].tobytes()
    return with_segment(content, exif(orientation))


def _png(image: np.ndarray, orientation: int, behind: bool = False) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    body = b"eXIf" + exif(orientation)[6:]
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    at = file.getvalue().index(b"IEND") - 4 if behind else 33
    return file.getvalue()[:at] + chunk + file.getvalue()[at:]


def _webp(image: np.ndarray, orientation: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "WEBP", lossless=True, exif=exif(orientation))
    return file.getvalue()


def _avif(image: np.ndarray, orientation: int) -> bytes:
    file, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = orientation
    Image.fromarray(image).save(file, "AVIF", exif=tags, quality=100, subsampling="4:4:4")
    return file.getvalue()


def _tiff(image: np.ndarray, orientation: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "TIFF", tiffinfo={0x0112: orientation})
    return file.getvalue()


def _tiff_of_16_bits(image: np.ndarray, orientation: int) -> bytes:
    """One uncompressed strip of RGB (TIFF 6.0), behind the pixels the directory."""
    pixels = (image.astype("<u2") * 257).tobytes()
    bits = 8 + len(pixels)
    directory = bits + 6
    entries = [
        (256, 3, 1, image.shape[1]), (257, 3, 1, image.shape[0]), (258, 3, 3, bits), (259, 3, 1, 1), (262, 3, 1, 2),
        (273, 4, 1, 8), (274, 3, 1, orientation), (277, 3, 1, 3), (278, 3, 1, image.shape[0]),
        (279, 4, 1, len(pixels)), (284, 3, 1, 1),
    ]  # fmt: skip
    layouts = {3: "<HHIHxx", 4: "<HHII"}  # of a short and a long
    rows = b"".join(struct.pack(layouts[4 if entry[2] > 1 else entry[1]], *entry) for entry in entries)
    head = b"II*\0" + struct.pack("<I", directory)
    return head + pixels + struct.pack("<HHH", 16, 16, 16) + struct.pack("<H", len(entries)) + rows + bytes(4)


WRITERS: dict[str, tuple[str, Callable[[np.ndarray, int], bytes]]] = {
    "jpeg": (".jpg", _jpeg),
    "progressive jpeg": (".jpg", lambda image, tag: _jpeg(image, tag, progressive=1)),
    "grey jpeg": (".jpg", lambda image, tag: _jpeg(image[..., 0], tag)),
    "png": (".png", _png),
    "png with the tag behind its pixels": (".png", lambda image, tag: _png(image, tag, behind=True)),
    "webp": (".webp", _webp),
    "tiff": (".tif", _tiff),
    "tiff of 16 bits": (".tif", _tiff_of_16_bits),
}
Image.init()
if "AVIF" in Image.SAVE:  # Pillow is built without it here and there
    WRITERS["avif"] = (".avif", _avif)
FORMATS = [DataFormat.coco, DataFormat.voc, DataFormat.yolo]


def write_set(
    root: Path, form: DataFormat, kind: str, annotated_upright: bool, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> DataConfig:
    """Pictures 1 to 8, each with the tag of its number, annotated upright or as stored."""
    suffix, write = WRITERS[kind]
    folder = {DataFormat.voc: "JPEGImages"}.get(form, "images")
    for name in (folder, "labels", "Annotations"):
        (root / name).mkdir(parents=True, exist_ok=True)
    content: dict[str, list[dict[str, object]]] = {"images": [], "annotations": []}
    content["categories"] = [{"id": 1, "name": "cat"}]
    for tag in range(1, 9):
        (root / folder / f"{tag}{suffix}").write_bytes(write(stored_picture(*size), tag))
        x, y, w, h = upright_box(tag, *size) if annotated_upright else BOX
        height, width = size[::-1] if annotated_upright and tag > 4 else size
        content["images"].append({"id": tag, "file_name": f"{tag}{suffix}", "height": height, "width": width})
        content["annotations"].append({"id": tag, "image_id": tag, "category_id": 1, "bbox": [x, y, w, h]})
        corners = f"<xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
        (root / "Annotations" / f"{tag}.xml").write_text(
            f"<annotation><filename>{tag}{suffix}</filename><size><width>{width}</width><height>{height}</height></size>"
            f"<object><name>cat</name><bndbox>{corners}</bndbox></object></annotation>"
        )
        row = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
        (root / "labels" / f"{tag}.txt").write_text(f"0 {' '.join(map(repr, row))}\n")
    (root / "list.txt").write_text("".join(f"{tag}\n" for tag in range(1, 9)))
    (root / "set.json").write_text(json.dumps(content))
    annotations = {DataFormat.coco: "set.json", DataFormat.voc: "list.txt", DataFormat.yolo: "images"}[form]
    return config_of(root, form, annotations, "images" if form == DataFormat.coco else ".", ["cat"])
