"""Whether one setting is better than another, or only luckier in its images or seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

import hotcoco
import numpy as np

from train_utils.report.best import Best
from train_utils.report.groups import Group
from train_utils.scores.coco_backends import columns, hotcoco_evaluation

Interval = tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """The difference of two settings in AP, the second minus the first, with its intervals."""

    value: float
    images: Interval  # had other images been drawn for validation
    seeds: Interval | None  # had other seeds been drawn; None if a setting has one run only
    confidence: float

    @property
    def is_real(self) -> bool:
        """Whether no interval holds 0."""
        return all(low > 0 or high < 0 for low, high in filter(None, (self.images, self.seeds)))

    def sentence(self) -> str:
        """The verdict in plain words."""
        word = "gain" if self.value >= 0 else "loss"
        verdict = "is real" if self.is_real else "is not shown"
        low, high = self.images
        text = (
            f"the {word} of {abs(self.value):.3f} AP {verdict}: {self.confidence:.0%} interval "
            f"{low:+.3f} to {high:+.3f} over the images"
        )
        if self.seeds is None:
            return f"{text}; seeds were not compared"
        return f"{text}, {self.seeds[0]:+.3f} to {self.seeds[1]:+.3f} over the seeds"


def gain(first: Group, second: Group, resamples: int, confidence: float, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    Over images: a bootstrap that draws the same images for both sides (hotcoco). With several runs,
    each is paired with one of the other side, and the bounds are averaged around the gain. That is
    exact if the pairs err on the same images, and wide otherwise. Over seeds: Welch's interval for
    the difference of two means (Welch 1947).
    """
    value = second.mean() - first.mean()
    pairs = max(len(first.runs), len(second.runs))
    bounds = []
    for number in range(pairs):
        before, after = (group.best[number % len(group.best)] for group in (first, second))
        compared = compare(before, after, resamples, confidence, seed)
        delta, found = compared["deltas"]["AP"], compared["ci"]["AP"]
        bounds.append((found["lower"] - delta, found["upper"] - delta))
    low, high = (value + fmean(side) for side in zip(*bounds, strict=True))
    return Gain(value, (low, high), welch(first.figures("AP"), second.figures("AP"), confidence), confidence)


def compare(first: Best, second: Best, resamples: int, confidence: float, seed: int) -> dict[str, Any]:
    """Hotcoco's comparison of two evaluations of the same images."""
    evaluations: list[Any] = []
    for best in (first, second):
        truth = best.truth
        evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, best.detections))
        # Boxes of all sizes are enough for AP, and take a quarter of the time.
        parameters = evaluation.params
        parameters.area_rng, parameters.area_rng_lbl = parameters.area_rng[:1], parameters.area_rng_lbl[:1]
        evaluation.params = parameters
        evaluation.evaluate()
        evaluations.append(evaluation)
    return dict(
        hotcoco.compare(evaluations[0], evaluations[1], n_bootstrap=resamples, seed=seed, confidence=confidence)
    )


def welch(first: list[float], second: list[float], confidence: float) -> Interval | None:
    """The interval of the difference of two means; None if a side has one value only."""
    if min(len(first), len(second)) < 2:
        return None
    errors = [variance(side) / len(side) for side in (first, second)]
    middle, error = fmean(second) - fmean(first), sum(errors) ** 0.5
    if error == 0:
        return middle, middle
    terms = [each**2 / (len(side) - 1) for each, side in zip(errors, (first, second), strict=True)]
    reach = student(sum(errors) ** 2 / sum(terms), confidence) * error
    return middle - reach, middle + reach


def student(freedom: float, confidence: float) -> float:
    """The number that Student's t exceeds in size with probability ``1 - confidence``.

    With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1), which has no tails
    to cut off.
    """
    angles = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(freedom**0.5 * np.tan(np.interp(confidence, share / share[-1], angles)))
