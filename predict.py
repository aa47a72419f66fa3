r"""Detect objects in your pictures, videos and streams.

    python predict.py ckpt=runs/quickstart/... source=pictures
    python predict.py ckpt=runs/coco/... "source=pictures/**/*.jpg" out=found confidence=0.4
    python predict.py model=yolov4 model.weights=yolov4.weights names=coco.names \
        source=street.mp4 resize=stretch
    python predict.py ckpt=runs/coco/... source=0         # a camera

The results are in runs/predict/<date_time>/: pictures with boxes, detections.json, images.json and
labels/*.txt. Ctrl-C stops a prediction and writes what was found so far.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    import conf.cli.program

    raise SystemExit(conf.cli.program.start("predict"))  # tab completion asks for: @hydra.main

import sys
import time
from pathlib import Path

import torch

from conf import ConfigError, schema
from conf.cli import program
from data import count_frames, find_media
from data.progress import Progress, counted, log
from train_utils import distributed, run_folder
from train_utils.inference.detector import Detector, Predictor, ResultWriter, format_counts

__all__ = ["Detector", "predict"]


@program.callable_from_python("predict")
def predict(config: schema.PredictConfig) -> Path:
    """Detect as configured and return the folder with the results.

    A signal stops it: it writes the results, then exits with 128 + signal.
    """
    world = distributed.init_distributed_mode(config.device, timeout_seconds=60)
    if world.world_size > 1:
        raise ConfigError("predict.py runs in one process", "start it without a launcher, once for each GPU")
    media = find_media(config.source)
    predictor = Predictor(config, world.device)
    frames = predictor.frames(media, config.on_error)
    out = run_folder.open_out(world, config.out, "predict")
    writer = ResultWriter(media, predictor, out)
    log.info(f"{predictor.network.note}; {predictor.network.image_size} pixels on {world.device.type}")
    # Images under way together finish at once, so only those after them tell the pace.
    passes = torch.get_num_threads() if world.device.type == "cpu" else 1
    together = max(frames.threads, frames.batch_size * passes)
    since = 0.0
    with distributed.StopRequest() as stop:
        with Progress(count_frames(media), "predict", enabled=True) as progress, writer.drawn:
            for prediction in predictor.predict(frames):
                writer.add(prediction)
                if writer.num_images == together:
                    since = time.perf_counter()
                progress.at(writer.num_images, lambda: {"found": str(writer.counts.total())})
                if stop.signal is not None:
                    break
        writer.close()
        pace = ""
        if writer.num_images >= 2 * together:
            milliseconds = 1000 * (time.perf_counter() - since) / (writer.num_images - together)
            pace = f"; {milliseconds:.1f} ms per image"
        left_out = f", {counted(len(frames.skipped), 'file')} left out" if frames.skipped else ""
        left_out += f", stopped by {stop.signal.name}" if stop.signal is not None else ""
        log.info(format_counts(writer.counts) or "nothing found")
        found = f"{counted(writer.num_images, 'image')}, {counted(writer.counts.total(), 'detection')}"
        log.info(f"{found}{left_out}, in {out}{pace}")
    frames.check_whole()
    if stop.signal is not None:  # Ctrl-C has raised KeyboardInterrupt
        sys.exit(128 + stop.signal)
    return out
