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

    raise SystemExit(conf.cli.program.start("predict"))

import sys
import time
from collections import Counter
from pathlib import Path

import torch

from conf import ConfigError, schema
from conf.cli import program
from data import Medium, count_frames, find_media
from data.progress import Progress, counted
from train_utils import distributed, results, run_folder
from train_utils.inference.detector import Detector, Prediction, Predictor, format_counts
from train_utils.report.draw import PICTURE_SUFFIXES, DrawnFiles
from train_utils.stop import StopRequest

__all__ = ["Detector", "predict"]


@program.callable_from_python("predict")
def predict(config: schema.PredictConfig) -> Path:
    """Detect as configured and return the folder with the results.

    Raises ConfigError in one of several processes, and an error for an empty source, weights that
    do not fit or an unreadable file. A signal stops it: it writes the results, then exits with 128
    + signal.
    """
    world = distributed.init_distributed_mode(config.device.value, timeout_seconds=60)
    if world.world_size > 1:
        raise ConfigError("predict.py runs in one process. fix: start it without a launcher, once for each GPU")
    media = find_media(config.source)
    predictor = Predictor(config, world.device)
    frames = predictor.frames(media, config.on_error, config.batch_size)
    out = run_folder.open_out(world, config.out, "predict")
    writer = ResultWriter(media, predictor, out, draw=config.draw, save_json=config.save_json, save_txt=config.save_txt)
    print(f"{predictor.network.note}; {predictor.network.image_size} pixels on {world.device.type}", flush=True)

    # Images under way together finish at once, so only those after them tell the pace.
    passes = torch.get_num_threads() if world.device.type == "cpu" else 1
    together, since = max(frames.threads, frames.batch_size * passes), 0.0
    with StopRequest() as stop:
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
        print(format_counts(writer.counts) or "nothing found")
        print(f"{writer.summary()}{left_out}, in {out}{pace}", flush=True)
    frames.check_whole()
    if stop.signal is not None:  # Ctrl-C has raised KeyboardInterrupt
        sys.exit(128 + stop.signal)
    return out


class ResultWriter:
    """Writes the files of one prediction below ``out``, and counts what it found."""

    def __init__(
        self,
        media: list[Medium],
        predictor: Predictor,
        out: Path,
        *,
        draw: bool = True,
        save_json: bool = True,
        save_txt: bool = False,
        video_suffix: str = ".mp4",
    ) -> None:
        self.network, self.out = predictor.network, out
        self.draw, self.save_json, self.save_txt = draw, save_json, save_txt
        names = [medium.name for medium in media]
        videos = results.file_names([medium.name for medium in media if medium.is_video], video_suffix)
        pictures = results.file_names(names, ".png")
        pictures |= {name: name for name in names if name.lower().endswith(PICTURE_SUFFIXES)}
        self.drawn_names = pictures | videos
        self.label_names = results.file_names([medium.name for medium in media if not medium.is_video], ".txt")
        self.drawn = DrawnFiles(self.network.names)
        self.results: list[results.ImageResult] = []
        self.num_images = 0
        self.counts = Counter[str]()  # detections of each class

    def add(self, prediction: Prediction) -> None:
        """Draw a frame, write its labels, count it."""
        frame, columns = prediction.frame, (prediction.boxes_xyxy, prediction.classes, prediction.scores)
        medium = frame.medium
        rows = results.make_detections(0, prediction.classes, prediction.scores, prediction.boxes_xyxy)
        result = results.ImageResult(medium.name, frame.number if medium.is_video else None, frame.size, rows)
        if self.save_json:  # otherwise a camera may run for days without filling memory
            self.results.append(result)
        self.num_images += 1
        self.counts.update(prediction.class_names)
        if self.save_txt and not medium.is_video:
            results.write_yolo(self.out / "labels" / self.label_names[medium.name], result)
        path = self.out / self.drawn_names[medium.name]
        if self.draw and medium.is_video:
            self.drawn.frame(path, frame.frames_per_second, frame.image, *columns)
        elif self.draw:
            self.drawn.picture(path, frame.image, *columns)

    def summary(self) -> str:
        """The numbers of images and detections."""
        return f"{counted(self.num_images, 'image')}, {counted(self.counts.total(), 'detection')}"

    def close(self) -> None:
        """Write the files that hold all results."""
        if self.save_json:
            images, found = results.coco_files(self.results, self.network.names, self.network.category_ids)
            results.write_json(self.out / "images.json", images)
            results.write_json(self.out / "detections.json", found)
