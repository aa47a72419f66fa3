"""What a prediction leaves: drawn pictures and videos, crops, labels, json and lines of text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from conf.build.network import TrainedNetwork
from conf.build.predictor import Found
from conf.failures import ConfigError
from data import Frame, Medium
from train_utils.pictures.drawn_files import WRITTEN, DrawnFiles
from train_utils.scores.detections import make_detections
from train_utils.scores.result_files import ImageResult, coco_files, file_names, write_json, write_yolo


@dataclass
class ResultWriter:
    """The files of one prediction below ``out``, and its counts.

    conf/programs/predict.yaml says which files. Raises ConfigError if a picture would overwrite its
    source.
    """

    media: list[Medium]
    detector: TrainedNetwork
    out: Path
    threads: int
    draw: bool = True
    video_suffix: str = ".mp4"
    save_json: bool = True
    save_txt: bool = False
    save_crops: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        names = [medium.name for medium in self.media]
        videos = file_names([medium.name for medium in self.media if medium.is_video], self.video_suffix)
        pictures = file_names(names, ".png")
        self.drawn_names = {
            name: videos.get(name, name if name.lower().endswith(WRITTEN) else pictures[name]) for name in names
        }
        self.label_names = file_names([medium.name for medium in self.media if not medium.is_video], ".txt")
        self.crop_names = file_names(names, "")
        for medium in self.media:
            if self.draw and medium.path.resolve() == (self.out / self.drawn_names[medium.name]).resolve():
                raise ConfigError(
                    f"out={self.out} would overwrite {medium.path}. fix: choose another out=, or draw=false"
                )
        self.drawn = DrawnFiles(self.detector.names, self.threads)
        self.results: list[ImageResult] = []
        self.num_images = 0
        self.turned = 0  # pictures that EXIF tags turned
        self.counts = Counter[str]()  # detections of each class

    def add(self, frame: Frame, found: Found) -> None:
        """Draw a frame and write its labels and crops; with ``verbose`` print a line about it."""
        medium = frame.medium
        rows = make_detections(0, found.classes, found.scores, found.boxes_xyxy)
        result = ImageResult(medium.name, frame.number if medium.is_video else None, frame.size, rows)
        if self.save_json:  # else a camera may run for days without filling the memory
            self.results.append(result)
        self.num_images += 1
        self.turned += frame.turned
        counts = Counter(self.detector.names[index] for index in found.classes.tolist())
        self.counts += counts
        if self.verbose:
            number = f" frame {frame.number}" if medium.is_video else ""
            print(f"{medium.name}{number}, {frame.size[1]}x{frame.size[0]}: {counted(counts) or 'nothing'}", flush=True)
        if self.save_txt and not medium.is_video:
            write_yolo(self.out / "labels" / self.label_names[medium.name], result)
        if self.save_crops:
            stem = self.crop_names[medium.name] + (f"_{frame.number}" if medium.is_video else "")
            self.drawn.crops(self.out / "crops", stem, frame.image, *found)
        path = self.out / self.drawn_names[medium.name]
        if self.draw and medium.is_video:
            self.drawn.frame(path, frame.frames_per_second, frame.image, *found)
        elif self.draw:
            self.drawn.picture(path, frame.image, *found)

    def close(self) -> None:
        """Write the files that need all results."""
        if self.save_json:
            images, detections = coco_files(self.results, self.detector.names, self.detector.category_ids)
            write_json(self.out / "images.json", images)
            write_json(self.out / "detections.json", detections)


def counted(counts: Counter[str], most: int = 10) -> str:
    """Classes by falling count: ``car 12, dog 1``; beyond ``most`` only how many more there are."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f", {len(ordered) - most} classes more" if len(ordered) > most else ""
    return ", ".join(f"{name} {count}" for name, count in ordered[:most]) + more
