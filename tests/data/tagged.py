"""Picture files of every type with an EXIF tag: one bright object on dark ground, with its box."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

from data import DataConfig, DataFormat
from tests.data.bad_inputs import encoded, exif, with_segment
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


def _with_pillow(kind: str, **options: Any) -> Callable[[np.ndarray, int], bytes]:
    def write(image: np.ndarray, orientation: int) -> bytes:
        return encoded(Image.fromarray(image), kind, exif=exif(orientation), **options)

    return write


WRITERS: dict[str, tuple[str, Callable[[np.ndarray, int], bytes]]] = {
    "jpeg": (".jpg", _jpeg),
    "progressive jpeg": (".jpg", lambda image, tag: _jpeg(image, tag, progressive=1)),
    "grey jpeg": (".jpg", lambda image, tag: _jpeg(image[..., 0], tag)),
    "png": (".png", _with_pillow("PNG")),
    "webp": (".webp", _with_pillow("WEBP", lossless=True)),
}
Image.init()
if "AVIF" in Image.SAVE:  # Pillow is built without it here and there
    WRITERS["avif"] = (".avif", _with_pillow("AVIF", quality=100, subsampling="4:4:4"))


def write_set(
    root: Path, form: DataFormat, kind: str, annotated_upright: bool, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> DataConfig:
    """Pictures 1 to 8, each with the tag of its number, annotated upright or as stored."""
    suffix, write = WRITERS[kind]
    for name in ("images", "labels"):
        (root / name).mkdir(parents=True, exist_ok=True)
    content: dict[str, list[dict[str, object]]] = {"images": [], "annotations": []}
    content["categories"] = [{"id": 1, "name": "cat"}]
    for tag in range(1, 9):
        (root / "images" / f"{tag}{suffix}").write_bytes(write(stored_picture(*size), tag))
        x, y, w, h = upright_box(tag, *size) if annotated_upright else BOX
        height, width = size[::-1] if annotated_upright and tag > 4 else size
        content["images"].append({"id": tag, "file_name": f"{tag}{suffix}", "height": height, "width": width})
        content["annotations"].append({"id": tag, "image_id": tag, "category_id": 1, "bbox": [x, y, w, h]})
        row = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
        (root / "labels" / f"{tag}.txt").write_text(f"0 {' '.join(map(repr, row))}\n")
    (root / "set.json").write_text(json.dumps(content))
    annotations = "set.json" if form == DataFormat.coco else "images"
    return config_of(root, form, annotations, "images" if form == DataFormat.coco else ".", ["cat"])
