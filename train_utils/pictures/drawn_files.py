"""Drawn pictures and videos as files, written by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np

from train_utils.errors import TrainError
from train_utils.pictures.boxes import draw_boxes

WRITTEN = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # suffixes of pictures that any OpenCV writes
CODECS = {".mp4": "mp4v", ".webm": "VP80"}  # MPEG-4 part 2, and VP8, which browsers play
MOST_WAITING = 8  # pictures in memory


class DrawnFiles:
    """Draws and writes pictures and videos in a thread while the network works on.

    Use it in a ``with`` statement: leaving it waits for the last file. ``picture``, ``frame`` or
    leaving raises TrainError if a file cannot be written. ``found`` are boxes (n, 4: x1, y1, x2, y2
    in pixels), classes (n,) and scores (n,).
    """

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` are those of the classes."""
        self._names = names
        self._thread = ThreadPoolExecutor(1)
        self._running: deque[Future[None]] = deque()
        self._video: tuple[Path, cv2.VideoWriter, tuple[int, int]] | None = None

    def picture(self, path: Path, image: np.ndarray, *found: np.ndarray) -> None:
        """Write ``image`` (uint8 RGB) with its boxes."""
        self._start(lambda: write_image(path, self._draw(image, *found), "another out=, or draw=false"))

    def frame(self, path: Path, frames_per_second: float, image: np.ndarray, *found: np.ndarray) -> None:
        """Add a frame to the .mp4 or .webm at ``path``; a new path is a new video.

        The codecs have even sides only, so an odd side loses its last row or column.
        """
        self._start(self._write_frame, path, frames_per_second, image, *found)

    def __enter__(self) -> DrawnFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._close_video()

    def _start(self, write: Callable[..., None], *arguments: Any) -> None:
        self._wait(MOST_WAITING)
        self._running.append(self._thread.submit(write, *arguments))

    def _wait(self, number: int) -> None:
        """Wait until at most ``number`` files are pending."""
        while len(self._running) > number:
            self._running.popleft().result()

    def _write_frame(self, path: Path, frames_per_second: float, image: np.ndarray, *found: np.ndarray) -> None:
        size = (image.shape[1], image.shape[0])
        if self._video is None or self._video[0] != path:
            self._close_video()
            path.parent.mkdir(parents=True, exist_ok=True)
            codec = cv2.VideoWriter.fourcc(*CODECS[path.suffix])
            self._video = (path, cv2.VideoWriter(str(path), codec, frames_per_second, size), size)
        if not self._video[1].isOpened() or size != self._video[2]:  # OpenCV would drop the frame silently
            raise TrainError(f"cannot write {path} with frames of {size[0]} x {size[1]} pixels. fix: draw=false")
        self._video[1].write(self._draw(image, *found))

    def _draw(self, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The drawn image in BGR, as OpenCV writes it."""
        return cv2.cvtColor(draw_boxes(image, boxes, classes, self._names, scores), cv2.COLOR_RGB2BGR)

    def _close_video(self) -> None:
        if self._video is not None:
            self._video[1].release()
            self._video = None


def write_image(path: Path, image: np.ndarray, fix: str) -> None:
    """Write a picture (uint8 BGR) in the format of its suffix, or raise TrainError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = cv2.imwrite(str(path), image)
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}). fix: {fix}") from error
    if not written:
        raise TrainError(f"cannot write {path}. fix: free some space, {fix}")
