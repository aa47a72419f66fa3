"""Make batches of network input from pictures and videos, decoded ahead by threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
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
