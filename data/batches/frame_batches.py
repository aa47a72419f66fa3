"""Make batches of network input from pictures and videos, decoded ahead by threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, repeat, takewhile
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.batches.samplers import input_shape
from data.config import Exif, OnBadFile, Resize
from data.errors import DataError
from data.geometry import Image
from data.images.media import Frame, Medium, Video, read_picture
from data.samples.letterbox import Letterbox, resize_into

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

WAITING_BATCHES = 4  # limit on decoded pictures in unfinished batches, in batches


@dataclass
class FrameBatch:
    """B frames whose network input has one shape."""

    frames: list[Frame]
    images: Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    letterboxes: list[Letterbox]

    def to(self, device: torch.device, non_blocking: bool = False) -> FrameBatch:
        """The batch with its network input on a device."""
        return replace(self, images=self.images.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class InputFit:
    """How a frame becomes network input: the same as in an evaluation with these options."""

    image_size: int
    stride: int
    resize: Resize
    rect: bool

    def prepare(self, frame: Frame) -> _Prepared:
        """The frame as network input."""
        shape = input_shape(frame.size, self.image_size, self.stride, self.rect, upscale=True, resize=self.resize)
        canvas: Image = np.empty((*shape, 3), dtype=np.uint8)
        return _Prepared(frame, canvas, resize_into(canvas, frame.image, self.resize, upscale=True))

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
        self,
        media: list[Medium],
        fit: InputFit,
        batch_size: int,
        exif: Exif,
        on_error: OnBadFile,
        threads: int,
    ) -> None:
        self.media, self.batch_size, self.on_error, self.threads = media, batch_size, on_error, threads
        self.fit, self.exif = fit, exif
        self._times: list[float] = []  # appending is thread-safe
        self.skipped: list[str] = []  # the files left out so far, and why

    @property
    def seconds(self) -> float:
        """Seconds spent so far on reading and resizing, summed over threads."""
        return sum(self._times)

    def count(self) -> int:
        """Count the frames as videos state them, else one for each; 0 for a camera or stream.

        With ``on_error=stop`` an unreadable video raises DataError here, before any computation.
        """
        total = 0
        if self.media[0].address:
            return total
        for medium in self.media:
            try:
                total += max(1, Video(medium).num_frames) if medium.is_video else 1
            except DataError:
                if self.on_error == OnBadFile.stop:
                    raise
        return total

    def __iter__(self) -> Iterator[FrameBatch]:
        self._times, self.skipped = [], []
        with ThreadPoolExecutor(self.threads) as pool, ThreadPoolExecutor(1) as in_order:
            for is_video, group in groupby(self.media, key=lambda medium: medium.is_video):
                if is_video:
                    for medium in group:
                        yield from _in_batches(self._frames_of(medium, in_order), self.batch_size)
                else:
                    reads = (partial(self._guarded, partial(read_picture, medium, self.exif)) for medium in group)
                    jobs = (partial(self._prepare, read) for read in reads)
                    yield from _in_batches(_ahead(pool, jobs, 2 * self.threads), self.batch_size)

    def _frames_of(self, medium: Medium, in_order: ThreadPoolExecutor) -> Iterator[_Prepared | None]:
        """Return the frames of a video, decoded by one thread."""
        video = self._guarded(partial(Video, medium))
        frames = iter(video) if video is not None else iter(())
        prepared = _ahead(in_order, repeat(partial(self._prepare, partial(next, frames, None))), 2 * self.threads)
        yield from takewhile(lambda one: one is not None, prepared)  # None follows the last frame

    def _prepare(self, read: Callable[[], Frame | None]) -> _Prepared | None:
        started = time.perf_counter()
        frame = read()
        prepared = self.fit.prepare(frame) if frame is not None else None
        self._times.append(time.perf_counter() - started)
        return prepared

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


class _Prepared(NamedTuple):
    frame: Frame
    canvas: Image
    letterbox: Letterbox


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
