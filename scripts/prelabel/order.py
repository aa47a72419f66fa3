"""In which order to label pictures: the least certain first, and none like those before it."""

import numpy as np

LOWEST = 0.05  # scores up to this say nothing
COMPARED = 1000  # pictures, at most, that all others are compared with: time stays linear in their number


def uncertainty(scores: np.ndarray) -> tuple[float, int | None]:
    """The uncertainty of a picture, 0..1, and its least certain detection, from its scores (n,).

    It is the largest 1 - |2 p - 1| of the scores p above LOWEST: 1 for a score of one half. A
    picture without any counts as one with a score of LOWEST, 0.1: it may hold what was missed.
    """
    above = np.flatnonzero(scores > LOWEST)
    least = int(above[np.argmin(np.abs(scores[above] - 0.5))]) if len(above) else None
    return 1 - abs(2 * (LOWEST if least is None else float(scores[least])) - 1), least


def labelling_order(uncertainties: np.ndarray, features: np.ndarray) -> list[tuple[int, float, int]]:
    """Order N pictures by their uncertainties (N,) and features (N, C) of unit length.

    Returns the number of each picture, its distance to the nearest of those before it, and the
    number of that one; for the first 2, the largest distance, and itself.

    This is the farthest-first traversal for core-sets (Sener and Savarese 2018, algorithm 1) with
    weights. The first is the most uncertain picture. Next is always that with the largest product
    of uncertainty and Euclidean distance to the nearest of those before it: a copy of an earlier
    one has 0. Equal ones keep their order. After COMPARED pictures the others follow by the product
    as it is then, so time is O(N COMPARED C) and memory O(N C).
    """
    distances, nearest = np.full(len(features), 2.0), np.arange(len(features))
    left, order = np.ones(len(features), dtype=bool), []
    for _ in range(min(len(features), COMPARED)):
        chosen = int(np.argmax(np.where(left, uncertainties * distances, -1)))
        order.append(chosen)
        left[chosen] = False
        to_chosen = np.where(left, np.linalg.norm(features - features[chosen], axis=1), np.inf)
        nearest[to_chosen < distances] = chosen
        distances = np.minimum(distances, to_chosen)
    order += sorted(np.flatnonzero(left).tolist(), key=lambda number: -uncertainties[number] * distances[number])
    return [(number, float(distances[number]), int(nearest[number])) for number in order]
