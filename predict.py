r"""Detect objects in pictures, videos and streams of your own.

    python predict.py ckpt=runs/quickstart/... source=pictures
    python predict.py ckpt=runs/coco/... "source=pictures/**/*.jpg" out=found confidence=0.4
    python predict.py model=yolov4 model.weights=yolov4.weights names=coco.names \
        source=street.mp4 resize=stretch
    python predict.py ckpt=runs/coco/... source=0         # a camera

The results are in runs/predict/<date_time>/: pictures with boxes, detections.json, images.json and
labels/*.txt. Ctrl-C ends a prediction, with what was found so far in whole files.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("predict")
    raise SystemExit

import signal
import sys
import time
from pathlib import Path

from conf.api.calls import callable_from_python
from conf.api.detector import Detector
from conf.build.network import open_detector
from conf.build.predictor import Predictor
from conf.build.results import ResultWriter, counted
from conf.failures import ConfigError
from conf.schema_inference import PredictConfig
from data import FrameBatches, find_media
from train_utils.distributed import init_distributed_mode
from train_utils.launch.environment import peek_world_size
from train_utils.loop.stop_and_save import StopRequest
from train_utils.run.run_folder import dated_folder, open_folder
from train_utils.terminal.progress import Progress

__all__ = ["Detector", "predict"]


@callable_from_python("predict")
def predict(config: PredictConfig) -> Path:
    """Detect as configured and return the folder with the results.

    Raises ConfigError if it is one of several processes, and the errors of the parts for an empty
    source, weights that do not fit and unreadable files. After a signal that ends it early, what
    was found is written; then it exits with 128 + signal.
    """
    if peek_world_size() > 1:
        raise ConfigError(
            f"predict.py runs in one process, but {peek_world_size()} were started. fix: start it without a launcher; "
            "for several GPUs start it once per GPU, each with a part of the source"
        )
    world = init_distributed_mode(config.device.value, timeout_seconds=60)
    media = find_media(config.source)
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size)
    predictor = Predictor(config, detector, world.device)
    out = Path(config.out) if config.out is not None else dated_folder("predict")
    with StopRequest() as stop:
        frames = predictor.frames(media)
        total = frames.count()
        writer = ResultWriter(
            media, detector, out, config.workers,
            draw=config.draw, save_json=config.save_json, save_txt=config.save_txt, save_crops=config.save_crops,
            verbose=config.verbose,
        )  # fmt: skip
        open_folder(world, out, "out")
        print(f"{detector.note}; {detector.image_size} pixels on {world.device.type}", flush=True)
        started = time.perf_counter()
        with Progress(total, "predict", enabled=not config.verbose) as progress, writer.drawn:
            for frame, found in predictor.found(frames):
                writer.add(frame, found)
                progress.at(writer.num_images, lambda: {"found": str(writer.counts.total())})
                if stop.signal is not None:
                    break
        writer.close()
        print(summary(writer, frames, predictor, time.perf_counter() - started), flush=True)
        stopped_by = stop.signal
        if stopped_by == signal.SIGINT:
            stop.signal = None  # answered here
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name}: the rest of the source is not in there", file=sys.stderr)
        sys.exit(128 + stopped_by)
    return out


def summary(writer: ResultWriter, frames: FrameBatches, predictor: Predictor, seconds: float) -> str:
    """The last lines of output. Reading and network overlap: their times may exceed the total."""
    count, found = writer.num_images, writer.counts.total()
    total, reading, inference = (1000 * part / max(1, count) for part in (seconds, frames.seconds, predictor.seconds))
    left_out = f", {len(frames.skipped)} files left out" if frames.skipped else ""
    turned = f", {writer.turned} turned upright by their EXIF tag" if writer.turned else ""
    by_class = f"{counted(writer.counts)}\n" if found else ""
    return (
        f"{by_class}{count} images, {found} detections{left_out}{turned}, in {writer.out}; ms per image:"
        f" {total:.1f} in total; in parallel threads {reading:.1f} reading, {inference:.1f} network and NMS"
    )
