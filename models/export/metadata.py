"""What an ONNX file of export.py says about itself, in its metadata. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ModelError

MODEL_FILE = "model.onnx"  # in a folder to ship
NEEDED = ("made_by", "names", "category_ids", "image_size", "stride", "open", "detect", "origin", "lost")


@dataclass(frozen=True)
class Exported:
    """An ONNX file, and what is needed to detect with it as with its checkpoint."""

    path: Path
    names: list[str]
    category_ids: list[int]
    image_size: list[int]  # height, width
    stride: int
    batch_size: int | None  # None: any
    any_size: bool  # whether height and width may be other multiples of the stride
    detect: dict[str, Any]  # options of predict.py for which it was exported
    note: str  # where it is from, and how far it is from the network there


def read_exported(ckpt: str | None) -> Exported | None:
    """The ONNX file that ``ckpt`` names, itself or by the folder to ship; None if it names none.

    Raises ModelError if it cannot be read, has no such metadata, or detects with limits of its own.
    """
    if ckpt is None:
        return None
    inside = Path(ckpt) / MODEL_FILE
    path = inside if inside.is_file() else Path(ckpt)
    if path.suffix != ".onnx":
        return None
    try:
        import onnxruntime
    except ImportError as error:
        fix = "fix: uv sync --extra export"
        raise ModelError(f"ckpt={path} needs onnxruntime, which is not installed. {fix}") from error
    if not path.is_file():
        raise ModelError(f"there is no {path.absolute()}. fix: give a file of export.py")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the sentence below says it all
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is only read
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # those of onnxruntime share no other class
        raise ModelError(f"{path} is no ONNX file that onnxruntime reads. fix: export it again") from error
    texts = session.get_modelmeta().custom_metadata_map
    if missing := [key for key in NEEDED if key not in texts]:
        raise ModelError(
            f"{path} was not written by this version of export.py: its metadata lack {', '.join(missing)}."
            " fix: python export.py ckpt=<run folder> format=onnx"
        )
    if "suppression" in texts:
        raise ModelError(
            f"{path} was exported with nms=true: it suppresses boxes with limits of its own."
            " fix: export it with nms=false"
        )
    facts = {key: json.loads(texts[key]) for key in ("names", "category_ids", "image_size", "stride", "detect")}
    batch, lost = session.get_inputs()[0].shape[0], difference(json.loads(texts["lost"]))
    return Exported(
        path=path,
        batch_size=batch if isinstance(batch, int) else None,
        any_size="height" in json.loads(texts["open"]),
        note=f"exported by {texts['made_by']} from {texts['origin']}; {lost}",
        **facts,
    )


def difference(lost: Mapping[str, float]) -> str:
    """How far a file was from its network, measured by export.py, in a few words."""
    return f"boxes within {lost['boxes']:.1e} of the image size and scores within {lost['scores']:.1e} of the network's"
