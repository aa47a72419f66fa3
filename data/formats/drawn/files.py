"""Write a drawn data set in the COCO layout, with exact boxes and areas.

Every image is a function of (seed, split, number) alone. As in COCO, boxes and areas are those of
the visible pixels.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import DataFormat, ShapesConfig
from data.errors import DataError
from data.files.bars import counted
from data.formats.drawn import shapes, signs
from data.index.cache import new_folder

DRAWING_VERSION = 5  # raise it when the same settings give other files
JPEG_QUALITY = 90
DRAWINGS = {
    DataFormat.shapes: (shapes.draw_image, shapes.CLASSES),
    DataFormat.signs: (signs.draw_image, signs.CLASSES),
}


def ensure_shapes(root: Path, config: ShapesConfig, kind: DataFormat = DataFormat.shapes) -> Path:
    """Return the folder below ``root`` with the set of ``config``; draw it if missing.

    Other settings have another folder. Any number of processes may call this at once.
    """
    parameters = {"version": DRAWING_VERSION, **asdict(config)}
    if kind is not DataFormat.shapes:
        parameters["drawing"] = kind.value
    folder = root / hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:8]
    if folder.is_dir():
        return folder
    try:
        with new_folder(folder) as temporary:
            (temporary / "annotations").mkdir()
            for number, (split, count) in enumerate((("train", config.train_images), ("val", config.val_images))):
                content = _draw_split(temporary / split, kind, count, config.image_size, [config.seed, number])
                (temporary / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
            (temporary / "parameters.json").write_text(json.dumps(parameters, indent=2))
    except OSError as error:
        raise DataError(
            f"cannot write the drawn data set to {root} ({error.strerror}). "
            "fix: set data.root to a folder with space that you may write to"
        ) from error
    return folder


def visible_box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Left, top, width and height of the pixels in ``mask``, which must not be empty."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    left, top = int(columns[0]), int(rows[0])
    return left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top


def _draw_split(folder: Path, kind: DataFormat, count: int, image_size: int, seed: list[int]) -> dict[str, Any]:
    """Write the images of one split and return its COCO annotations."""
    folder.mkdir()
    draw, names = DRAWINGS[kind]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in counted(range(count), f"drawing {folder.name} shapes", count):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*seed, number])))
        drawing = draw(image_size, generator)
        height, width = drawing.image.shape[:2]
        name = f"{number + 1:06d}.jpg"
        bgr = cv2.cvtColor(drawing.image, cv2.COLOR_RGB2BGR)
        encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]
        (folder / name).write_bytes(encoded.tobytes())
        images.append({"id": number + 1, "file_name": name, "width": width, "height": height})
        for number_of_class, mask in zip(drawing.classes, drawing.masks, strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number + 1,
                    "category_id": number_of_class + 1,
                    "bbox": list(visible_box(mask)),
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(names)]
    return {"images": images, "annotations": annotations, "categories": categories}
