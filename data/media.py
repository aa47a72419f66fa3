"""Pictures and videos outside any data set: find, read and batch them for the network."""

import glob
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import cv2
import numpy as np
import PIL.Image
import torch

from data import containers, headers, images, io, layouts, remote, samplers
from data.config import Exif, OnBadFile, Resize
from data.errors import DataError, printable, without_login
from data.geometry import Image, ImageSize, Letterbox, resize_into
from data.loader import network_input
from data.progress import tracked

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = tuple(".3gp .asf .avi .flv .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ts .webm .wmv".split())
DEFAULT_RATE, MAX_RATE = 25.0, 120.0  # frames per second where nothing tells it, and at most
TIMED_FRAMES = 50  # by whose times a file has its rate: its header may say 1,000, for times in milliseconds
MAX_WAITING = 4  # batches of decoded pictures in unfinished batches
_FIX = "replace the file, or set on_error=skip to leave such files of a folder out"


@dataclass(frozen=True)
class Medium:
    """A picture or a video of a source, or a camera or stream."""

    path: Path  # absolute; unused for an address, a camera or a picture in memory
    name: str  # relative to the source's common folder, with "/"; unique within the source
    address: str = ""  # of a picture, video or stream, or the number of a camera
    image: Image | None = field(default=None, compare=False)  # (h, w, 3) RGB of a picture in memory

    @classmethod
    def at(cls, place: str, name: str) -> Self:
        """The medium of a file or of an address such as ``rtsp://...``."""
        return cls(Path(), name, place) if "://" in place else cls(Path(place).absolute(), name)

    @property
    def shown(self) -> str:
        """Its name in messages: the path, or the address without user, password and query."""
        return re.split("[?#]", without_login(self.address))[0] if "://" in self.address else str(self.path)

    @property
    def is_video(self) -> bool:
        """Whether it has frames: a camera, a stream, or a file with the suffix of a video.

        An address of the web or a bucket with the suffix of a picture is a picture.
        """
        suffix = os.path.splitext(self.shown)[1].lower()
        if self.address:
            scheme = self.address.partition("://")[0]
            return not (suffix in layouts.IMAGE_SUFFIXES and scheme in remote.SCHEMES)
        return self.image is None and suffix in VIDEO_SUFFIXES


@dataclass(frozen=True, eq=False)
class Frame:
    """A picture, or one frame of a video."""

    medium: Medium
    number: int  # counted from 1; a picture has 1
    image: Image  # (h, w, 3) RGB
    seconds: float = 0.0  # since the start of the video
    frames_per_second: float = 0.0  # of the video where it is dense; 0: a picture

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[0], self.image.shape[1]


def find_media(source: str) -> list[Medium]:
    """Return the pictures and videos that ``source`` names, each once, sorted by path.

    A source is a picture or video, a folder (with its subfolders, without hidden files), a pattern
    such as ``pictures/**/*.jpg``, or the number of a camera. ``http://.../a.jpg`` is a picture, any
    other address a video or stream. Raises DataError if nothing is found.
    """
    if source.isdecimal() and len(source) < 10:  # OpenCV takes a C int
        return [Medium(Path(name := f"camera{source}"), name, address=source)]
    if "://" in source:
        if source.partition("://")[0] in remote.LISTED:
            remote.check_address(source, "source")
        medium = Medium.at(source, "")
        whole_name = re.sub(r"\W+", "-", medium.shown.partition("://")[2]).strip("-")
        return [replace(medium, name=whole_name if medium.is_video else os.path.basename(medium.shown))]
    is_folder = os.path.isdir(source)
    matches, left_out = list[str](), list[str]()
    suffixes = layouts.IMAGE_SUFFIXES.union(VIDEO_SUFFIXES)
    if os.path.isfile(source):
        paths = [source]
    elif is_folder:
        paths = io.files_below(Path(source), suffixes, left_out)
    else:
        top, names = io.expand(source)
        for name in names:
            is_waste = any(map(io.SYSTEM_NAMES.match, name.split("/")))
            (left_out if is_waste else matches).append(os.path.join(top, name))
        paths = [path for path in matches if Path(path).suffix.lower() in suffixes and not os.path.isdir(path)]
    if not paths:
        is_there = os.path.exists(source) or glob.has_magic(source)
        what = "holds no picture or video" if is_there else "is not a file or folder"
        raise DataError(f"source={source} {what}", "a file, a folder or a pattern in quotes")
    whole = sorted({Path(os.path.abspath(path)) for path in paths})
    base = os.path.abspath(source) if is_folder else os.path.commonpath([path.parent for path in whole])
    beside = layouts.unknown_files({str(path.parent) for path in whole}, VIDEO_SUFFIXES)
    unknown = beside if is_folder else sorted({*beside} & {*matches})
    looked_at = tracked(map(str, whole), len(whole), "looking for several frames", unit="file")
    several = [*filter(headers.has_frames, looked_at)]
    other = "files that are not pictures or videos of a known type"
    for kind, files in ((io.OF_SYSTEM, left_out), (other, unknown), (headers.SEVERAL, several)):
        if files:
            logger.warning("%d %s, first: %s", len(files), kind, files[0])
    return [Medium(path, path.relative_to(base).as_posix()) for path in whole]


