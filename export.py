"""Write a trained detector as a file for other programs.

    python export.py ckpt=runs/coco/... format=onnx nms=true
    python export.py ckpt=runs/coco/... format=torch dynamic_batch=true image_size=[384,640]
    python export.py ckpt=runs/coco/... out=shipped    # a folder to ship: the model and a client
    python export.py model=yolov3-spp model.weights=yolov3-spp.weights names=coco.names

The program runs the file and compares it with the network before it gives the file its name.
Everything runs on the CPU.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("export")
    raise SystemExit

import importlib.util
import json
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.answers.help import own_version
from conf.api.calls import callable_from_python
from conf.build.network import TrainedNetwork, open_detector
from conf.failures import ConfigError
from conf.schema_inference import SUFFIXES, ExportConfig, ExportFormat
from data.formats.shapes import draw_image
from data.samples.letterbox import letterbox
from models import Darknet
from models.export.check import Comparison, check_onnx, check_torch
from models.export.files import add_metadata, describe_values, write_onnx, write_torch
from models.export.graph import DetectorGraph, FixedSuppression
from models.export.metadata import MODEL_FILE
from models.export.shipped import FILES, write_shipped
from train_utils.run.checkpoint_files import FOLDER

EXTRA = ("onnx", "onnxscript", "onnxruntime")
DRAWN_SIDE = 160  # least side in pixels: smaller pictures have no room for objects


@callable_from_python("export")
def export(config: ExportConfig) -> Path:
    """Write and check a file as configured, show how to use it and return its path.

    Raises ConfigError if packages are missing or options do not fit, ModelError if the weights do
    not fit, an exporter cannot write the network, or the file differs from it.
    """
    require_packages(config.format)
    out = output_path(config)
    sides = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size and max(sides))
    model = detector.model
    assert isinstance(model, Darknet), "conf/sources/checkpoints.py refuses exported files"
    dynamic_size = config.ships if config.dynamic_size is None else config.dynamic_size
    config = replace(config, dynamic_size=dynamic_size)
    height, width = size = image_size(sides, detector)
    print(f"{detector.note}; {height} x {width} pixels (height x width)", flush=True)
    suppression = None
    if config.nms:
        suppression = FixedSuppression(config.confidence, config.nms_iou, config.max_detections, config.candidates)
    graph = DetectorGraph(model, suppression, show_candidates=config.format == ExportFormat.onnx)
    names = {0: "batch"} if config.dynamic_batch else {}
    dynamic = names | ({2: "height", 3: "width"} if config.dynamic_size else {})
    example = torch.zeros(config.batch_size, 3, height, width)
    values = describe_values(graph, example, dynamic)
    facts = described(config, detector, size, values)
    details = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in facts.items()
    }
    batches = trial_batches(config, size, model.max_stride)

    file = out / MODEL_FILE if config.ships else out
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as workplace:
        partial = Path(workplace) / file.name
        print(f"writing {out} ...", flush=True)
        if config.format == ExportFormat.onnx:
            write_onnx(graph, example, dynamic, config.opset, details, partial)
        else:
            write_torch(graph, example, dynamic, details, partial)
        written = time.perf_counter()
        print("comparing it with the network ...", flush=True)
        check = check_onnx if config.format == ExportFormat.onnx else check_torch
        comparison = check(partial, model, graph, batches, config.tolerance)
        lost = {"boxes": comparison.boxes, "scores": comparison.scores}
        if config.format == ExportFormat.onnx:
            add_metadata(partial, {"lost": json.dumps(lost)})
        if config.ships:
            write_shipped(Path(workplace), {**facts, "lost": lost, "scored": detector.scored}, config.license)
        file.parent.mkdir(exist_ok=True)
        for written_file in Path(workplace).iterdir():
            os.replace(written_file, file.parent / written_file.name)
    seconds = f"{written - started:.0f} s to write, {time.perf_counter() - written:.0f} s to check"
    print(f"wrote {out}: {file.stat().st_size / 1e6:.1f} MB, {seconds}")
    print("\n".join(f"  {name:<11} {kind_and_shape}" for name, kind_and_shape in values.items()))
    print(agreement(comparison, batches, config.nms))
    print(usage(out, config, list(values), model.max_stride), flush=True)
    return out


def image_size(sides: Sequence[int | None], detector: TrainedNetwork) -> tuple[int, int]:
    """Height and width: ``sides`` if given, else the detector's. ConfigError if they do not fit."""
    height, width = (side or detector.image_size for side in sides)
    if (fits := detector.model.nearest_size(height, width)) != (height, width):
        raise ConfigError(
            f"image_size=[{height},{width}] is not a multiple of the network's stride {detector.model.max_stride}."
            f" fix: image_size=[{fits[0]},{fits[1]}]"
        )
    return height, width


