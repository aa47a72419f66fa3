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
    pictures: dict[str, dict[str, Any]] = {}
    classes: dict[str, int] = {}
    boxes: list[dict[str, Any]] = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        name, kind, *corners = line.split()
        if name not in pictures:
            width, height = Image.open(images / name).size
            number = len(pictures) + 1
            pictures[name] = {"id": number, "file_name": name, "width": width, "height": height}
        left, top, right, bottom = map(float, corners)
        box: dict[str, Any] = {"id": len(boxes) + 1, "image_id": pictures[name]["id"]}
        box["category_id"] = classes.setdefault(kind, len(classes) + 1)
        box["bbox"] = [left, top, right - left, bottom - top]
        boxes.append(box)
    categories = [{"id": number, "name": name} for name, number in classes.items()]
    return {"images": list(pictures.values()), "annotations": boxes, "categories": categories}


FORMATS["lines"] = read_lines
