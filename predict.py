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

from conf.api.detector import Detector
from conf.build.network import open_detector
from conf.build.predictor import Predictor
from conf.build.results import ResultWriter, counted
from conf.failures import ConfigError
from conf.programs import callable_from_python
from conf.schema import PredictConfig
from data import find_media
from train_utils.distributed import init_distributed_mode
from train_utils.launch import read_launch
from train_utils.progress import Progress
from train_utils.run_folder import dated_folder, open_folder
from train_utils.stop import StopRequest

__all__ = ["Detector", "predict"]


@callable_from_python("predict")
def predict(config: PredictConfig) -> Path:
    """Detect as configured and return the folder with the results.

    Raises ConfigError if it is one of several processes, and the errors of the parts for an empty
    source, weights that do not fit and unreadable files. After a signal that ends it early, what
    was found is written; then it exits with 128 + signal.
    """
    if (processes := read_launch().world_size) > 1:
        raise ConfigError(
            f"predict.py runs in one process, but {processes} were started. fix: start it without a launcher; "
            "for several GPUs start it once per GPU, each with a part of the source"
        )
    world = init_distributed_mode(config.device.value, timeout_seconds=60)
    media = find_media(config.source)
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size)
    predictor = Predictor(config, detector, world.device)
    frames = predictor.frames(media)
    total = frames.count()
    out = Path(config.out) if config.out is not None else dated_folder("predict")
    writer = ResultWriter(media, detector, out, config.draw, config.save_json, config.save_txt)
    open_folder(world, out, "out")
    print(f"{detector.note}; {detector.image_size} pixels on {world.device.type}", flush=True)
    started = time.perf_counter()
    with StopRequest() as stop:
        with Progress(total, "predict", enabled=True) as progress, writer.drawn:
            for frame, found in predictor.found(frames):
                writer.add(frame, found)
                progress.at(writer.num_images, lambda: {"found": str(writer.counts.total())})
                if stop.signal is not None:
                    break
        writer.close()
        stopped_by = stop.signal
        if stopped_by == signal.SIGINT:
            stop.signal = None  # answered here
    milliseconds = 1000 * (time.perf_counter() - started) / max(1, writer.num_images)
    left_out = f", {len(frames.skipped)} files left out" if frames.skipped else ""
    print(counted(writer.counts) or "nothing found")
    print(
        f"{writer.num_images} images, {writer.counts.total()} detections{left_out}, in {out}; "
        f"{milliseconds:.1f} ms per image",
        flush=True,
    )
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name}: the rest of the source is not in there", file=sys.stderr)
        sys.exit(128 + stopped_by)
    return out
