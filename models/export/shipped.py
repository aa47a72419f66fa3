"""A folder to ship: an ONNX file beside a client that needs neither torch nor this project."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.export.metadata import MODEL_FILE, difference

CLIENT = Path(__file__).with_name("detector.py")
LICENCE = Path(__file__).parents[2] / "LICENSE"
REQUIREMENTS = ("numpy>=1.26", "opencv-python-headless>=4.11", "onnxruntime>=1.23")
FILES = (MODEL_FILE, CLIENT.name, "README.md", "requirements.txt", LICENCE.name)

README = """# Detector

`{model}` finds {classes}.

    pip install -r requirements.txt      # numpy, OpenCV and onnxruntime
    python detector.py street.jpg        # prints what it finds, and draws it into detected/

From Python:

    from detector import Detector
    detector = Detector()
    boxes_xyxy, scores, classes = detector(cv2.imread("street.jpg"))

Boxes are x1, y1, x2, y2 in pixels of the picture; a class is a position in `detector.names`.
`Detector(confidence=0.5)` changes a setting: {settings}.

| | |
|---|---|
| from | {origin}, by {made_by} |
| pictures | {size} |
| figures | {figures} |
| lost in the export | {lost} |
| licence of detector.py | Apache-2.0 (LICENSE) |
| licence of the weights in {model} | {licence} |
"""


def write_shipped(folder: Path, facts: Mapping[str, Any], licence: str | None) -> None:
    """Write all files of FILES but the model into ``folder``.

    facts: the metadata of the model (metadata.py), not yet as JSON, and ``scored``: figures of the
    weights with the name of their ``data``, if they have any; licence: of the weights.
    """
    shutil.copy(CLIENT, folder)
    shutil.copy(LICENCE, folder)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in REQUIREMENTS), encoding="utf-8")
    names, (height, width), scored = facts["names"], facts["image_size"], facts["scored"]
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    sides = f"scaled to {height} x {width} pixels (height x width), padded with grey"
    if "height" in facts["open"]:
        sides = f"their longer side is scaled to {max(height, width)} pixels"
    figures = "unknown"
    if scored:
        figures = f"AP {scored['AP']:.3f}, AP50 {scored['AP50']:.3f} on the validation set of {scored['data']}"
    text = README.format(
        model=MODEL_FILE,
        classes=f"objects of {len(names)} {'class' if len(names) == 1 else 'classes'} ({listed})",
        settings=", ".join(f"{key}={value}" for key, value in facts["detect"].items()),
        origin=facts["origin"],
        made_by=facts["made_by"],
        size=sides,
        figures=figures,
        lost=difference(facts["lost"]),
        licence=licence or "unknown: ask who trained them",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
