"""Draw boxes on pictures and videos, arrange pictures in a sheet, and write the files."""

import colorsys
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy import ndarray

from conf import TrainError
from data import Batch
from data.errors import printable
from models.decode import cxcywh_to_xyxy

DARK = (0, 0, 0)
LIGHT = (255, 255, 255)
BRIGHTNESS = (0.299, 0.587, 0.114)  # of red, green and blue, by ITU-R BT.601
FONT = cv2.FONT_HERSHEY_SIMPLEX


def class_color(index: int) -> tuple[int, int, int]:
    """Colour (RGB, 0..255) of a class, in golden-ratio steps of hue so that neighbours differ."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.85, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: ndarray,
    boxes_xyxy: ndarray,
    classes: ndarray,
    names: Sequence[str],
    scores: ndarray | None = None,
    *,
    colors: ndarray | None = None,
) -> ndarray:
    """Draw boxes (n, 4, pixels) and their names on a copy of ``image`` (uint8 RGB, H x W x 3).

    The first boxes, those with the best scores, come on top. ``colors`` (n, 3, RGB)
    replace those of the classes.
    """
    canvas = image.copy(order="C")
    rows, columns = canvas.shape[:2]
    side = min(rows, columns)
    scale = max(0.36, side / 1100)
    weight = max(1, round(scale * 1.4))
    corners = boxes_xyxy.round().astype(int).tolist()
    for i in reversed(range(len(corners))):
        left, top, right, bottom = corners[i]
        number = int(classes[i])
        text = printable(names[number])
        if scores is not None:
            text += f" {scores[i]:.2f}"
        color = class_color(number) if colors is None else colors[i].tolist()
        cv2.rectangle(canvas, (left, top), (right, bottom), color, max(2, round(side / 220)))
        (width, height), base = cv2.getTextSize(text, FONT, scale, weight)
        x = max(0, min(left, columns - width))
        y = max(height + base, min(top, rows))  # bottom of the name, above its box where there is room
        cv2.rectangle(canvas, (x, y - height - base), (x + width, y), color, cv2.FILLED)
        ink = DARK if np.dot(color, BRIGHTNESS) > 110 else LIGHT
        cv2.putText(canvas, text, (x, y - base), FONT, scale, ink, weight, cv2.LINE_AA)
    return canvas


COLUMNS = 4  # of a sheet
SIDE = 440  # pixels of a cell's picture
GAP = 8  # between cells
LINE = 24  # of text
MOST_DRAWN = 16  # images of a batch
MAX_TITLE = 46  # characters that fit above a cell


def draw_cell(image: ndarray, boxes_xyxy: ndarray, *columns: Any, colors: ndarray | None = None) -> ndarray:
    """``draw_boxes`` on a picture of SIDE pixels, scaled first: names stay readable."""
    height, width = image.shape[:2]
    ratio = SIDE / max(height, width)
    size = max(1, round(width * ratio)), max(1, round(height * ratio))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
    return draw_boxes(small, boxes_xyxy * ratio, *columns, colors=colors)


def save_sheet(cells: Sequence[tuple[Any, ...]], out: Path) -> None:
    """Save pictures, each under its lines; long ones lose their middle. Raises TrainError."""
    head = LINE * (len(cells[0]) - 1)
    height, width = head + SIDE + GAP, SIDE + GAP
    sheet = np.full((len(cells) * height, min(COLUMNS, len(cells)) * width + GAP, 3), 255, np.uint8)
    top = end = 0
    for number, (picture, *lines) in enumerate(cells):
        column = number % COLUMNS
        if column == 0:
            top = end
        left = GAP + column * width
        sheet[top + head : top + head + picture.shape[0], left : left + picture.shape[1]] = picture
        end = max(end, top + head + len(picture) + GAP)  # a row is as high as its highest picture
        for line, part in enumerate(lines, 1):
            text = printable(part)
            if len(text) > MAX_TITLE:
                text = f"{text[: MAX_TITLE // 2]}...{text[-MAX_TITLE // 2 :]}"
            cv2.putText(sheet, text, (left, top + line * LINE - 7), FONT, 0.5, DARK, 1, cv2.LINE_AA)
    write_image(out, sheet[: end + GAP, :, ::-1], "or choose another folder")


def draw_targets(batch: Batch, names: Sequence[str], out: Path) -> None:
    """Save the first images of a training batch, which is on the CPU, with their boxes."""
    images = (255 * batch.network_input()).round().byte().permute(0, 2, 3, 1).numpy()
    boxes_xyxy = cxcywh_to_xyxy(batch.targets[:, 2:6]).numpy()
    owners, classes = batch.targets[:, :2].T.numpy()
    cells = []
    for index, image in enumerate(images[:MOST_DRAWN]):
        own = owners == index
        cells.append((draw_cell(image, boxes_xyxy[own], classes[own], names), ""))
    save_sheet(cells, out)


PICTURE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # that any OpenCV writes
CODEC = cv2.VideoWriter.fourcc(*"mp4v")  # MPEG-4 part 2
MOST_WAITING = 8  # pictures in memory
MOST_REPEATED = 60  # seconds that one frame of a video fills
OTHER_OUT = "another out=, or draw=false"


class DrawnFiles(AbstractContextManager["DrawnFiles"]):
    """Draws and writes pictures and videos in a thread while the network continues.

    A picture comes as a function that draws it: uint8 BGR (H, W, 3). Leaving the ``with`` statement
    waits for the last file. All raise TrainError if a file cannot be written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._running: list[Future[None]] = []
        self._video = cv2.VideoWriter()
        self._video_path = Path()
        self._size = (0, 0)
        self._written, self._last = 0, np.empty(0)

    def picture(self, path: Path, plot: Callable[[], ndarray]) -> None:
        """Write a picture."""
        self._start(lambda: write_image(path, plot(), OTHER_OUT))

    def frame(self, path: Path, frames_per_second: float, seconds: float, plot: Callable[[], ndarray]) -> None:
        """Add a frame to the .mp4 at ``path``; another path starts another video.

        Where the frames' ``seconds`` since the start leave a gap, the one before it is repeated.

        The codecs need even sides, so an odd side loses its last row or column.
        """
        self._start(lambda: self._write_frame(path, frames_per_second, seconds, plot()))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._running:
                self._running.pop(0).result()
            if kind is None:
                self._end_video()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._video.release()

    def _start(self, write: Callable[[], None]) -> None:
        if len(self._running) > MOST_WAITING:
            self._running.pop(0).result()
        self._running.append(self._thread.submit(write))

    def _end_video(self) -> None:
        self._video.release()
        name: Any = os.fsencode(self._video_path)
        if self._written > 0 and cv2.VideoCapture(name).get(cv2.CAP_PROP_FRAME_COUNT) < self._written:
            # OpenCV does not say that a disk is full.
            raise TrainError(f"cannot write all frames of {self._video_path}", f"free some space, {OTHER_OUT}")

    def _write_frame(self, path: Path, frames_per_second: float, seconds: float, drawn: ndarray) -> None:
        size = (drawn.shape[1], drawn.shape[0])
        if self._video_path != path:
            self._end_video()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._video_path, self._size = path, size
            self._written, self._last = 0, drawn
            name: Any = os.fsencode(path)  # as text, OpenCV would crash on a name that is not Unicode
            self._video = cv2.VideoWriter(name, CODEC, frames_per_second, size)
        if not self._video.isOpened() or size != self._size:  # OpenCV would silently drop the frame
            raise TrainError(f"cannot write {path} with frames of {size[0]} x {size[1]} pixels", "draw=false")
        missing = round(seconds * frames_per_second) - self._written
        if abs(missing) < MOST_REPEATED * frames_per_second:  # of damaged files times may be anything
            if missing < -1 and seconds > 0:  # denser than the rate
                return
            for _ in range(missing):
                self._video.write(self._last)
                self._written += 1
        self._video.write(drawn)
        self._written, self._last = self._written + 1, drawn


def write_image(path: Path, image: ndarray, fix: str) -> None:
    """Write a picture (uint8 BGR) in the format of its suffix, or raise TrainError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_encoded, content = cv2.imencode(path.suffix, image)
        if not is_encoded:
            raise OSError("OpenCV does not say why")
        path.write_bytes(content.tobytes())  # imwrite crashes on names that are not Unicode
    except (OSError, cv2.error) as error:
        why = getattr(error, "err", error)  # of OpenCV's without its line of source
        raise TrainError(f"cannot write {path} ({why})", f"free some space, {fix}") from error
