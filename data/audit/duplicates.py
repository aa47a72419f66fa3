"""Images that are there twice: with the same pixels, or so alike that one may be a copy of the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data.audit.images import ImageFacts

Pairs = NDArray[np.int64]  # (n, 2) positions, the smaller first

# Of 128 bits: all of coco128 stay within when made smaller or compressed to a quality of 75, different images of it
# differ in 31 and more.
NEAR_BITS = 10
NEAR_COLOUR = 6  # levels of 255 that their mean colours may differ by
MIN_STRUCTURE = 10  # bits of 64 that are set, and as many that are not: plain pictures all look alike
NEIGHBOURS = 50  # candidates that an image is compared with in each order: bounds time where many share a look


def same_pixels(facts: ImageFacts) -> list[list[int]]:
    """Groups of positions of readable images with the same size and pixels, each in ascending order."""
    rows = np.flatnonzero(facts.readable)
    hashes = facts.pixel_hash[rows]
    order = np.lexsort((rows, hashes[:, 1], hashes[:, 0]))
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(hashes[order].view(np.int64), axis=0) != 0).any(axis=1)]))
    groups = [group.tolist() for group in np.split(rows[order], starts[1:]) if len(group) > 1]
    return sorted(groups)


def alike(facts: ImageFacts) -> Pairs:
    """Pairs of readable images that differ in pixels but hardly in look and colour, as copies compressed anew do.

    Where at most 7 of 128 bits in eight parts differ, one part is the same, and mostly so where at most 10 do: so
    images are sorted by each part in turn and compared with those that share it.
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
    """Those of the pairs (n, 2) that look alike and are not the same; by colour first, which is quick to tell."""
    for is_close in (_close_in_colour, _close_in_look):
        pairs = pairs[is_close(facts, *pairs.T)]
    return pairs


def _close_in_colour(facts: ImageFacts, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
    difference = np.abs(facts.colour[first].astype(np.int16) - facts.colour[second])
    return np.asarray((difference <= NEAR_COLOUR).all(axis=1))


def _close_in_look(facts: ImageFacts, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
    close = _count_ones(facts.look[first] ^ facts.look[second]).sum(axis=1) <= NEAR_BITS
    return np.asarray(close & (facts.pixel_hash[first] != facts.pixel_hash[second]).any(axis=1))


def _sharing(sorted_parts: NDArray[np.uint16], order: NDArray[np.int64]) -> Iterator[Pairs]:
    """Pairs (n, 2) out of ``order`` whose parts are equal, at most NEIGHBOURS apart."""
    for distance in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
        at = np.flatnonzero(sorted_parts[distance:] == sorted_parts[:-distance])
        if not len(at):
            return
        yield np.stack([order[at], order[at + distance]], axis=1)


def _count_ones(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many bits are set in each number, of an array (n, k)."""
    as_bytes = np.ascontiguousarray(numbers)[..., None].view(np.uint8)
    return np.asarray(np.unpackbits(as_bytes, axis=-1).sum(axis=-1), dtype=np.int64)
