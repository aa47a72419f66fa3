"""Pages of HTML in one file: pictures are part of it, and nothing is loaded from anywhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from train_utils.run.whole_files import whole_file
from train_utils.scores.coco_eval import ABSENT

MIME_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}


def write_page(template: str, out: Path, **values: Any) -> None:
    """Fill ``<template>.html.jinja`` and write it to ``out``. Raises OSError."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "duration": duration, "picture": data_url}
    with whole_file(out) as file:
        file.write(environment.get_template(f"{template}.html.jinja").render(values))


def data_url(picture: Path) -> str:
    """A .png, .jpg or .svg file as the address of an image."""
    return f"data:{MIME_TYPES[picture.suffix]};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def figure(value: float | None) -> str:
    """A figure of 0 to 1 with three places; a dash where there is none."""
    return "-" if value is None or value == ABSENT else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as ``1 h 02 min`` or ``4 min 51 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
