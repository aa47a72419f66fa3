"""Find images with the same pixels, or so alike that one may be a copy of the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data.audit.images import ImageFacts

Pairs = NDArray[np.int64]  # (n, 2) positions, the smaller first

# Of 128 bits: copies of coco128's images, scaled down or compressed to quality 75, differ by at
# most 10, different images by at least 31.
NEAR_BITS = 10
NEAR_COLOUR = 6  # the most that mean colours may differ by, of 255
MIN_STRUCTURE = 10  # of 64 bits, at least as many set and unset: plain images all look alike
NEIGHBOURS = 50  # candidates per image and order: bounds time where many images look alike


def same_pixels(facts: ImageFacts) -> list[list[int]]:
    """Groups of positions (ascending) of readable images with the same size and pixels."""
    rows = np.flatnonzero(facts.readable)
    hashes = facts.pixel_hash[rows]
    order = np.lexsort((rows, hashes[:, 1], hashes[:, 0]))
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(hashes[order].view(np.int64), axis=0) != 0).any(axis=1)]))
    groups = [group.tolist() for group in np.split(rows[order], starts[1:]) if len(group) > 1]
    return sorted(groups)


def alike(facts: ImageFacts) -> Pairs:
    """Pairs of readable images that differ in pixels but hardly in look and colour.

    If two hashes of 128 bits differ in at most 7, one of their eight parts is equal; up to 10 it
    usually is. So images are sorted by each part in turn and compared with those that share it.
    """
    ones = _count_ones(facts.look)
    structured = ((ones >= MIN_STRUCTURE) & (ones <= 64 - MIN_STRUCTURE)).all(axis=1)
    rows = np.flatnonzero(facts.readable & structured)
    found = [np.zeros((0, 2), dtype=np.int64)]
    for part in facts.look[rows].view(np.uint16).T:
        order = np.argsort(part, kind="stable")
        found += [_close(facts, rows[pairs]) for pairs in _sharing(part[order], order)]
    pairs = np.concatenate(found)
    pairs.sort(axis=1)
    return np.unique(pairs, axis=0)


def _close(facts: ImageFacts, pairs: Pairs) -> Pairs:
    """Keep the pairs (n, 2) that look alike and are not equal."""
    first, second = pairs.T
    difference = np.abs(facts.colour[first].astype(np.int16) - facts.colour[second])
    first, second = pairs[(difference <= NEAR_COLOUR).all(axis=1)].T  # the quick test leaves few to the other
    bits = _count_ones(facts.look[first] ^ facts.look[second]).sum(axis=1)
    close = (bits <= NEAR_BITS) & (facts.pixel_hash[first] != facts.pixel_hash[second]).any(axis=1)
    return np.stack([first[close], second[close]], axis=1)


def _sharing(sorted_parts: NDArray[np.uint16], order: NDArray[np.int64]) -> Iterator[Pairs]:
    """Pairs (n, 2) from ``order`` with equal parts, at most ``NEIGHBOURS`` apart."""
    for distance in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
        at = np.flatnonzero(sorted_parts[distance:] == sorted_parts[:-distance])
        if not len(at):
            return
        yield np.stack([order[at], order[at + distance]], axis=1)


def _count_ones(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Count the bits set in each number of an array (n, k)."""
    as_bytes = np.ascontiguousarray(numbers)[..., None].view(np.uint8)
    return np.asarray(np.unpackbits(as_bytes, axis=-1).sum(axis=-1), dtype=np.int64)
