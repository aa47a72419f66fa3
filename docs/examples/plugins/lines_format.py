"""A data format: text lines ``picture.jpg class left top right bottom``, in pixels.

``python train.py data=coco plugins=[lines_format.py] data.format=lines data.root=my`` and the files
as ``data.train.annotations=train.txt data.train.images=.``, likewise ``data.val``.
"""

from pathlib import Path
from typing import Any

from PIL import Image

from plugins import FORMATS


def read_lines(annotations: Path, images: Path) -> dict[str, Any]:
    """Read the file ``annotations`` as a COCO dictionary."""
    numbers: dict[str, int] = {}
    classes: dict[str, int] = {}
    boxes: list[dict[str, Any]] = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        name, kind, *corners = line.split()
        left, top, right, bottom = map(float, corners)
        image = numbers.setdefault(name, len(numbers) + 1)
        category = classes.setdefault(kind, len(classes) + 1)
        bbox = [left, top, right - left, bottom - top]
        boxes.append({"id": len(boxes) + 1, "image_id": image, "category_id": category, "bbox": bbox})
    sizes = [Image.open(images / name).size for name in numbers]
    return {
        "images": [
            {"id": number, "file_name": name, "width": size[0], "height": size[1]}
            for (name, number), size in zip(numbers.items(), sizes, strict=True)
        ],
        "annotations": boxes,
        "categories": [{"id": number, "name": name} for name, number in classes.items()],
    }


FORMATS["lines"] = read_lines
