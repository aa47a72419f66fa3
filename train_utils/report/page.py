"""Pages of HTML in one file: pictures are part of it, and nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import json
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from train_utils.errors import TrainError
from train_utils.run.whole_files import whole_file
from train_utils.scores.coco_eval import ABSENT


def write_page(template: str, out: Path, **values: Any) -> None:
    """Fill ``<template>.html.jinja`` and write it to ``out``. Raises TrainError."""
    environment = Environment(
        loader=PackageLoader("train_utils.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(f"{template}.html.jinja").render(values)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as file:
            file.write(text)
    except OSError as error:
        raise TrainError(f"cannot write {out} ({error.strerror}). fix: free some space there, or out=") from error


def data_url(content: bytes, name: str) -> str:
    """A picture as the address of an image; ``name`` ends as that of its file."""
    return f"data:{guess_type(name)[0]};base64,{base64.b64encode(content).decode()}"


def figure(value: float | None) -> str:
    """A figure of 0 to 1 with three places; a dash where there is none."""
    return "-" if value is None or value == ABSENT else f"{value:.3f}"


def shown(value: Any) -> str:
    """A value of an option as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value)
