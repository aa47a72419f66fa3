"""Pictures and videos outside any data set: find, read, and batch them for the network."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor

from data.config import Exif, OnBadFile, Resize
from data.errors import DataError
from data.geometry import Image, Letterbox, resize_into
from data.headers import turn_decoded
from data.images import decode_stored, open_image
from data.samplers import input_shape
from data.set_files import IMAGE_SUFFIXES

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
USUAL_RATE = 25.0  # frames per second of what does not state it
_FIX = "fix: replace the file, or set on_error=skip to leave such files out"
Result = TypeVar("Result")

WAITING_BATCHES = 4  # limit on decoded pictures in unfinished batches, in batches


@dataclass(frozen=True)
class Medium:
    """A picture or a video of a source, or a camera or stream."""

    path: Path  # absolute; without meaning for a camera, a stream or a picture in memory
    name: str  # relative to the source's common folder, with "/"; unique within the source
    address: str = ""  # of a stream, or the number of a camera, as OpenCV takes it
    image: Image | None = field(default=None, compare=False)  # (h, w, 3) RGB of a picture in memory

    @property
    def is_video(self) -> bool:
        """Whether it has frames: a file with the suffix of a video, a camera or a stream."""
        return bool(self.address) or (self.image is None and self.path.suffix.lower() in VIDEO_SUFFIXES)


@dataclass(frozen=True, eq=False)
class Frame:
    """A picture, or one frame of a video."""

    medium: Medium
    number: int  # counted from 1; a picture has 1
    image: Image  # (h, w, 3) RGB
    frames_per_second: float = 0.0  # as the video states; 0: a picture

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[0], self.image.shape[1]


def find_media(source: str) -> list[Medium]:
    """Return the pictures and videos that ``source`` names, each once, sorted by path.

    A source is a picture or video, a folder (searched with its subfolders, hidden files left out),
    a pattern such as ``pictures/**/*.jpg``, or a .txt file with one path per line. As in Darknet,
    those paths are relative to the working directory. Folders and patterns pass over files of other
    types. A number is a camera, and ``rtsp://...`` or the like a stream; its name is free of user,
    password and query. Raises DataError if nothing is found.
    """
    if source.isdecimal() or "://" in source:
        where = f"camera{source}" if source.isdecimal() else source.rpartition("@")[2].partition("?")[0]
        name = re.sub(r"\W+", "-", where).strip("-")
        return [Medium(Path(name), name, address=source)]
    if not source:
        raise DataError("source is empty. fix: name a picture, a video or a folder; . is the current one")
    path = Path(source)
    if path.is_dir():
        return _named(_in_folder(path), source, path)
    if path.is_file() and path.suffix.lower() == ".txt":
        return _named([Path(line.strip()) for line in path.read_text().splitlines() if line.strip()], source)
    if glob.has_magic(source):
        return _named([Path(match) for match in glob.glob(source, recursive=True) if _is_medium(Path(match))], source)
    if not path.is_file():
        raise DataError(f"source={source}: there is no such file or folder. fix: correct the path")
    return _named([path], source)


def _is_medium(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES.union(VIDEO_SUFFIXES) and not path.is_dir()


def _in_folder(folder: Path) -> list[Path]:
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in files if not name.startswith(".")]
    return [path for path in paths if _is_medium(path)]


def _named(paths: list[Path], source: str, base: Path | None = None) -> list[Medium]:
    """Name media relative to ``base``, or to the innermost folder that holds them all."""
    if not paths:
        raise DataError(f"source={source} holds no picture or video. fix: name pictures or videos")
    whole = sorted({Path(os.path.abspath(path)) for path in paths})
    common = os.path.abspath(base) if base is not None else os.path.commonpath([path.parent for path in whole])
    return [Medium(path, path.relative_to(common).as_posix()) for path in whole]


def read_picture(medium: Medium, exif: Exif) -> Frame:
    """Read a picture; ``exif=apply`` turns it by its EXIF tag. Raises DataError if unreadable.

    One in memory is taken as it is.
    """
    if medium.image is not None:
        return Frame(medium, 1, medium.image)
    path = medium.path
    data, header = open_image(path, _FIX)
    image = decode_stored(path, data, header, _FIX)
    orientation = header.orientation if exif == Exif.apply else 1
    return Frame(medium, 1, turn_decoded(image, header, orientation))


class Video:
    """A video, camera or stream, read once; turned upright if the file states its rotation."""

    def __init__(self, medium: Medium) -> None:
        """Raises DataError if OpenCV cannot open it."""
        self.medium, address = medium, medium.address
        self._capture = cv2.VideoCapture(int(address) if address.isdecimal() else address or str(medium.path))
        if not self._capture.isOpened():
            if address:
                raise DataError(f"{medium.name} cannot be opened. fix: check that it is on, and its number or address")
            what = "is not a video that OpenCV can read" if medium.path.is_file() else "does not exist"
            raise DataError(f"{medium.path} {what}. {_FIX}")
        self.frames_per_second = float(self._capture.get(cv2.CAP_PROP_FPS)) or USUAL_RATE
        self.num_frames = max(0, int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT)))  # as stated; 0: unknown

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames. Warns if there are fewer than stated; some containers only estimate."""
        number = 0
        while True:
            is_frame, image = self._capture.read()
            if not is_frame:
                break
            number += 1
            pixels = np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), dtype=np.uint8)
            yield Frame(self.medium, number, pixels, self.frames_per_second)
        self._capture.release()
        if number < self.num_frames:
            logger.warning(
                "%s ends after %d of %d frames: it may be cut short", self.medium.path, number, self.num_frames
            )


