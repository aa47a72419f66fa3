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

    raise SystemExit(conf.cli.program.start("export"))

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

import data
from conf import ConfigError, schema
from conf.cli import help, program
from conf.cli.run_files import CHECKPOINTS, refuse_existing
from conf.errors import install_command
from data.errors import printable
from data.geometry import PAD_VALUE
from data.shapes import draw_image
from eval import Evaluator, class_numbers
from models import ModelError
from models import export as exporting
from models.quantise import quantise
from train_utils import bootstrap, build, coco_eval, distributed
from train_utils.inference import open_checkpoint

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": ONNX_PACKAGES, "openvino": (*ONNX_PACKAGES, "openvino"), "torch": ()}
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
MAX_DROP = {"float32": 0.005, "float16": 0.005, "int8": 0.02}  # AP
RESAMPLES = 500  # of the validation images, for the interval of a loss
DRAWN_SIDE = 320  # pixels
MIN_CANDIDATES = 1000  # how many boxes of an image, best first, enter suppression at least


@program.callable_from_python("export")
def export(config: schema.ExportConfig) -> Path:
    """Write and check a file as configured, and return its path.

    Raises ConfigError if packages are missing or options do not fit, and ModelError if the weights
    do not fit or the file differs from the network.
    """
    packages = PACKAGES[config.format.value]
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"format={config.format} needs {', '.join(missing)}. fix: {install_command(*missing)}")
    out = output_path(config, SUFFIXES[config.format.value])
    for file in files_of(out):
        refuse_existing(file, "out")
    detector = open_checkpoint.open_detector(config.ckpt, config.model, config.names, config.image_size)
    height, width = data.both_sides(detector.image_size)
    print(f"{detector.note}; {height} x {width} pixels (height x width)", flush=True)
    suppression = None
    if config.nms:
        candidates = max(MIN_CANDIDATES, config.max_detections)
        suppression = exporting.FixedSuppression(config.confidence, config.nms_iou, config.max_detections, candidates)
    graph = exporting.DetectorGraph(
        detector.model, suppression, show_candidates=out.suffix == ".onnx", half=config.precision.value == "float16"
    )
    dynamic = {0: "batch"} if config.dynamic_batch else {}
    dynamic |= {2: "height", 3: "width"} if config.dynamic_size else {}
    details = metadata(config, detector, (height, width), list(dynamic.values()))
    shape = config.batch_size, height, width
    more = detector.model.max_stride * config.dynamic_size
    other = config.batch_size + config.dynamic_batch, height + 2 * more, width + more

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as workplace:
        partial = Path(workplace) / out.name
        print(f"writing {out} ...", flush=True)
        example = torch.zeros(config.batch_size, 3, height, width)
        if config.format is schema.ExportFormat.torch:
            exporting.write_torch(graph, example, dynamic, details, partial)
        else:
            exporting.write_onnx(graph, example, dynamic, details, onnx := partial.with_suffix(".onnx"))
            if config.precision is schema.ExportPrecision.int8:
                quantise(onnx, calibration_batches(config, (height, width)), config.symmetric)
            if out.suffix == ".xml":
                exporting.write_openvino(onnx, details, partial)
        print("comparing it with the network ...", flush=True)
        batches = trial_batches([shape, other] if dynamic else [shape])
        tolerance = exporting.TOLERANCE if config.precision is schema.ExportPrecision.float32 else math.inf
        boxes, scores = exporting.check_file(partial, detector.model, graph, batches, tolerance)
        if config.check is schema.ExportCheck.ap:
            exporting.add_metadata(partial, {"scored": json.dumps(score(config, detector, partial))})
        for written, file in zip(files_of(partial), files_of(out), strict=True):
            os.replace(written, file)
    unknown = "" if config.check is schema.ExportCheck.ap else "; check=ap tells its AP"
    print(
        f"wrote {out}: {sum(file.stat().st_size for file in files_of(out)) / 1e6:.1f} MB; on drawn pictures, noise and "
        f"black its boxes differ from the network's by up to {boxes:.1e} of the image size and its scores by up to "
        f"{scores:.1e}{unknown}",
        flush=True,
    )
    return out


