"""What a prediction leaves: drawn pictures and videos, labels, json, and counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from conf.build.network import TrainedNetwork
from conf.build.predictor import Found
from conf.failures import ConfigError
from data import Frame, Medium
from train_utils.detections import ImageResult, coco_files, file_names, make_detections, write_json, write_yolo
from train_utils.draw import WRITTEN, DrawnFiles


class ResultWriter:
    """The files of one prediction below ``out``, and its counts.

    Raises ConfigError if a picture would overwrite its source.
    """

    def __init__(
        self,
        media: list[Medium],
        detector: TrainedNetwork,
        out: Path,
        draw: bool = True,
        save_json: bool = True,
        save_txt: bool = False,
        video_suffix: str = ".mp4",
    ) -> None:
        self.detector, self.out = detector, out
        self.draw, self.save_json, self.save_txt = draw, save_json, save_txt
        names = [medium.name for medium in media]
        videos = file_names([medium.name for medium in media if medium.is_video], video_suffix)
        pictures = file_names(names, ".png")
        self.drawn_names = {
            name: videos.get(name, name if name.lower().endswith(WRITTEN) else pictures[name]) for name in names
        }
        self.label_names = file_names([medium.name for medium in media if not medium.is_video], ".txt")
        for medium in media:
            if draw and medium.path.resolve() == (out / self.drawn_names[medium.name]).resolve():
                raise ConfigError(f"out={out} would overwrite {medium.path}. fix: choose another out=, or draw=false")
        self.drawn = DrawnFiles(detector.names)
        self.results: list[ImageResult] = []
        self.num_images = 0
        self.counts = Counter[str]()  # detections of each class

    def add(self, frame: Frame, found: Found) -> None:
        """Draw a frame, write its labels and count it."""
        medium = frame.medium
        rows = make_detections(0, found.classes, found.scores, found.boxes_xyxy)
        result = ImageResult(medium.name, frame.number if medium.is_video else None, frame.size, rows)
        if self.save_json:  # else a camera may run for days without filling the memory
            self.results.append(result)
        self.num_images += 1
        self.counts.update(self.detector.names[index] for index in found.classes.tolist())
        if self.save_txt and not medium.is_video:
            write_yolo(self.out / "labels" / self.label_names[medium.name], result)
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
