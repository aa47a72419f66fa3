"""Cameras and network streams: a thread reads them and keeps the newest frame only."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from urllib.parse import urlsplit

import cv2
import numpy as np

from data.errors import DataError
from data.geometry import Image
from data.images.media import Frame, Medium

logger = logging.getLogger(__name__)

SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt")
FASTEST, USUAL_RATE = 120.0, 25.0  # frames per second: a stream that states more, or nothing, gets the usual
OPEN_SECONDS, READ_SECONDS = 10, 5  # until a silent stream counts as ended


def live_medium(source: str) -> Medium | None:
    """The camera or stream that ``source`` names: 0, /dev/video0, rtsp://...; None if it does not.

    Its name is free of user, password and query, which belong into no file and no message.
    """
    if source.isdecimal() or re.fullmatch(r"/dev/video\d+", source):
        number = re.sub(r"\D", "", source)
        return Medium(Path(f"camera{number}"), f"camera{number}", address=number)
    address = urlsplit(source)
    if address.scheme.lower() not in SCHEMES or not address.netloc:
        return None
    where = f"{address.netloc.rpartition('@')[2]}{address.path}"
    name = re.sub(r"[^A-Za-z0-9]+", "-", where).strip("-")
    return Medium(Path(name), name, address=source)


class LiveStream:
    """The frames of a camera or stream: always the newest, those that came meanwhile are dropped.

    It ends, with a warning, when nothing comes any more. What states its length, as a video served
    over http, loses no frame.
    """

    def __init__(self, medium: Medium) -> None:
        """Raises DataError if it cannot be opened."""
        self.medium, self._capture = medium, cv2.VideoCapture()
        limits = (cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, 1000 * OPEN_SECONDS, cv2.CAP_PROP_READ_TIMEOUT_MSEC)
        is_camera = medium.address.isdecimal()
        opened = (
            self._capture.open(int(medium.address))
            if is_camera
            else self._capture.open(medium.address, cv2.CAP_FFMPEG, [*limits, 1000 * READ_SECONDS])
        )
        if not opened:
            raise DataError(
                f"{medium.name} cannot be opened. fix: check its address, that it is on, and that nothing else uses it"
            )
        self._has_end = not is_camera and self._capture.get(cv2.CAP_PROP_FRAME_COUNT) > 0
        self._frames: Queue[tuple[int, Image] | None] = Queue(1)  # the newest: its number and BGR pixels
        self._closing = Event()

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames until the end; a frame's number counts those dropped.

        ``copies`` stands for the dropped ones, too: a film of the frames keeps the stream's speed.
        """
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        rate = rate if 0 < rate <= FASTEST else USUAL_RATE
        thread = Thread(target=self._read, name="stream", daemon=True)  # a silent camera may never return
        thread.start()
        last = 0
        try:
            while (taken := self._frames.get()) is not None:
                number, image = taken
                yield Frame(self.medium, number, image[..., ::-1], False, rate, number - last)
                last = number
        finally:
            self._closing.set()
            thread.join(2 * READ_SECONDS)
        if not self._has_end:
            logger.warning("%s stopped sending", self.medium.name)

    def _read(self) -> None:
        """What the thread does: read as fast as frames come."""
        number = 0
        while not self._closing.is_set() and (read := self._capture.read())[0]:
            number += 1
            self._hand_over((number, read[1].astype(np.uint8, copy=False)))
        self._capture.release()
        self._hand_over(None)

    def _hand_over(self, taken: tuple[int, Image] | None) -> None:
        """Wait for the reader if no frame may be lost, else take the place of an older one."""
        while not self._closing.is_set():
            if not self._has_end:
                with suppress(Empty):
                    self._frames.get_nowait()
            with suppress(Full):
                return self._frames.put(taken, timeout=0.2)
