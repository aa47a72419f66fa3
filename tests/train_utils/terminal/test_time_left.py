"""The time left of trainings whose epochs and evaluations take drawn durations."""

from __future__ import annotations

import numpy as np
import pytest

from train_utils.terminal.time_left import TimeLeft


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [1, 5])
def test_it_is_right_within_a_tenth_after_the_first_epoch(every: int, seed: int) -> None:
    """Evaluations included, also before the first of them; the first epoch starts slowly."""
    generator = np.random.default_rng(seed)
    epochs, ratio = 20, 0.2
    evaluations = [epoch for epoch in range(1, epochs + 1) if epoch % every == 0]
    cost = generator.uniform(0.3, 0.6)  # of an image in an evaluation, in images of training
    trained = 60 * generator.uniform(0.95, 1.05, epochs)
    evaluated = 60 * ratio * cost * generator.uniform(0.9, 1.1, epochs)
    told = TimeLeft(epochs, evaluations, ratio)
    for epoch in range(1, epochs + 1):
        rest = trained[epoch:].sum() + sum(evaluated[each - 1] for each in evaluations if each > epoch)
        if epoch > 1:
            middle = rest + trained[epoch - 1] / 2 + evaluated[epoch - 1] * (epoch in evaluations)
            assert told.seconds(epoch, 0.5, trained[epoch - 1]) == pytest.approx(middle, rel=0.1)
        start = 45.0 * (epoch == 1)
        told.trained(trained[epoch - 1] + start, trained[epoch - 1])
        if epoch in evaluations:
            told.evaluated(evaluated[epoch - 1])
        assert told.seconds(epoch + 1, 0.0) == pytest.approx(rest, rel=0.1)


def test_before_an_epoch_has_ended_its_pace_counts() -> None:
    told = TimeLeft(3, [2, 3], 0.5)
    assert told.seconds(1, 0.5, whole=100) == pytest.approx(250 + 2 * 20, rel=0.01)


def test_a_pace_that_changes_shows_within_the_epoch() -> None:
    told = TimeLeft(10, [], 0.0)
    told.trained(100, 100)
    assert [told.seconds(2, share, whole=200) for share in (0.0, 0.5, 1.0)] == [900, 8.5 * 150, 8 * 200]
