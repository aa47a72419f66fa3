"""Whether a gain in AP is real: a paired bootstrap over the validation images."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from data.progress import tracked
from train_utils.coco_eval import Evaluation, Matches, find_matches

SIMULATED = 200_000  # sums of two errors, for their quantiles
RECALLS = np.linspace(0, 1, 101)


class Gain(NamedTuple):
    """The AP of a setting minus that of another, or a part of it, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    def sentence(self) -> str:
        """The verdict: a gain is real if its interval excludes 0."""
        if self.low == self.high == 0:
            return f"equal: no difference in AP over {self.source}"
        word = "gain" if self.value >= 0 else "loss"
        verdict = "is real" if self.low > 0 or self.high < 0 else "is unproven"
        interval = f"95% interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def gain(first: Sequence[Evaluation], second: Sequence[Evaluation], resamples: int, seed: int) -> Gain:
    """The gain from the runs of one setting to those of another, all scored on the same images."""
    draws = draw_images(len(first[0].truth.image_ids), resamples, seed)
    return with_interval(resampled_aps(first, draws), resampled_aps(second, draws), seed)


def draw_images(images: int, resamples: int, seed: int) -> ndarray:
    """How often N images are in samples of N, int (1 + resamples, N); in the first once each."""
    chances = np.full(images, 1 / images)
    draws = np.random.default_rng(seed).multinomial(images, chances, resamples)
    return np.concatenate([np.ones((1, images), int), draws])


def with_interval(first: ndarray, second: ndarray, seed: int) -> Gain:
    """The gain from one setting to another, by the ``resampled_aps`` of their runs.

    Several runs of a setting add the error over seeds: Student's t with the pooled variance of AP.
    """
    value, *samples = second.mean(0) - first.mean(0)
    values = value + samples - np.mean(samples)
    source = "images"
    freedom = len(first) + len(second) - 2
    if freedom:
        source = "images and seeds"
        squares = first[:, 0].var() * len(first) + second[:, 0].var() * len(second)
        variance = squares / freedom * (1 / len(first) + 1 / len(second))
        generator = np.random.default_rng(seed)
        of_images = generator.choice(values, SIMULATED)
        of_seeds = generator.standard_t(freedom, SIMULATED) * np.sqrt(variance)
        values = of_images + of_seeds
    low, high = np.quantile(values, (0.025, 0.975))
    return Gain(float(value), float(low), float(high), source)


def resampled_aps(runs: Sequence[Evaluation], draws: ndarray) -> ndarray:
    """The AP of each run (rows) in each sample (columns) of ``draws``, int (samples, images).

    AP is pycocotools' mean over the classes with boxes, the IoUs and 101 recalls of the best
    precision at that recall or a higher one.
    """
    matches = [find_matches(run.truth, run.detections, ious=10) for run in runs]
    return np.array([resampled_ap(of_run, draws) for of_run in matches])


def resampled_ap(matches: Matches, draws: ndarray) -> ndarray:
    """The AP in each sample (rows of ``draws``) of the IoUs that ``matches`` has."""
    labels = draws @ matches.boxes.T  # of each class in each sample
    total = np.zeros(len(draws))
    by_score = np.argsort(-matches.scores, kind="stable")
    classes_by_score = matches.classes[by_score]
    for index in tracked(range(len(matches.boxes)), len(matches.boxes), "AP of samples", "class"):
        of_class = by_score[classes_by_score == index]
        images = matches.images[of_class]
        right = matches.right[:, of_class]
        wrong = matches.wrong[:, of_class]
        for sample in np.flatnonzero(labels[:, index]):
            times = draws[sample, images]
            found = (right * times).cumsum(1)
            reported = found + (wrong * times).cumsum(1)
            precision = found / np.maximum(reported, 1)
            best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
            recall = found / labels[sample, index]
            for iou in range(len(right)):
                at = np.searchsorted(recall[iou], RECALLS)
                total[sample] += best[iou, at[at < len(of_class)]].sum()
    classes = np.maximum((labels > 0).sum(1), 1)
    means: ndarray = total / classes / len(matches.right) / len(RECALLS)
    return means
