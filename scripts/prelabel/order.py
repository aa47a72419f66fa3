"""In which order to label pictures: uncertain ones first, similar ones last."""

import numpy as np

LOWEST = 0.05  # scores up to this are ignored
COMPARED = 1000  # at most so many pictures are compared with all others, so time stays linear in N


def uncertainty(scores: np.ndarray) -> float:
    """The uncertainty of a picture, 0..1, from the scores (n,) of its detections.

    It is the largest 1 - |2 p - 1| over the scores p above LOWEST: 1 for a score of 0.5. A picture
    without such scores counts as if it had a score of LOWEST, which gives 0.1: the network may have
    missed its objects.
    """
    certainties = np.abs(2 * scores[scores > LOWEST] - 1)
    return 1 - float(certainties.min()) if len(certainties) else 2 * LOWEST


def labelling_order(uncertainties: np.ndarray, features: np.ndarray) -> list[tuple[int, float]]:
    """Order N pictures by their uncertainties (N,) and features (N, C) of unit length.

    Returns for each picture its number and its distance to the nearest earlier picture. The first
    picture has the largest possible distance, 2.

    This is the farthest-first traversal for core-sets (Sener and Savarese 2018, algorithm 1) with
    weights. The most uncertain picture is first. Each next picture has the largest product of
    uncertainty and Euclidean distance to the nearest earlier one; for a copy of an earlier picture
    it is 0. Ties keep their order. After COMPARED pictures the others are sorted by their product
    at that point, so time is O(N COMPARED C) and memory O(N C).
    """
    distances, left, order = np.full(len(features), 2.0), np.ones(len(features), dtype=bool), list[int]()
    for _ in range(min(len(features), COMPARED)):
        chosen = int(np.argmax(np.where(left, uncertainties * distances, -1)))
        order.append(chosen)
        left[chosen] = False
        to_chosen = np.where(left, np.linalg.norm(features - features[chosen], axis=1), np.inf)
        distances = np.minimum(distances, to_chosen)
    order += sorted(np.flatnonzero(left).tolist(), key=lambda number: -uncertainties[number] * distances[number])
    return [(number, float(distances[number])) for number in order]
