"""Cameras and network streams: a thread reads them and keeps the newest frame only."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Condition, Event, Thread
from urllib.parse import urlsplit

import cv2
import numpy as np

from data.errors import DataError
from data.geometry import Image
from data.images.media import Frame, Medium

logger = logging.getLogger(__name__)

SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt")
RATE = 25.0  # frames per second of the video that a live source is drawn to
LONGEST_STILL = 2.0  # seconds of that video that one frame may stand for, when a stream was away
OPEN_SECONDS, READ_SECONDS = 10, 5  # until a silent stream counts as lost
RETRY_SECONDS = 1.0


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

    A stream that falls silent is opened again, with a warning. What states its length, as a video
    served over http, loses no frame and ends.
    """

    def __init__(self, medium: Medium, reconnect_seconds: float, is_over: Callable[[], bool]) -> None:
        """Open it. ``is_over`` is asked several times a second. Raises DataError if it cannot open.

        A lost stream is tried again for ``reconnect_seconds``; after that the frames end.
        """
        self.medium, self._patience, self._is_over = medium, reconnect_seconds, is_over
        self._address: str | int = int(medium.address) if medium.address.isdecimal() else medium.address
        self.received = 0  # frames so far, the dropped ones included
        self._newest: tuple[int, Image, float] | None = None  # its number, BGR pixels, and when it came
        self._changed, self._closing, self._ended = Condition(), Event(), False
        capture = self._open()
        if capture is None:
            what = "camera" if isinstance(self._address, int) else "stream"
            raise DataError(
                f"the {what} {medium.name} cannot be opened. fix: check that it is on and that nothing else uses it"
                if what == "camera"
                else f"the {what} {medium.name} cannot be opened. fix: check its address and that it is sending"
            )
        self._capture = capture
        self._has_end = isinstance(self._address, str) and capture.get(cv2.CAP_PROP_FRAME_COUNT) > 0

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames until the end or ``is_over``; a frame's number counts those dropped."""
        thread = Thread(target=self._read, name="stream", daemon=True)  # a silent camera may never return
        thread.start()
        start, drawn = time.monotonic(), 0
        try:
            while not self._is_over():
                with self._changed:
                    self._changed.wait_for(lambda: self._newest is not None or self._ended, timeout=0.2)
                    taken, self._newest = self._newest, None
                    self._changed.notify_all()
                if taken is None:
                    if self._ended:
                        return
                    continue
                number, image, came = taken
                due = round((came - start) * RATE) + 1 - drawn
                if due > LONGEST_STILL * RATE:
                    due = 1
                    start = came - drawn / RATE
                drawn += max(due, 0)
                yield Frame(self.medium, number, image[..., ::-1], False, RATE, max(due, 0))
        finally:
            self._closing.set()
            with self._changed:
                self._changed.notify_all()
            thread.join(2 * READ_SECONDS)

    def _open(self) -> cv2.VideoCapture | None:
        limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, 1000 * OPEN_SECONDS, cv2.CAP_PROP_READ_TIMEOUT_MSEC]
        is_camera = isinstance(self._address, int)
        capture = cv2.VideoCapture()
        opened = (
            capture.open(self._address)
            if is_camera
            else capture.open(self._address, cv2.CAP_FFMPEG, [*limits, 1000 * READ_SECONDS])
        )
        return capture if opened else None

    def _read(self) -> None:
        """What the thread does: read as fast as frames come, and open again what was lost."""
        while not self._closing.is_set():
            found, image = self._capture.read()
            if not found:
                if self._has_end or not self._reopened():
                    break
                continue
            with self._changed:
                if self._has_end:
                    self._changed.wait_for(lambda: self._newest is None or self._closing.is_set())
                self.received += 1
                self._newest = (self.received, image.astype(np.uint8, copy=False), time.monotonic())
                self._changed.notify_all()
        self._capture.release()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _reopened(self) -> bool:
        """Whether the lost stream is back, which may take a while."""
        self._capture.release()
        lost = time.monotonic()
        logger.warning("%s stopped sending; trying for %g s to reach it again", self.medium.name, self._patience)
        while time.monotonic() - lost < self._patience and not self._closing.wait(RETRY_SECONDS):
            capture = self._open()
            if capture is not None:
                self._capture = capture
                logger.warning("%s is back after %.0f s", self.medium.name, time.monotonic() - lost)
                return True
        if not self._closing.is_set():
            logger.warning("%s did not come back within %g s", self.medium.name, self._patience)
        return False
