"""Whether one setting is better than another, or only luckier in its images or seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hotcoco
import numpy as np

from train_utils.report.best import Best
from train_utils.report.groups import Group
from train_utils.scores.coco_backends import columns, hotcoco_evaluation
from train_utils.terminal import Progress

DRAWS = 200_000  # for the quantiles of a sum of errors


@dataclass(frozen=True)
class Gain:
    """The difference of two settings in AP, the second minus the first, with its interval."""

    value: float
    low: float
    high: float
    confidence: float
    source: str  # of the error: "images", or "images and seeds"

    @property
    def is_real(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low > 0 or self.high < 0

    def sentence(self) -> str:
        """The verdict in plain words."""
        word, verdict = "gain" if self.value >= 0 else "loss", "is real" if self.is_real else "is unproven"
        interval = f"{self.confidence:.0%} interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def gain(first: Group, second: Group, resamples: int, confidence: float, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    The error over images is that of a bootstrap, which draws the same images for all runs. hotcoco
    1.3 scores a drawn image once, however often it was drawn. That is a delete-d jackknife, whose
    errors are scaled by the root of the shares kept and left out (Shao and Wu 1989). Where a
    setting has several runs, Student's t with the pooled variance of AP adds the error over seeds.
    """
    value, counts = second.mean() - first.mean(), (len(first.runs), len(second.runs))
    deltas = np.zeros(resamples)
    title = f"{second.letter} against {first.letter}"
    with Progress(max(counts) * resamples, title, enabled=True, unit="draw") as progress:
        for number in range(max(counts)):
            before, after = (group.best[number % len(group.best)] for group in (first, second))
            for draw, delta in enumerate(bootstrap(before, after, resamples, seed)):
                deltas[draw] += delta / max(counts)
                progress.advance(1)
    generator, images = np.random.default_rng(seed), len(first.best[0].truth.image_ids)
    left_out = (1 - 1 / images) ** images or 1.0  # share of the images; of one image none
    values = value + ((1 - left_out) / left_out) ** 0.5 * generator.choice(deltas - deltas.mean(), DRAWS)
    if freedom := sum(counts) - 2:
        squares = sum(np.var(group.figures()) * len(group.runs) for group in (first, second))
        error = (squares / freedom * sum(1 / count for count in counts)) ** 0.5
        values += error * generator.standard_t(freedom, DRAWS)
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gain(value, float(low), float(high), confidence, "images and seeds" if freedom else "images")


def bootstrap(first: Best, second: Best, resamples: int, seed: int) -> Iterator[float]:
    """The difference in AP on each of so many drawings of the images, the second minus the first.

    The images that hotcoco draws depend on ``seed`` and their number only. One at a time takes
    twice the time of all at once, but shows progress.
    """
    sides = [evaluated(first), evaluated(second)]
    for number in range(resamples):
        drawn: Any = hotcoco.compare(sides[0], sides[1], n_bootstrap=1, seed=seed * resamples + number)
        yield drawn["ci"]["AP"]["lower"]


def evaluated(best: Best) -> Any:
    """Hotcoco's evaluation over boxes of all sizes: enough for AP, in a quarter of the time."""
    truth = best.truth
    evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, best.detections))
    parameters = evaluation.params
    parameters.area_rng, parameters.area_rng_lbl = parameters.area_rng[:1], parameters.area_rng_lbl[:1]
    evaluation.params = parameters
    evaluation.evaluate()
    return evaluation
