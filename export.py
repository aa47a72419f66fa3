"""Write a trained detector as a file for other programs.

    python export.py ckpt=runs/coco/... format=onnx nms=true
    python export.py ckpt=runs/coco/... format=torch dynamic_batch=true image_size=[384,640]
    python export.py model=yolov3-spp model.weights=yolov3-spp.weights

The program runs the file and compares it with the network before it gives the file its name.
Everything runs on the CPU.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.run

    raise SystemExit(conf.run.run("export"))

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

import data
from conf import ConfigError, help, run, schema
from conf.errors import install_command
from conf.run_files import CHECKPOINTS, refuse_existing
from data.errors import printable
from data.shapes import draw_image
from models.export import DetectorGraph, FixedSuppression, check_file, write_onnx, write_torch
from train_utils import open_checkpoint

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DRAWN_SIDE = 320  # pixels
MIN_CANDIDATES = 1000  # how many boxes of an image, best first, enter suppression at least


@run.callable_from_python("export")
def export(config: schema.ExportConfig) -> Path:
    """Write and check a file as configured, and return its path.

    Raises ConfigError if packages are missing or options do not fit, and ModelError if the weights
    do not fit or the file differs from the network.
    """
    is_onnx = config.format == schema.ExportFormat.onnx
    if is_onnx and (missing := [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]):
        raise ConfigError(f"format=onnx needs {', '.join(missing)} installed. fix: {install_command(*missing)}")
    out = output_path(config, ".onnx" if is_onnx else ".pt2")
    refuse_existing(out, "out")
    detector = open_checkpoint.open_detector(config.ckpt, config.model, config.names, config.image_size)
    model = detector.model
    height, width = data.both_sides(detector.image_size)
    print(f"{detector.note}; {height} x {width} pixels (height x width)", flush=True)
    suppression = None
    if config.nms:
        candidates = max(MIN_CANDIDATES, config.max_detections)
        suppression = FixedSuppression(config.confidence, config.nms_iou, config.max_detections, candidates)
    graph = DetectorGraph(model, suppression, show_candidates=is_onnx)
    dynamic = {0: "batch"} if config.dynamic_batch else {}
    dynamic |= {2: "height", 3: "width"} if config.dynamic_size else {}
    details = metadata(config, detector, (height, width), list(dynamic.values()))
    shape = config.batch_size, height, width
    more = model.max_stride * config.dynamic_size
    other = config.batch_size + config.dynamic_batch, height + 2 * more, width + more

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as workplace:
        partial = Path(workplace) / out.name
        print(f"writing {out} ...", flush=True)
        write = write_onnx if is_onnx else write_torch
        write(graph, torch.zeros(shape[0], 3, height, width), dynamic, details, partial)
        print("comparing it with the network ...", flush=True)
        boxes, scores = check_file(partial, model, graph, trial_batches([shape, other] if dynamic else [shape]))
        os.replace(partial, out)
    print(
        f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB; on drawn pictures, noise and black its boxes differ from the "
        f"network's by up to {boxes:.1e} of the image size and its scores by up to {scores:.1e}",
        flush=True,
    )
    return out


def trial_batches(shapes: Sequence[tuple[int, int, int]]) -> Iterator[torch.Tensor]:
    """For each shape (count, height, width) a batch each of drawn pictures, noise and black."""
    generator = np.random.default_rng(0)
    for count, height, width in shapes:
        drawn = [cv2.resize(draw_image(DRAWN_SIDE, generator).image, (width, height)) for _ in range(count)]
        yield torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous() / 255
        yield torch.from_numpy(generator.random((count, 3, height, width), dtype=np.float32))
        yield torch.zeros(count, 3, height, width)


def output_path(config: schema.ExportConfig, suffix: str) -> Path:
    """The file to write: ``out``, or the name of the weights with the format's ``suffix``.

    Raises ConfigError without weights, and if ``out`` has another suffix or is a folder.
    """
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
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. fix: out=<file>")
    return out


def metadata(
    config: schema.ExportConfig, detector: open_checkpoint.TrainedNetwork, size: tuple[int, int], open_axes: list[str]
) -> dict[str, str]:
    """What the file says about itself, as texts in JSON."""
    facts = {
        "names": detector.names,
        "category_ids": detector.category_ids,
        "image_size": size,  # height, width
        "stride": detector.model.max_stride,  # image sides must be multiples of it
        "open": open_axes,
    }
    if config.nms:
        facts["suppression"] = {key: getattr(config, key) for key in ("confidence", "nms_iou", "max_detections")}
    texts = {key: json.dumps(value) for key, value in facts.items()}
    return {"made_by": help.own_version(), "origin": printable(detector.origin), **texts}