def files_of(out: Path) -> list[Path]:
    """The files that an export writes: of OpenVINO two."""
    return [out.with_suffix(".bin"), out] if out.suffix == ".xml" else [out]


def calibration_batches(config: schema.ExportConfig, size: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Batches of ``config.calibration`` training images, spread over the set: float32 in 0..1."""
    assert config.data is not None  # of the checkpoint, or conf has refused it
    train_set = data.open_annotations(config.data, "train")
    images = data.EvalDataset(train_set, data.ImageSource(train_set, config.data.on_error), config.evaluate.resize)
    count = min(len(train_set), config.calibration)
    spread = np.linspace(0, len(train_set) - 1, count, dtype=int)
    whole = np.resize(spread, count + -count % config.batch_size)  # images again, which changes no range, fill a batch
    requests = [data.Request(index, *size, 0) for index in whole.tolist()]
    print(f"int8: the ranges of values are those on {count} images of {config.data.name}, train", flush=True)
    for start in range(0, len(requests), config.batch_size):
        yield images.__getitems__(requests[start : start + config.batch_size]).network_input()


def score(config: schema.ExportConfig, detector: open_checkpoint.TrainedNetwork, path: Path) -> dict[str, Any]:
    """Score a file and its network on the same validation images, and say so.

    Returns what the file's metadata say about it. Raises ModelError if the file loses more AP than
    ``max_drop``.
    """
    assert config.data is not None
    world = distributed.init_distributed_mode("cpu", timeout_seconds=60)
    val_set = build.open_split(config.data, "val", world)
    options = replace(config.evaluate, rect=config.evaluate.rect and config.dynamic_size)
    if config.nms:
        limits = {key: getattr(config, key) for key in ("confidence", "nms_iou", "max_detections")}
        options = replace(options, **limits)
        options.multi_label = False
    scored: list[coco_eval.Evaluation] = []
    for name, model in (("network", detector.model), ("file", open_checkpoint.open_checkpoint(str(path)).model)):
        evaluator = Evaluator(
            val_set, options, image_size=detector.image_size, model=model, data_options=config.data, world=world,
            classes=class_numbers(detector, val_set, world),
        )  # fmt: skip
        evaluation = evaluator(model, print)
        assert evaluation is not None  # on rank 0
        scored.append(evaluation)
        row = f"AP {evaluation.metrics['AP']:.4f}, AP50 {evaluation.metrics['AP50']:.4f}"
        best, threshold = (coco_eval.format_metric(evaluation.at_best_f1[key]) for key in ("f1", "threshold"))
        print(f"{name}: {row}, best F1 {best} at threshold {threshold}", flush=True)
    gain = bootstrap.gain(scored[:1], scored[1:], RESAMPLES, seed=0)
    print(f"file against network: {gain.sentence()}", flush=True)
    before, after = (evaluation.metrics["AP"] for evaluation in scored)
    thresholds = [evaluation.at_best_f1["threshold"] for evaluation in scored]
    limit = MAX_DROP[config.precision.value] if config.max_drop is None else config.max_drop
    if before - after > limit:
        raise ModelError(
            f"the file has {after:.4f} AP, the network {before:.4f}, and max_drop={limit:g} allows no such loss. fix: "
            f"precision=float16, more calibration images, or max_drop={math.ceil((before - after) * 100) / 100:g}"
        )
    return {
        "data": config.data.name, "images": len(val_set), "AP": after, "AP50": scored[1].metrics["AP50"],
        "threshold": thresholds[1], "AP_of_network": before, "threshold_of_network": thresholds[0],
        "interval_of_difference": [gain.low, gain.high], "confidence": options.confidence, "nms_iou": options.nms_iou,
    }  # fmt: skip


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
        "batch_size": config.batch_size,
        "precision": config.precision.value,
        "resize": config.evaluate.resize.value,
        "padding": PAD_VALUE,  # grey around a letterboxed image, which lies in the middle
        "licence": config.licence,  # of the weights
    }
    if config.nms:
        facts["suppression"] = {key: getattr(config, key) for key in ("confidence", "nms_iou", "max_detections")}
    texts = {key: json.dumps(value) for key, value in facts.items()}
    return {"made_by": help.own_version(), "origin": printable(detector.origin), **texts}