@dataclass
class FrameBatch:
    """B frames whose network input has one shape."""

    frames: list[Frame]
    images: Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    letterboxes: list[Letterbox]

    def to(self, device: torch.device, non_blocking: bool = False) -> FrameBatch:
        """The batch with its network input on a device."""
        return replace(self, images=self.images.to(device, non_blocking=non_blocking))


class _Prepared(NamedTuple):
    frame: Frame
    canvas: Image
    letterbox: Letterbox


@dataclass(frozen=True)
class InputFit:
    """How a frame becomes network input: the same as in an evaluation with these options."""

    image_size: int
    stride: int
    resize: Resize
    rect: bool

    def prepare(self, frame: Frame) -> _Prepared:
        """The frame as network input."""
        shape = input_shape(frame.size, self.image_size, self.stride, self.rect, resize=self.resize)
        canvas: Image = np.empty((*shape, 3), dtype=np.uint8)
        return _Prepared(frame, canvas, resize_into(canvas, frame.image, self.resize))

    def batch(self, frame: Frame) -> FrameBatch:
        """A batch of this frame alone."""
        return _together([self.prepare(frame)])


class FrameBatches:
    """All frames of ``media`` in batches of at most ``batch_size``, resized as for evaluation.

    Only frames of one input shape (see ``input_shape``) share a batch, so a frame's input does not
    depend on its neighbours. Pictures come in no particular order. Frames of a video come in order
    and share no batch with other media.
    """

    def __init__(
        self, media: list[Medium], fit: InputFit, batch_size: int, exif: Exif, on_error: OnBadFile, threads: int
    ) -> None:
        self.media, self.batch_size, self.on_error, self.threads = media, batch_size, on_error, threads
        self.fit, self.exif = fit, exif
        self.skipped: list[str] = []  # the files left out so far, and why

    def count(self) -> int:
        """Count the frames as videos state them, else one for each; 0 for a camera or stream.

        With ``on_error=stop`` a video that does not open raises DataError, before any computation.
        """
        total = 0
        for medium in self.media:
            try:
                total += max(1, Video(medium).num_frames) if medium.is_video else 1
            except DataError:
                if self.on_error == OnBadFile.stop:
                    raise
        return 0 if self.media[0].address else total

    def __iter__(self) -> Iterator[FrameBatch]:
        self.skipped = []
        with ThreadPoolExecutor(self.threads) as pool:
            for is_video, group in groupby(self.media, key=lambda medium: medium.is_video):
                for part in [[medium] for medium in group] if is_video else [group]:
                    jobs = (job for medium in part for job in self._jobs(medium))
                    yield from _in_batches(_ahead(pool, jobs, 2 * self.threads), self.batch_size)

    def _jobs(self, medium: Medium) -> Iterator[Callable[[], _Prepared | None]]:
        """What threads do: all for a picture, the resizing for the frames of a video."""
        if not medium.is_video:
            yield partial(self._guarded, lambda: self.fit.prepare(read_picture(medium, self.exif)))
            return
        for frame in self._guarded(partial(Video, medium)) or ():
            yield partial(self.fit.prepare, frame)

    def _guarded(self, read: Callable[[], Result]) -> Result | None:
        """Return what ``read`` returns, or None if it fails and ``on_error`` is skip."""
        try:
            return read()
        except DataError as error:
            if self.on_error == OnBadFile.stop:
                raise
            logger.warning("left out: %s", error)
            self.skipped.append(str(error))
            return None


def _in_batches(prepared: Iterable[_Prepared | None], batch_size: int) -> Iterator[FrameBatch]:
    """Batches of one shape each; None stands for a frame that is left out."""
    waiting: dict[tuple[int, ...], list[_Prepared]] = {}
    for one in prepared:
        if one is None:
            continue
        shape = one.canvas.shape
        waiting.setdefault(shape, []).append(one)
        if len(waiting[shape]) == batch_size:
            yield _together(waiting.pop(shape))
        elif sum(map(len, waiting.values())) >= WAITING_BATCHES * batch_size:
            yield _together(waiting.pop(max(waiting, key=lambda key: len(waiting[key]))))
    for group in waiting.values():
        yield _together(group)


def _together(group: list[_Prepared]) -> FrameBatch:
    frames, canvases, letterboxes = (list(column) for column in zip(*group, strict=True))
    return FrameBatch(frames, torch.from_numpy(np.stack(canvases)).permute(0, 3, 1, 2), letterboxes)


def _ahead(pool: ThreadPoolExecutor, jobs: Iterable[Callable[[], Result]], number: int) -> Iterator[Result]:
    """Yield the results of ``jobs`` in order; the pool computes up to ``number`` ahead."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) > number:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
