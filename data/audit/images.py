"""Decode every image of a set once, in parallel; keep the few bytes that comparisons need."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import OnError
from data.errors import DataError
from data.files.reading import usable_cores
from data.geometry import Image
from data.images.source import ImageSource, WrongSizeError
from data.index.annotations import Annotations

UNREADABLE = "images that cannot be read"
WRONG_SIZE = "images of another size than annotated"
CHUNK = 16  # images that a thread takes at a time
WAITING = 4  # chunks in flight per thread: bounds memory, and the wait after Ctrl-C
GRID = 9  # side of a thumbnail, for 8 differences along each axis


@dataclass
class ImageFacts:
    """Facts about N decoded images."""

    readable: NDArray[np.bool_]  # (N,)
    pixel_hash: NDArray[np.uint64]  # (N, 2) of size and pixels; of readable images only, as all below
    look: NDArray[np.uint64]  # (N, 2) difference hashes along rows and columns, see difference_hash
    colour: NDArray[np.uint8]  # (N, 3) mean RGB
    problems: list[tuple[int, str, str]]  # position, kind and sentence of each unusable image, in order


def check_images(annotations: Annotations, threads: int | None, advance: Callable[[int], None]) -> ImageFacts:
    """Decode all images on ``threads`` threads (None: one for each usable core).

    ``advance`` receives the number of images just done. Decoding releases the interpreter's lock,
    so threads suffice.
    """
    count = len(annotations)
    facts = ImageFacts(
        readable=np.zeros(count, dtype=bool),
        pixel_hash=np.zeros((count, 2), dtype=np.uint64),
        look=np.zeros((count, 2), dtype=np.uint64),
        colour=np.zeros((count, 3), dtype=np.uint8),
        problems=[],
    )
    source = ImageSource(annotations, OnError.stop)

    def work(start: int) -> int:
        indices = range(start, min(start + CHUNK, count))
        for index in indices:
            _check_image(source, index, facts)
        return len(indices)

    threads = threads or len(usable_cores())
    waiting: deque[Future[int]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, count, CHUNK):
            waiting.append(pool.submit(work, start))
            if len(waiting) > WAITING * threads:
                advance(waiting.popleft().result())
        while waiting:
            advance(waiting.popleft().result())
    facts.problems.sort()
    return facts


def _check_image(source: ImageSource, index: int, facts: ImageFacts) -> None:
    try:
        image = source.read(index)
    except DataError as error:
        kind = WRONG_SIZE if isinstance(error, WrongSizeError) else UNREADABLE
        facts.problems.append((index, kind, str(error).partition(" fix: ")[0].rstrip(".")))
        return
    assert image is not None
    facts.readable[index] = True
    digest = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16)
    digest.update(b"%d x %d" % image.shape[:2])
    facts.pixel_hash[index] = np.frombuffer(digest.digest(), dtype=np.uint64)
    small = cv2.resize(image, (GRID, GRID), interpolation=cv2.INTER_AREA)
    facts.look[index] = difference_hash(np.asarray(small, dtype=np.uint8))
    facts.colour[index] = small.reshape(-1, 3).mean(axis=0).round()


def difference_hash(thumbnail: Image) -> NDArray[np.uint64]:
    """Hash a thumbnail (9, 9, 3) by whether each pixel is brighter than the one before it.

    One number of 64 bits for rows and one for columns, which change little when an image is scaled
    or compressed again: the "dHash" of N. Krawetz ("Kind of like that", 2013).
    """
    grey = thumbnail.astype(np.int32) @ [299, 587, 114]
    along_rows, along_columns = np.diff(grey, axis=1)[:8] > 0, np.diff(grey, axis=0)[:, :8] > 0
    return np.packbits(np.stack([along_rows, along_columns]).reshape(2, 64), axis=1).view(np.uint64).reshape(2)
