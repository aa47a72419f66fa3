"""How long a training still takes, evaluations included."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

FORWARD_SHARE = 0.4  # of a training step: guess of the cost of an image in an evaluation
RECENT = 5  # epochs and evaluations that count


class TimeLeft:
    """The time until the last epoch of a training, judged by what this process did."""

    def __init__(self, epochs: int, evaluations: Collection[int], evaluation_ratio: float) -> None:
        """``evaluations`` are the epochs (from 1) that end with one.

        ``evaluation_ratio`` is the number of images of an evaluation to that of an epoch.
        """
        self._epochs, self._evaluations = epochs, evaluations
        self._evaluation_ratio = evaluation_ratio
        self._trained: list[float] = []  # seconds of whole epochs, without their evaluation
        self._evaluated: list[float] = []

    def trained(self, seconds: float, steady: float) -> None:
        """Count an epoch: its ``seconds``, or if it is the first ``steady``, without its start."""
        self._trained.append(seconds if self._trained else steady)

    def evaluated(self, seconds: float) -> None:
        """Count an evaluation."""
        self._evaluated.append(seconds)

    def seconds(self, epoch: int, share: float, whole: float = 0.0) -> float:
        """Seconds left when ``share`` of ``epoch`` (from 1) is done.

        ``whole`` is the length of this epoch at its pace so far. It counts by ``share`` beside the
        earlier epochs: a machine that is busier now, or a mosaic that was closed, shows at once.
        """
        if self._trained:
            whole = share * whole + (1 - share) * median(self._trained[-RECENT:])
        evaluation = whole * self._evaluation_ratio * FORWARD_SHARE
        if self._evaluated:
            evaluation = median(self._evaluated[-RECENT:])
        evaluations = sum(each >= epoch for each in self._evaluations)
        return whole * (self._epochs - epoch + 1 - share) + evaluation * evaluations
