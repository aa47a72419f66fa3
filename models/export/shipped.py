"""A folder to ship: an ONNX file beside a client that needs neither torch nor this project."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from models.export.metadata import MODEL_FILE, difference

CLIENT = Path(__file__).with_name("detector.py")
README = Path(__file__).with_name("shipped.md.jinja")
LICENCE = Path(__file__).parents[2] / "LICENSE"
REQUIREMENTS = ("numpy>=1.26", "opencv-python-headless>=4.11", "onnxruntime>=1.23")
FILES = (MODEL_FILE, CLIENT.name, "README.md", "requirements.txt", LICENCE.name)


def write_shipped(folder: Path, facts: Mapping[str, Any], licence: str | None) -> None:
    """Write all files of FILES but the model into ``folder``.

    facts: the metadata of the model (metadata.py), not yet as JSON, and ``scored``: figures of the
    weights with the name of their ``data``, if they have any; licence: of the weights.
    """
    shutil.copy(CLIENT, folder)
    shutil.copy(LICENCE, folder)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in REQUIREMENTS), encoding="utf-8")
    content = README.read_text(encoding="utf-8")
    template = Template(content, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    text = template.render(facts, model=MODEL_FILE, difference=difference(facts["lost"]), licence=licence)
    (folder / "README.md").write_text(text, encoding="utf-8")
