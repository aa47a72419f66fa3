"""Write a trained detector as a file for other programs.

    python export.py ckpt=runs/coco/... format=onnx nms=true
    python export.py ckpt=runs/coco/... format=torch dynamic_batch=true image_size=[384,640]
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
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conf.answers.help import own_version
from conf.api.calls import callable_from_python
from conf.build.network import TrainedNetwork, open_detector
from conf.failures import ConfigError
from conf.schema_inference import ExportConfig, ExportFormat
from data.formats.drawn.shapes import draw_image
from data.samples.letterbox import letterbox
from models.export.check import Comparison, check_onnx, check_torch
from models.export.files import DynamicAxes, output_names, write_onnx, write_torch
from models.export.graph import DetectorGraph, FixedSuppression
from train_utils.run.checkpoint_files import FOLDER

SUFFIXES = {ExportFormat.onnx: ".onnx", ExportFormat.torch: ".pt2"}
EXTRA = ("onnx", "onnxscript", "onnxruntime")
DRAWN_SIDE = 160  # least side in pixels: smaller pictures have no room for objects
MEANING = {
    "images": "RGB, 0..1, turned upright as EXIF tags say",
    "boxes_xyxy": "x1, y1, x2, y2 in pixels of the input",
    "boxes": "x1, y1, x2, y2 in pixels of the input; best first, zeros after the last",
    "scores": "objectness times class probability",
    "classes": "positions in the list of names",
    "counts": "detections of each image",
}


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
    height, width = size = image_size(sides, detector)
    print(f"{detector.note}; {height} x {width} pixels (height x width)", flush=True)
    suppression = None
    if config.nms:
        suppression = FixedSuppression(config.confidence, config.nms_iou, config.max_detections, config.candidates)
    graph = DetectorGraph(detector.model, suppression, show_candidates=config.format == ExportFormat.onnx)
    names = {0: "batch"} if config.dynamic_batch else {}
    dynamic = names | ({2: "height", 3: "width"} if config.dynamic_size else {})
    example = torch.zeros(config.batch_size, 3, height, width)
    values = describe_values(graph, example, dynamic)
    details = metadata(config, detector, size, values)
    batches = trial_batches(config, size, detector.model.max_stride)

    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    started = time.perf_counter()
    try:
        print(f"writing {out} ...", flush=True)
        if config.format == ExportFormat.onnx:
            write_onnx(graph, example, dynamic, config.opset, details, partial)
        else:
            write_torch(graph, example, dynamic, details, partial)
        written = time.perf_counter()
        print("comparing it with the network ...", flush=True)
        check = check_onnx if config.format == ExportFormat.onnx else check_torch
        comparison = check(partial, detector.model, graph, batches, config.tolerance)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)  # missing after the rename
    seconds = f"{written - started:.0f} s to write, {time.perf_counter() - written:.0f} s to check"
    print(f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB, {seconds}")
    print("\n".join(f"  {name:<11} {kind_and_shape}" for name, kind_and_shape in values.items()))
    print(agreement(comparison, batches, config.nms))
    print(usage(out, config, list(values), detector.model.max_stride), flush=True)
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
    suffix = SUFFIXES[config.format]
    if config.out is not None:
        out = Path(config.out)
    elif given := config.ckpt or (config.model and config.model.weights):
        source = Path(given)
        out = (source / FOLDER / "best" if source.is_dir() else source).with_suffix(suffix)
    else:
        raise ConfigError("no weights are given. fix: ckpt=<run folder or .pt file>, or model= and model.weights=")
    if out.suffix != suffix:
        fix = f"out={out.with_suffix(suffix)}"
        raise ConfigError(f"out={out} does not end in {suffix}, as format={config.format} does. fix: {fix}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out} cannot be written. fix: out=<file in an existing folder that you may write to>")
    return out


def describe_values(graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes) -> dict[str, str]:
    """The type, shape and meaning of the file's input and outputs, by name."""

    def described(name: str, value: Tensor, axes: DynamicAxes) -> str:
        shape = ", ".join(axes.get(axis, str(length)) for axis, length in enumerate(value.shape))
        return f"{str(value.dtype).removeprefix('torch.')} ({shape})  {MEANING[name]}"

    axes = {axis: name for axis, name in dynamic.items() if axis == 0}
    if 2 in dynamic and graph.suppression is None:
        axes[1] = "n"
    outputs = {
        name: described(name, value, axes)
        for name, value in zip(output_names(graph), graph(example), strict=True)
        if name in MEANING
    }
    return {"images": described("images", example, dynamic), **outputs}


def metadata(
    config: ExportConfig, detector: TrainedNetwork, size: tuple[int, int], values: dict[str, str]
) -> dict[str, str]:
    """The metadata of the file, with lists and numbers as JSON."""
    known = {
        "made_by": own_version(),
        "names": json.dumps(detector.names, ensure_ascii=False),
        "image_size": json.dumps(size),  # height, width
        "strides": json.dumps([head.stride for head in detector.model.heads]),
        "stride": json.dumps(detector.model.max_stride),  # image sides must be multiples of it
        "open": json.dumps([*["batch"] * config.dynamic_batch, *["height", "width"] * config.dynamic_size]),
        "values": json.dumps(values),
    }
    if config.nms:
        keys = ("confidence", "nms_iou", "max_detections", "candidates")
        known["suppression"] = json.dumps({key: getattr(config, key) for key in keys})
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
    """Lines of Python that run the file.

    With a dynamic size they check that the sides are multiples of the stride: for others ONNX files
    may output wrong boxes.
    """
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
