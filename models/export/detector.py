# Copyright the hydra-yolov3-spp developers
# SPDX-License-Identifier: Apache-2.0
"""Detect objects in pictures with the network in model.onnx, beside this file.

pip install -r requirements.txt
python detector.py street.jpg            # prints what it finds, and draws it into detected/

from detector import Detector
boxes_xyxy, scores, classes = Detector()(cv2.imread("street.jpg"))
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime

MODEL = Path(__file__).with_name("model.onnx")
COLOURS = ((56, 56, 235), (60, 180, 75), (235, 120, 40), (30, 170, 235), (180, 60, 200), (190, 190, 20))  # BGR
CANDIDATES = 30000  # boxes of a picture, the best-scored, that enter suppression


class Detector:
    """A network with its class names, called with one picture at a time; threads may share it.

    settings: resize ("letterbox" or "stretch"), confidence, nms_iou, merge_nms and max_detections,
    each in the place of the one in the file.
    """

    def __init__(self, model: Path = MODEL, **settings: Any) -> None:
        self.session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        texts = self.session.get_modelmeta().custom_metadata_map
        self.names, self.image_size, self.stride, open_axes, self.settings = (
            json.loads(texts[key]) for key in ("names", "image_size", "stride", "open", "detect")
        )
        self.any_size = "height" in open_axes
        if unknown := settings.keys() - self.settings.keys():
            raise TypeError(f"no such settings: {', '.join(unknown)}. fix: {', '.join(self.settings)}")
        self.settings |= settings
        if self.settings["resize"] not in ("letterbox", "stretch"):
            raise TypeError(f"there is no resize={self.settings['resize']}. fix: letterbox or stretch")

    def __call__(self, picture: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Boxes (n, 4: x1, y1, x2, y2 in pixels), scores (n,) and classes (n,), best first.

        picture: uint8 (height, width, 3) in BGR, as cv2.imread returns it. A class is a position in
        names.
        """
        if getattr(picture, "dtype", None) != np.uint8 or picture.shape[2:] != (3,) or not picture.size:
            raise TypeError("a picture must be uint8 (height, width, 3) in BGR. fix: as cv2.imread returns it")
        height, width = picture.shape[:2]
        canvas, scale, shift = self.fit(picture)
        images = canvas[None, :, :, ::-1].transpose(0, 3, 1, 2).astype(np.float32) / 255
        all_boxes, all_scores = self.session.run(None, {"images": images})
        boxes, scores, classes = self.suppress(all_boxes[0], all_scores[0])
        boxes = ((boxes.astype(np.float64) - shift) / scale).clip(0, (width, height, width, height))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        return boxes[inside], scores[inside], classes[inside]

    def fit(self, picture: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The network's input (uint8 BGR), and scale and shift from the picture's pixels to its."""
        size = height, width = picture.shape[:2]
        room = (max(self.image_size),) * 2 if self.any_size else tuple(self.image_size)
        ratio, interpolation = min(room[0] / height, room[1] / width), cv2.INTER_LINEAR
        inner = canvas = room
        if self.settings["resize"] == "letterbox":
            inner = tuple(max(1, round(side * ratio)) for side in size)
            if self.any_size:  # no more padding than the strides need
                canvas = tuple(-(-side // self.stride) * self.stride for side in inner)
            if inner[0] < height or inner[1] < width:
                interpolation = cv2.INTER_AREA
        top, left = (canvas[0] - inner[0]) // 2, (canvas[1] - inner[1]) // 2
        filled = np.full((*canvas, 3), 114, np.uint8)
        resized = picture if inner == size else cv2.resize(picture, inner[::-1], interpolation=interpolation)
        filled[top : top + inner[0], left : left + inner[1]] = resized
        return filled, np.array([inner[1] / width, inner[0] / height] * 2), np.array([left, top] * 2)

    def suppress(self, boxes: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best of all boxes (n, 4) with scores (n, classes), without those they overlap.

        With merge_nms each is the mean of itself and all those, weighted by score.
        """
        best, classes = scores.max(axis=1), scores.argmax(axis=1)
        order = np.argsort(-best, kind="stable")
        order = order[best[order] > self.settings["confidence"]][:CANDIDATES]
        boxes, best, classes = boxes[order], best[order], classes[order]
        areas, left, kept = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1), np.ones(len(order), bool), list[int]()
        means = boxes.copy()
        while left.any() and len(kept) < self.settings["max_detections"]:
            first = int(left.argmax())
            low, high = np.maximum(boxes[:, :2], boxes[first, :2]), np.minimum(boxes[:, 2:], boxes[first, 2:])
            common = (high - low).clip(0).prod(axis=1)
            with np.errstate(invalid="ignore"):  # of two boxes without area the overlap is 0 / 0, and both stay
                alike = common / (areas[first] + areas - common) > np.float64(self.settings["nms_iou"])
            alike &= classes == classes[first]
            alike[first] = True
            if self.settings["merge_nms"]:
                means[first] = np.average(boxes[alike], axis=0, weights=best[alike])
            left &= ~alike
            kept.append(first)
        return means[kept], best[kept], classes[kept]


def draw(picture: np.ndarray, boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, names: Sequence[str]) -> None:
    """Draw boxes with their names and scores into a picture."""
    size = max(0.4, min(picture.shape[:2]) / 1000)
    for box, score, index in reversed(list(zip(boxes.round().astype(int).tolist(), scores, classes, strict=True))):
        colour, text = COLOURS[index % len(COLOURS)], f"{names[index]} {score:.2f}"
        cv2.rectangle(picture, box[:2], box[2:], colour, max(1, round(2 * size)))
        place = (box[0], max(box[1] - 4, round(24 * size)))
        for thickness, ink in ((4, (0, 0, 0)), (1, (255, 255, 255))):  # white letters with a dark edge
            cv2.putText(picture, text, place, cv2.FONT_HERSHEY_SIMPLEX, size, ink, thickness, cv2.LINE_AA)


def main() -> None:
    """Print and draw what is found in the pictures of the command line."""
    parser = argparse.ArgumentParser(description="Detect objects in pictures.")
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("detected"), help="folder for drawn pictures (detected)")
    parser.add_argument("--confidence", type=float, help="show detections that score above this")
    options = parser.parse_args()
    detector = Detector(**({} if options.confidence is None else {"confidence": options.confidence}))
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.pictures:
        picture = cv2.imread(str(path))  # turned upright by its EXIF tag
        if picture is None or (options.out / path.name).resolve() == path.resolve():
            parser.error(f"{path} cannot be read as a picture" if picture is None else "--out would overwrite it")
        found = detector(picture)
        for box, score, index in zip(*found, strict=True):
            print(f"{path}: {detector.names[index]} {score:.3f} at", *(f"{value:.1f}" for value in box))
        if not len(found[0]):
            print(f"{path}: nothing found")
        draw(picture, *found, detector.names)
        cv2.imwrite(str(options.out / path.name), picture)


if __name__ == "__main__":
    main()