def trial_batches(config: ExportConfig, size: tuple[int, int], stride: int) -> list[Tensor]:
    """Batches of images (batch, 3, height, width) on which to compare file and network.

    They show drawn pictures, noise, black (without detections) and, if the file has a dynamic
    shape, noisy pictures in another shape.
    """
    generator = np.random.default_rng(0)

    def drawn(count: int, height: int, width: int) -> Tensor:
        pictures = [draw_image(max(DRAWN_SIDE, height, width), generator).image for _ in range(count)]
        stacked = np.stack([letterbox(picture, (height, width), upscale=True)[0] for picture in pictures])
        return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous() / 255

    def noise(count: int, height: int, width: int) -> Tensor:
        return torch.from_numpy(generator.random((count, 3, height, width), dtype=np.float32))

    batch, (height, width) = config.batch_size, size
    batches = [drawn(batch, height, width), noise(batch, height, width), torch.zeros(batch, 3, height, width)]
    if config.dynamic_batch or config.dynamic_size:
        more = 1 if config.dynamic_batch else 0
        if config.dynamic_size:
            height, width = height + 2 * stride, width + stride
        batches.append((drawn(batch + more, height, width) + noise(batch + more, height, width)) / 2)
    return batches


def require_packages(file_format: ExportFormat) -> None:
    """Raise ConfigError if the packages for a format are not installed."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if file_format == ExportFormat.onnx and missing:
        raise ConfigError(
            f"format=onnx needs the packages of the extra ({', '.join(missing)} missing). fix: uv sync --extra export"
        )


def output_path(config: ExportConfig) -> Path:
    """The file to write: ``out``, or the name of the weights with the format's suffix.

    Raises ConfigError if it cannot be written.
    """
    suffix = next(suffix for suffix, kind in SUFFIXES.items() if kind == config.format)
    if config.out is not None:
        out = Path(config.out)
    elif given := config.ckpt or (config.model and config.model.weights):
        source = Path(given)
        out = (source / FOLDER / "best" if source.is_dir() else source).with_suffix(suffix)
    else:
        raise ConfigError("no weights are given. fix: ckpt=<run folder or .pt file>, or model= and model.weights=")
    if config.ships and out.is_dir():
        if others := sorted(path.name for path in out.iterdir() if path.name not in FILES):
            raise ConfigError(f"out={out} holds other files ({', '.join(others[:3])}). fix: out=<a new folder>")
        return out
    if out.suffix != suffix and not config.ships:
        fix = f"out={out.with_suffix(suffix)}"
        raise ConfigError(f"out={out} does not end in {suffix}, as format={config.format} does. fix: {fix}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out} cannot be written. fix: out=<file in an existing folder that you may write to>")
    return out


def described(
    config: ExportConfig, detector: TrainedNetwork, size: tuple[int, int], values: dict[str, str]
) -> dict[str, Any]:
    """What the file says about itself, for models/export/metadata.py."""
    known: dict[str, Any] = {
        "made_by": own_version(),
        "origin": detector.origin,
        "names": detector.names,
        "category_ids": detector.category_ids,
        "image_size": size,  # height, width
        "strides": [head.stride for head in detector.model.heads],
        "stride": detector.model.max_stride,  # image sides must be multiples of it
        "open": [*["batch"] * config.dynamic_batch, *["height", "width"] * bool(config.dynamic_size)],
        "detect": {
            key: getattr(config, key) for key in ("resize", "confidence", "nms_iou", "merge_nms", "max_detections")
        },
        "values": values,
    }
    if config.nms:
        known["suppression"] = {**known["detect"], "candidates": config.candidates}
    return known


def agreement(comparison: Comparison, batches: Sequence[Tensor], suppresses: bool) -> str:
    """The result of the comparison in one line."""
    shapes = ", ".join(dict.fromkeys("x".join(map(str, images.shape)) for images in batches))
    line = (
        f"agrees with the network on drawn pictures, noise and black ({shapes}): boxes within {comparison.boxes:.1e}"
        f" of the image size, scores within {comparison.scores:.1e}"
    )
    if not suppresses:
        return line
    invented = f" and {comparison.invented} on invented boxes" if comparison.invented else ""
    return f"{line}; all detections equal, {comparison.detections} on pictures{invented}"


def usage(out: Path, config: ExportConfig, names: Sequence[str], stride: int) -> str:
    """Lines of Python that run the file, or commands for a folder.

    With a dynamic size they check that the sides are multiples of the stride: for others ONNX files
    may output wrong boxes.
    """
    if config.ships:
        needs, client = (shlex.quote(str(out / name)) for name in ("requirements.txt", "detector.py"))
        return f"run it:\n  pip install -r {needs}\n  python {client} picture.jpg"
    outputs = ", ".join(names[1:])
    reading = "# images: cv2.imread(path, cv2.IMREAD_COLOR_RGB), which turns upright by EXIF tags; letterboxed, / 255"
    if config.dynamic_size:
        multiple = f"height and width must be multiples of {stride}"
        reading += f"\n  assert not any(side % {stride} for side in images.shape[2:]), {multiple!r}"
    if config.format == ExportFormat.onnx:
        lines = [
            "import onnxruntime",
            f"session = onnxruntime.InferenceSession({str(out)!r})",
            f'{outputs} = session.run(None, {{"images": images}})  # a numpy array',
        ]
    else:
        lines = [
            "import torch, torchvision  # torchvision has the non-maximum suppression",
            f"detector = torch.export.load({str(out)!r}).module()",
            f"{outputs} = detector(images)  # a tensor",
        ]
    return "\n".join(["run it:", *(f"  {line}" for line in [reading, *lines])])