def count_frames(media: Sequence[Medium]) -> int:
    """Count the frames that videos claim to have; 0 for a camera or an address."""
    if media[0].address and media[0].is_video:
        return 0
    videos = [_capture(medium) for medium in media if medium.is_video]
    frames = sum(max(1, int(video.get(cv2.CAP_PROP_FRAME_COUNT))) for video in videos)
    return len(media) - len(videos) + frames


def _capture(medium: Medium) -> cv2.VideoCapture:
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # its warnings hold the password
    if not medium.address and not medium.path.is_file():  # it would wait for the writer of a pipe
        return cv2.VideoCapture()
    # OpenCV crashes on a name that is not Unicode, but accepts its bytes.
    source: Any = int(medium.address) if medium.address.isdecimal() else os.fsencode(medium.address or medium.path)
    return cv2.VideoCapture(source)


def read_picture(medium: Medium, exif: Exif) -> Frame:
    """Read a picture; ``exif=apply`` turns a file by its tag. Raises DataError if unreadable."""
    if medium.image is not None:
        return Frame(medium, 1, medium.image)
    is_web = medium.address.startswith("http")
    read = (lambda shown: io.fetch(medium.address, shown)) if is_web else layouts.read_file
    data, header = images.open_image(medium.shown, _FIX, read)
    image = images.decode_stored(medium.shown, data, header, _FIX)
    return Frame(medium, 1, headers.turn_decoded(image, header.orientation if exif == Exif.apply else 1))


def pixels_of(image: PIL.Image.Image, exif: Exif) -> Image:
    """The pixels (h, w, 3) RGB of a Pillow image, as read from its file; of 16 bits the upper 8.

    Raises DataError for 32 bits, whose range is unknown, and for an undecodable image.
    """
    orientation = headers.orientation_of(image) if exif == Exif.apply else 1
    try:
        if image.mode in ("I", "F"):
            raise ValueError("the range of 32 bits is unknown")
        if image.mode.startswith("I;16"):  # convert() would make all above 255 white
            image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises any of them for a damaged file
        raise DataError(f"{image!r} cannot be read ({error})", "an image of mode RGB") from error
    return headers.turn_decoded(pixels, orientation)


def read_video(medium: Medium, cut: list[str]) -> Iterator[Frame]:
    """Yield the frames of a video, camera or stream. Raises DataError if OpenCV reads none.

    ``cut`` gets a sentence if the container of a file ends early. What a header says of their
    number is an estimate, where rates vary or the sound is longer.
    """
    if not medium.address:
        _check_filled(medium)
    capture, number = _capture(medium), 0
    promised = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    # A stream may be there for one reader, and have the rate of a clock, as 90,000.
    rate = capture.get(cv2.CAP_PROP_FPS) if medium.address else _frame_rate(medium)
    rate = min(MAX_RATE, rate) if rate > 0 else DEFAULT_RATE
    while (image := capture.read()[1]) is not None:
        number += 1
        pixels = np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)
        yield Frame(medium, number, pixels, capture.get(cv2.CAP_PROP_POS_MSEC) / 1000, rate)
    capture.release()
    if number == 0:
        fix = "check that it is on, and its number or address; a picture's ends in .jpg, .png or the like"
        raise DataError(f"{medium.shown} holds no frame that OpenCV can read", fix if medium.address else _FIX)
    if not medium.address and containers.ends_early(medium.path):
        of_all = f" of {promised:.0f}" if promised > number else ""
        cut.append(f"{medium.shown} ends after {number}{of_all} frames")
        logger.warning(printable(cut[-1]))


def _check_filled(medium: Medium) -> None:
    """Raise DataError for a file of which OpenCV fills no frame: with FFmpeg 8 an interlaced one.

    What it gives is memory as it was: zeros to the end, or not the same in two captures at a time.
    """
    capture, other = _capture(medium), _capture(medium)
    first, again = capture.read()[1], other.read()[1]
    image = first
    while image is not None and not image.any():
        image = capture.read()[1]
    other.read()  # what the two leave behind in memory must differ, too
    if first is not None and (image is None or not np.array_equal(first, again)):
        fix = shlex.join(["ffmpeg", "-i", medium.shown, "-vf", "yadif", "out.mp4"])
        raise DataError(f"{medium.shown} is black in all frames, or interlaced, which OpenCV cannot read", fix)


