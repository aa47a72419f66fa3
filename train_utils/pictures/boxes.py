"""Boxes drawn on pictures and videos, and the files they go to."""

from __future__ import annotations

import colorsys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import cv2
import numpy as np

from train_utils.errors import TrainError

DARK, LIGHT = (0, 0, 0), (255, 255, 255)


def class_color(index: int) -> tuple[int, int, int]:
    """Colour (RGB, 0..255) of a class, in golden-ratio steps of hue so that neighbours differ."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.85, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: np.ndarray,
    boxes_xyxy: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
    color_of: Callable[[int], tuple[int, int, int]] = class_color,
) -> np.ndarray:
    """Copy ``image`` (uint8 RGB, H x W x 3) and draw ``boxes_xyxy`` (n, 4, pixels) and their names.

    The first boxes are drawn last, so that those with the best scores are on top. ``color_of``
    gives the colour of a class; a box without text has no plate.
    """
    canvas = np.ascontiguousarray(image).copy()
    thickness = max(1, round(min(canvas.shape[:2]) / 320))
    for i in reversed(range(len(boxes_xyxy))):
        x1, y1, x2, y2 = (round(float(value)) for value in boxes_xyxy[i])
        color = color_of(int(classes[i]))
        cv2.rectangle(canvas, (x1, y1), (x2, y2), color, thickness)
        text = names[int(classes[i])] + (f" {scores[i]:.2f}" if scores is not None else "")
        if text:
            _draw_label(canvas, text, (x1, y1), color)
    return canvas


def _draw_label(canvas: np.ndarray, text: str, corner: tuple[int, int], color: tuple[int, int, int]) -> None:
    """Draw a text on a plate above ``corner`` (x, y), shifted to lie inside the picture."""
    font_scale = max(0.42, min(canvas.shape[:2]) / 1100)
    weight = max(1, round(font_scale * 1.4))
    (width, height), base = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, font_scale, weight)
    left = max(0, min(corner[0], canvas.shape[1] - width))
    top = max(0, corner[1] - height - base)
    cv2.rectangle(canvas, (left, top), (left + width, top + height + base), color, cv2.FILLED)
    brightness = np.dot(color, (0.299, 0.587, 0.114))  # ITU-R BT.601
    ink = DARK if brightness > 110 else LIGHT
    cv2.putText(canvas, text, (left, top + height), cv2.FONT_HERSHEY_SIMPLEX, font_scale, ink, weight, cv2.LINE_AA)


class DrawnFiles:
    """Draws and writes pictures and videos in threads while the network works on the next ones.

    Use it in a ``with`` statement: leaving it waits for the last file. ``picture``, ``frame`` or
    leaving raises TrainError if a file cannot be written.
    """

    def __init__(self, names: Sequence[str], threads: int) -> None:
        """``names`` are those of the classes; up to two pictures per thread wait in memory."""
        self._names, self._threads = names, threads
        self._pool, self._in_order = ThreadPoolExecutor(threads), ThreadPoolExecutor(1)
        self._running: deque[Future[None]] = deque()
        self._video: tuple[Path, cv2.VideoWriter, tuple[int, int]] | None = None

    def picture(
        self, path: Path, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, scores: np.ndarray
    ) -> None:
        """Write ``image`` (uint8 RGB) with ``boxes`` (n, 4: x1, y1, x2, y2 in pixels)."""
        self._wait(2 * self._threads)
        self._running.append(self._pool.submit(self._write_picture, path, image, boxes, classes, scores))

    def frame(
        self,
        path: Path,
        frames_per_second: float,
        image: np.ndarray,
        boxes: np.ndarray,
        classes: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """Add a frame to the .mp4 at ``path``; a new path closes the previous video.

        The codec (MPEG-4 part 2) has even sides only, so an odd side loses its last row or column.
        """
        self._wait(2 * self._threads)
        arguments = (path, frames_per_second, image, boxes, classes, scores)
        self._running.append(self._in_order.submit(self._write_frame, *arguments))

    def __enter__(self) -> DrawnFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            for pool in (self._pool, self._in_order):
                pool.shutdown(cancel_futures=True)
            self._close_video()

    def _wait(self, number: int) -> None:
        """Wait until at most ``number`` files are pending."""
        while len(self._running) > number:
            self._running.popleft().result()

    def _write_picture(self, path: Path, image: np.ndarray, *found: np.ndarray) -> None:
        drawn = self._draw(image, *found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = cv2.imwrite(str(path), drawn)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}). fix: another out=, or draw=false") from error
        if not written:
            raise TrainError(f"cannot write {path}. fix: free some space, another out=, or draw=false")

    def _write_frame(self, path: Path, frames_per_second: float, image: np.ndarray, *found: np.ndarray) -> None:
        size = (image.shape[1], image.shape[0])
        if self._video is None or self._video[0] != path:
            self._close_video()
            self._video = (path, _open_video(path, frames_per_second, size), size)
        if size != self._video[2]:  # OpenCV would drop the frame silently
            raise TrainError(f"{path}: the frames of its video differ in size. fix: draw=false")
        self._video[1].write(self._draw(image, *found))

    def _draw(self, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The drawn image in BGR, as OpenCV writes it."""
        return cv2.cvtColor(draw_boxes(image, boxes, classes, self._names, scores), cv2.COLOR_RGB2BGR)

    def _close_video(self) -> None:
        if self._video is not None:
            self._video[1].release()
            self._video = None


def _open_video(path: Path, frames_per_second: float, size: tuple[int, int]) -> cv2.VideoWriter:
    if not frames_per_second > 0:
        raise TrainError(f"{path}: its video does not give its frame rate. fix: draw=false")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), frames_per_second, size)
    if not writer.isOpened():
        raise TrainError(
            f"cannot write {path} ({size[0]} x {size[1]} pixels as MPEG-4). fix: another out=, or draw=false"
        )
    return writer
