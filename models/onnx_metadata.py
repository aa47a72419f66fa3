"""What an ONNX file of export.py says about itself, in its metadata. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError


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
    note: str  # where it is from


def read_exported(ckpt: str | None) -> Exported | None:
    """The ONNX file that ``ckpt`` names; None if it names none.

    Raises ModelError if it cannot be read, has no such metadata, or detects with limits of its own.
    """
    if ckpt is None or (path := Path(ckpt)).suffix != ".onnx":
        return None
    try:
        import onnxruntime
    except ImportError as error:
        fix = "fix: uv sync --extra export"
        raise ModelError(f"ckpt={path} needs onnxruntime, which is not installed. {fix}") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the sentence below says it all
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is only read
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        texts = session.get_modelmeta().custom_metadata_map
        facts = {key: json.loads(texts[key]) for key in ("names", "category_ids", "image_size", "stride")}
    except Exception as error:  # those of onnxruntime share no other class
        raise ModelError(f"{path} cannot be read, or export.py did not write it. fix: export it again") from error
    if "suppression" in texts:
        raise ModelError(f"{path} was exported with nms=true, which has limits of its own. fix: export with nms=false")
    batch = session.get_inputs()[0].shape[0]
    return Exported(
        path=path,
        batch_size=batch if isinstance(batch, int) else None,
        any_size="height" in json.loads(texts["open"]),
        note=f"exported by {texts['made_by']} from {texts['origin']}",
        **facts,
    )
