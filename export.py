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
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conf.failures import ConfigError
from conf.help import own_version
from conf.network import TrainedNetwork, open_detector
from conf.programs import callable_from_python
from conf.schema import SUFFIXES, ExportConfig, ExportFormat
from data.geometry import letterbox
from data.shapes import draw_image
from models import Darknet
from models.export import (
    BOXES,
    DETECTIONS,
    DetectorGraph,
    FixedSuppression,
    check_onnx,
    check_torch,
    write_onnx,
    write_torch,
)
from train_utils.files import CHECKPOINTS

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
    network = open_detector(config.ckpt, config.model, config.names, config.image_size and max(sides))
    model = network.model
    assert isinstance(model, Darknet), "conf/checkpoints.py refuses exported files"
    height, width = size = image_size(sides, network)
    print(f"{network.note}; {height} x {width} pixels (height x width)", flush=True)
    suppression = None
    if config.nms:
        suppression = FixedSuppression(config.confidence, config.nms_iou, config.max_detections, config.candidates)
    graph = DetectorGraph(model, suppression, show_candidates=config.format == ExportFormat.onnx)
    names = {0: "batch"} if config.dynamic_batch else {}
    dynamic = names | ({2: "height", 3: "width"} if config.dynamic_size else {})
    example = torch.zeros(config.batch_size, 3, height, width)
    details = metadata(config, network, size, list(dynamic.values()))
    batches = trial_batches(config, size, model.max_stride)

    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as workplace:
        partial = Path(workplace) / out.name
        print(f"writing {out} ...", flush=True)
        if config.format == ExportFormat.onnx:
            write_onnx(graph, example, dynamic, config.opset, details, partial)
        else:
            write_torch(graph, example, dynamic, details, partial)
        print("comparing it with the network ...", flush=True)
        check = check_onnx if config.format == ExportFormat.onnx else check_torch
        boxes, scores = check(partial, model, graph, batches, config.tolerance)
        os.replace(partial, out)
    print(
        f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB; on drawn pictures, noise and black its boxes are within "
        f"{boxes:.1e} of the image size and its scores within {scores:.1e} of the network's"
    )
    print(usage(out, config, model.max_stride), flush=True)
    return out


def image_size(sides: Sequence[int | None], network: TrainedNetwork) -> tuple[int, int]:
    """Height and width: ``sides`` if given, else the network's. ConfigError if they do not fit."""
    height, width = (side or network.image_size for side in sides)
    if (fits := network.model.nearest_size(height, width)) != (height, width):
        raise ConfigError(
            f"image_size=[{height},{width}] is not a multiple of the network's stride {network.model.max_stride}."
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
        stacked = np.stack([letterbox(picture, (height, width))[0] for picture in pictures])
        return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous() / 255

    def noise(count: int, height: int, width: int) -> Tensor:
        return torch.from_numpy(generator.random((count, 3, height, width), dtype=np.float32))

    shape = (config.batch_size, *size)
    batches = [drawn(*shape), noise(*shape), torch.zeros(shape[0], 3, *size)]
    if config.dynamic_batch or config.dynamic_size:
        more = stride * config.dynamic_size
        other = shape[0] + config.dynamic_batch, size[0] + 2 * more, size[1] + more
        batches.append((drawn(*other) + noise(*other)) / 2)
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
    elif weights := config.ckpt or (config.model and config.model.weights):
        source = Path(weights)
        out = (source / CHECKPOINTS / "best" if source.is_dir() else source).with_suffix(suffix)
    else:
        raise ConfigError("no weights are given. fix: ckpt=<run folder or .pt file>, or model= and model.weights=")
    if out.suffix != suffix:
        fix = f"out={out.with_suffix(suffix)}"
        raise ConfigError(f"out={out} does not end in {suffix}, as format={config.format} does. fix: {fix}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out} cannot be written. fix: out=<file in an existing folder that you may write to>")
    return out


def metadata(
    config: ExportConfig, network: TrainedNetwork, size: tuple[int, int], open_axes: list[str]
) -> dict[str, str]:
    """What the file says about itself, as JSON; models/onnx_metadata.py reads it."""
    facts = {
        "names": network.names,
        "category_ids": network.category_ids,
        "image_size": size,  # height, width
        "stride": network.model.max_stride,  # image sides must be multiples of it
        "open": open_axes,
    }
    if config.nms:
        limits = "confidence", "nms_iou", "max_detections", "candidates"
        facts["suppression"] = {key: getattr(config, key) for key in limits}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()}
    return {"made_by": own_version(), "origin": network.origin, **texts}


def usage(out: Path, config: ExportConfig, stride: int) -> str:
    """Lines of Python that run the file."""
    outputs = ", ".join(DETECTIONS if config.nms else BOXES)
    images = "# images: float32 (batch, 3, height, width), RGB, 0..1, letterboxed"
    if config.dynamic_size:
        images += f"; height and width multiples of {stride}"  # for others ONNX files may output wrong boxes
    if config.format == ExportFormat.onnx:
        lines = [
            f"import onnxruntime; session = onnxruntime.InferenceSession({str(out)!r})",
            f'{outputs} = session.run(None, {{"images": images}})  # a numpy array',
        ]
    else:
        lines = [
            f"import torch, torchvision; detector = torch.export.load({str(out)!r}).module()",
            f"{outputs} = detector(images)  # a tensor",
        ]
    return "\n".join(["run it:", *(f"  {line}" for line in [images, *lines])])
