"""Write a trained detector as a file for other programs.

    python export.py ckpt=runs/coco/... format=onnx nms=true
    python export.py ckpt=runs/coco/... format=openvino precision=int8 check=ap   # states its AP
    python export.py ckpt=runs/coco/... format=torch dynamic_batch=true image_size=[384,640]
    python export.py model=yolov3-spp model.weights=yolov3-spp.weights

The program runs the file and compares it with the network before it gives the file its name.
Everything runs on the CPU.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.cli.program

    raise SystemExit(conf.cli.program.start("export"))  # tab completion asks for: @hydra.main

import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

import data
from conf import ConfigError, install_command
from conf.cli import launch, program
from conf.cli.run_files import SUFFIXES, exported_beside, refuse_existing
from conf.schema import ExportCheck, ExportConfig, ExportFormat, ExportPrecision
from data.errors import printable
from data.geometry import PAD_VALUE
from data.progress import counted, log
from data.shapes import draw_image
from models import ModelError
from models import export as exporting
from models.export import TOLERANCE, DetectorGraph, FixedSuppression
from models.quantise import quantise
from train_utils import bootstrap, build, coco_eval, distributed
from train_utils.evaluator import score_network
from train_utils.inference.open_checkpoint import TrainedNetwork, open_checkpoint, open_detector

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": ONNX_PACKAGES, "openvino": (*ONNX_PACKAGES, "openvino"), "torch": ()}
MAX_DROP = {"float32": 0.005, "float16": 0.005, "int8": 0.02}  # AP
RESAMPLES = 500  # of the validation images, for the interval of a loss
DRAWN_SIDE = 320  # pixels
MIN_CANDIDATES = 1000  # how many boxes of an image, best first, enter suppression at least
LIMITS = ("confidence", "nms_iou", "max_detections")  # of suppression in the file


@program.callable_from_python("export")
def export(config: ExportConfig) -> Path:
    """Write and check a file as configured, and return its path.

    Raises ConfigError if packages are missing or options do not fit, and ModelError if the weights
    do not fit or the file differs from the network.
    """
    missing = [name for name in PACKAGES[config.format.value] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"format={config.format} needs {', '.join(missing)}", install_command(*missing))
    out = output_path(config, SUFFIXES[config.format.value])
    for file in files_of(out):
        refuse_existing(file, "out")
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size)
    height, width = data.both_sides(detector.image_size)
    log.info(f"{detector.note}; {height} x {width} pixels (height x width)")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as workplace:
        partial = Path(workplace) / out.name
        log.info(f"writing {out} ...")
        graph = write(config, detector, (height, width), partial)
        log.info("comparing it with the network ...")
        shapes = [(config.batch_size, height, width)]
        if config.dynamic_batch or config.dynamic_size:
            more = detector.model.max_stride if config.dynamic_size else 0
            shapes.append((config.batch_size + config.dynamic_batch, height + 2 * more, width + more))
        tolerance = TOLERANCE if config.precision is ExportPrecision.float32 else math.inf
        boxes, scores = exporting.check_file(partial, detector.model, graph, trial_batches(shapes), tolerance)
        if config.check is ExportCheck.ap:
            exporting.add_metadata(partial, {"scored": json.dumps(score(config, detector, partial))})
        for written, file in zip(files_of(partial), files_of(out), strict=True):
            os.replace(written, file)
    megabytes = sum(file.stat().st_size for file in files_of(out)) / 1e6
    unknown = "" if config.check is ExportCheck.ap else "; check=ap tells its AP"
    log.info(
        f"wrote {out}: {megabytes:.1f} MB; on drawn pictures, noise and black its boxes differ from "
        f"the network's by up to {boxes:.1e} of the image size and its scores by up to {scores:.1e}{unknown}"
    )
    return out


def write(config: ExportConfig, detector: TrainedNetwork, size: tuple[int, int], path: Path) -> DetectorGraph:
    """Write the file for images of ``size`` (height, width), and return what it computes."""
    suppression = None
    if config.nms:
        candidates = max(MIN_CANDIDATES, config.max_detections)
        suppression = FixedSuppression(config.confidence, config.nms_iou, config.max_detections, candidates)
    is_half = config.precision is ExportPrecision.float16
    graph = DetectorGraph(detector.model, suppression, show_candidates=path.suffix == ".onnx", half=is_half)
    dynamic: dict[int, str] = {}
    if config.dynamic_batch:
        dynamic[0] = "batch"
    if config.dynamic_size:
        dynamic |= {2: "height", 3: "width"}
    details = metadata(config, detector, size, list(dynamic.values()))
    example = torch.zeros(config.batch_size, 3, *size)
    if config.format is ExportFormat.torch:
        exporting.write_torch(graph, example, dynamic, details, path)
        return graph
    onnx = path.with_suffix(".onnx")
    exporting.write_onnx(graph, example, dynamic, details, onnx)
    if config.precision is ExportPrecision.int8:
        quantise(onnx, calibration_batches(config, size), config.symmetric)
    if config.format is ExportFormat.openvino:
        exporting.write_openvino(onnx, details, path)
    return graph


def files_of(out: Path) -> list[Path]:
    """The files that an export writes: of OpenVINO two."""
    return [out.with_suffix(".bin"), out] if out.suffix == ".xml" else [out]


def calibration_batches(config: ExportConfig, size: tuple[int, int]) -> Iterator[Tensor]:
    """Batches of ``config.calibration`` training images, spread over the set: float32 in 0..1."""
    assert config.data is not None  # of the checkpoint, or conf has refused it
    train_set = data.open_annotations(config.data, "train")
    images = data.EvalDataset(train_set, data.ImageSource(train_set, config.data.on_error), config.evaluate.resize)
    count = min(len(train_set), config.calibration)
    log.info(f"int8: the ranges of values are those on {counted(count, 'image')} of {config.data.name}, train")
    spread = np.linspace(0, len(train_set) - 1, count, dtype=int)
    whole = math.ceil(count / config.batch_size) * config.batch_size  # the first ones come again
    requests = [data.Request(index, *size, 0) for index in np.resize(spread, whole).tolist()]
    for start in range(0, whole, config.batch_size):
        yield images.__getitems__(requests[start : start + config.batch_size]).network_input()


def score(config: ExportConfig, detector: TrainedNetwork, path: Path) -> dict[str, Any]:
    """Score file and network on the same images for the metadata; ModelError over ``max_drop``."""
    assert config.data is not None
    world = distributed.init_distributed_mode("cpu", timeout_seconds=60)
    val_set = build.open_split(config.data, "val", world)
    rect = config.evaluate.rect and config.dynamic_size
    options = replace(config.evaluate, rect=rect, image_size=detector.image_size)
    if config.nms:
        options = replace(options, **{key: getattr(config, key) for key in LIMITS})
        options.multi_label = options.merge_nms = False  # as the file suppresses
    as_file = replace(config, evaluate=options)
    scored: list[coco_eval.Evaluation] = []
    log.info(f"at confidence {options.confidence:g} (eval.py: {config.evaluate.confidence:g})")
    for name, network in (("network", detector), ("file", open_checkpoint(str(path)))):
        evaluation = score_network(as_file, network, val_set, world)
        assert evaluation is not None  # on rank 0
        scored.append(evaluation)
        best, threshold = (coco_eval.format_metric(evaluation.at_best_f1[key]) for key in ("f1", "threshold"))
        row = f"AP {evaluation.metrics['AP']:.4f}, AP50 {evaluation.metrics['AP50']:.4f}"
        log.info(f"{name}: {row}, best F1 {best} at threshold {threshold}")
    gain = bootstrap.gain(scored[:1], scored[1:], RESAMPLES, seed=0)
    log.info(f"file against network: {gain.sentence()}")
    before, after = (evaluation.metrics["AP"] for evaluation in scored)
    thresholds = [evaluation.at_best_f1["threshold"] for evaluation in scored]
    limit = MAX_DROP[config.precision.value] if config.max_drop is None else config.max_drop
    if before - after > limit:
        raise ModelError(
            f"the file has {after:.4f} AP, the network {before:.4f}, and max_drop={limit:g} allows no such loss",
            f"precision=float16, more calibration images, or max_drop={math.ceil((before - after) * 100) / 100:g}",
        )
    return {
        "data": config.data.name,
        "images": len(val_set),
        "AP": after,
        "AP50": scored[1].metrics["AP50"],
        "threshold": thresholds[1],
        "AP_of_network": before,
        "threshold_of_network": thresholds[0],
        "interval_of_difference": [gain.low, gain.high],
        "confidence": options.confidence,
        "nms_iou": options.nms_iou,
    }


def trial_batches(shapes: Sequence[tuple[int, int, int]]) -> Iterator[Tensor]:
    """For each shape (count, height, width) a batch each of drawn pictures, noise and black."""
    generator = np.random.default_rng(0)
    for count, height, width in shapes:
        drawn = [cv2.resize(draw_image(DRAWN_SIDE, generator).image, (width, height)) for _ in range(count)]
        yield torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous() / 255
        yield torch.from_numpy(generator.random((count, 3, height, width), dtype=np.float32))
        yield torch.zeros(count, 3, height, width)


def output_path(config: ExportConfig, suffix: str) -> Path:
    """The file to write: ``out``, or the name of the weights with the format's ``suffix``."""
    weights = config.ckpt or (config.model and config.model.weights)
    out = Path(config.out) if config.out is not None else exported_beside(str(weights), config.format.value)
    if out.suffix != suffix:
        fix = f"out={out.with_suffix(suffix)}"
        raise ConfigError(f"out={out} does not end in {suffix}, as format={config.format} does", fix)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", "out=<file>")
    return out


def metadata(
    config: ExportConfig, detector: TrainedNetwork, size: tuple[int, int], open_axes: list[str]
) -> dict[str, str]:
    """What the file says about itself, as texts in JSON."""
    facts = {
        "names": detector.names,
        "category_ids": detector.category_ids,
        "image_size": size,  # height, width
        "stride": detector.model.max_stride,  # image sides must be multiples of it
        "open": open_axes,
        "batch_size": config.batch_size,
        "precision": config.precision.value,
        "resize": config.evaluate.resize.value,
        "rect": config.evaluate.rect,
        "exif": detector.exif,
        "padding": PAD_VALUE,  # grey around a letterboxed image, which lies in the middle
        "licence": config.licence,  # of the weights
    }
    if config.nms:
        facts["suppression"] = {key: getattr(config, key) for key in LIMITS}
    texts = {key: json.dumps(value) for key, value in facts.items()}
    return {"made_by": launch.versions()[0], "origin": printable(detector.origin), **texts}