def _frame_rate(medium: Medium) -> float:
    """Frames per second of a file by the short steps between its first frames' times."""
    capture, seconds = _capture(medium), list[float]()
    while len(seconds) < TIMED_FRAMES and capture.grab():
        seconds.append(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000)
    steps = np.diff(seconds)
    steps = steps[steps > 0]
    return round(float(1 / np.percentile(steps, 10)), 3) if len(steps) else capture.get(cv2.CAP_PROP_FPS)


class Prepared(NamedTuple):
    """A frame as network input."""

    frame: Frame
    canvas: Image
    letterbox: Letterbox


@dataclass(frozen=True)
class InputFit:
    """How a frame becomes network input, as in an evaluation with these options."""

    image_size: ImageSize
    stride: int
    resize: Resize
    rect: bool

    def prepare(self, frame: Frame) -> Prepared:
        """The frame as network input."""
        shape = samplers.input_shape(frame.size, self.image_size, self.stride, self.rect, resize=self.resize)
        canvas = np.empty((*shape, 3), np.uint8)
        return Prepared(frame, canvas, resize_into(canvas, frame.image, self.resize))


@dataclass
class FrameBatch:
    """B frames whose network input has one shape."""

    frames: list[Frame]
    images: torch.Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    letterboxes: list[Letterbox]

    @classmethod
    def of(cls, group: Sequence[Prepared]) -> Self:
        """Prepared frames of one shape together."""
        frames, canvases, letterboxes = (list(column) for column in zip(*group, strict=True))
        return cls(frames, torch.from_numpy(np.stack(canvases)).permute(0, 3, 1, 2), letterboxes)

    def network_input(self) -> torch.Tensor:
        """The images as floats in 0..1."""
        return network_input(self.images)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch with its images on a device."""
        return replace(self, images=self.images.to(device, non_blocking=non_blocking))


class FrameBatches:
    """All frames of ``media`` in batches of at most ``batch_size``, resized as for evaluation.

    Only frames of one input shape share a batch. Pictures come first, in any order. Frames of a
    video come in order and share no batch with other media.
    """

    def __init__(
        self, media: Sequence[Medium], fit: InputFit, batch_size: int, *, exif: Exif, on_error: OnBadFile, threads: int
    ) -> None:
        self.media, self.fit = media, fit
        self.batch_size = batch_size
        self.exif, self.on_error = exif, on_error
        self.threads = threads
        self.skipped: list[str] = []  # the files left out so far, and why
        self.cut: list[str] = []  # sentences on the videos that ended early

    def __iter__(self) -> Iterator[FrameBatch]:
        groups: list[Iterable[Frame | Medium]] = [[medium for medium in self.media if not medium.is_video]]
        groups += [self._frames(medium) for medium in self.media if medium.is_video]
        with ThreadPoolExecutor(self.threads) as pool:
            for group in groups:
                yield from _in_batches(self._prepared(pool, group), self.batch_size)

    def _prepared(self, pool: ThreadPoolExecutor, group: Iterable[Frame | Medium]) -> Iterator[Prepared]:
        """The frames in order; threads read pictures and resize frames of videos ahead."""
        running = []
        for one in group:
            running.append(pool.submit(self._prepare, one))
            if len(running) > 2 * self.threads:
                with self._skipping():
                    yield running.pop(0).result()
        for future in running:
            with self._skipping():
                yield future.result()

    def _frames(self, video: Medium) -> Iterator[Frame]:
        with self._skipping():
            yield from read_video(video, self.cut)

    def check_whole(self) -> None:
        """Raise DataError if a video ended early and ``on_error`` is stop; call it at the end."""
        if self.cut and self.on_error == OnBadFile.stop:
            raise DataError(self.cut[0], "get the whole file, or on_error=skip")

    def _prepare(self, one: Frame | Medium) -> Prepared:
        return self.fit.prepare(one if isinstance(one, Frame) else read_picture(one, self.exif))

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            if self.on_error == OnBadFile.stop:
                raise
            logger.warning("left out: %s", printable(error.sentence))
            self.skipped.append(str(error))


def _in_batches(prepared: Iterable[Prepared], batch_size: int) -> Iterator[FrameBatch]:
    """Batch frames by shape; each waits for others of its shape."""
    waiting: dict[tuple[int, ...], list[Prepared]] = {}
    for one in prepared:
        shape = one.canvas.shape
        waiting.setdefault(shape, []).append(one)
        if len(waiting[shape]) == batch_size:
            yield FrameBatch.of(waiting.pop(shape))
        elif sum(map(len, waiting.values())) >= MAX_WAITING * batch_size:
            yield FrameBatch.of(waiting.pop(max(waiting, key=lambda key: len(waiting[key]))))
    for group in waiting.values():
        yield FrameBatch.of(group)
