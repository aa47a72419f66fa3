"""The curves of a training show its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train_utils.plots import LEAST_SMOOTHED, MOST_POINTS, draw_curves, smooth

OUT = Path("unused.png")


def lines_of(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its label."""
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axis.lines
    }


@pytest.mark.parametrize("epochs", [0, 1, 2, 7, 300])
def test_any_number_of_epochs(epochs: int, tmp_path: Path, kept: list[Figure]) -> None:
    table = tmp_path / "metrics.csv"
    rows = "".join(f"{epoch},{5 * epoch},0.01,5.5,0.0{epoch % 10},-1.0\n" for epoch in range(1, epochs + 1))
    table.write_text("epoch,step,lr,loss,AP,APs\n" + rows)
    draw_curves(table, OUT)
    for axis in kept[0].axes:
        if epochs:
            assert axis.get_xlim()[0] == 0 and axis.get_xlim()[1] >= 5 * epochs
            assert axis.get_xlabel() == "step (5 per epoch)"
        if "AP" in axis.get_title() or "precision" in axis.get_title():
            highest = max((max(float(y) for y in line.get_ydata()) for line in axis.lines[:-1]), default=0)
            assert axis.get_ylim()[0] == 0 and highest < axis.get_ylim()[1] <= 1
    said = [text.get_text() for text in kept[0].axes[2].texts]
    assert said == ["no figures"], "an evaluation without boxes of a size has no curve"


def test_curves_are_the_columns_over_steps_and_the_first_best_epoch_is_marked(
    tmp_path: Path, kept: list[Figure]
) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text(
        "epoch,step,lr,loss,AP,AP50\n1,10,0.01,5.5,,\n2,20,0.02,4.5,0.1,0.3\n3,30,0.01,4.0,-1.0,-1.0\n4,40,0.0,4,0.1,0.2\n"
    )
    draw_curves(table, OUT)
    loss, precision, by_size, rate = map(lines_of, kept[0].axes)
    assert loss.pop("best: epoch 2") == [(20, 0), (20, 1)]
    assert loss == {"loss": [(10, 5.5), (20, 4.5), (30, 4.0), (40, 4.0)]}
    assert precision.pop("best: epoch 2, AP 0.100")[0][0] == 20
    assert precision == {"AP": [(20, 0.1), (40, 0.1)], "AP50": [(20, 0.3), (40, 0.2)]}
    assert by_size == {} and rate["lr"] == [(10, 0.01), (20, 0.02), (30, 0.01), (40, 0.0)]


def test_a_long_curve_is_smoothed_over_the_figures_themselves(tmp_path: Path, kept: list[Figure]) -> None:
    count = 10 * LEAST_SMOOTHED
    noise = np.random.default_rng(0).normal(0, 0.3, count)
    falling = 5 - np.arange(count) / count
    table = tmp_path / "metrics.csv"
    rows = "".join(f"{n + 1},{n + 1},{falling[n]},{falling[n] + noise[n]}\n" for n in range(count))
    table.write_text("epoch,step,lr,loss\n" + rows)
    draw_curves(table, OUT)
    raw, smoothed = (np.asarray(line.get_ydata(), float) for line in kept[0].axes[0].lines)
    assert np.allclose(raw, falling + noise)
    assert np.abs(smoothed - falling)[10:-10].max() < 0.35 * np.abs(noise).max()
    (rate,) = (np.asarray(line.get_ydata(), float) for line in kept[0].axes[3].lines)
    assert np.allclose(rate, falling), "the learning rate is shown as it was"


def test_losses_by_step_are_used_where_there_are_more_of_them(tmp_path: Path, kept: list[Figure]) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,lr,loss,AP\n1,5000,0.01,5.5,0.1\n2,10000,0.01,4.5,0.2\n")
    rows = "".join(f"{step},{1e4 - step}\n" for step in range(1, 10_001))
    (tmp_path / "steps.csv").write_text("step,loss\n" + rows)
    draw_curves(tmp_path / "metrics.csv", OUT)
    losses, precision = (axis.lines[0].get_data() for axis in kept[0].axes[:2])
    assert len(losses[0]) == MOST_POINTS and np.allclose(np.asarray(losses[1]), 1e4 - np.asarray(losses[0]))
    assert list(zip(*precision, strict=True)) == [(5000, 0.1), (10000, 0.2)]


def test_smoothing_keeps_lines_does_not_lag_and_takes_one_value() -> None:
    assert smooth(np.array([3.0])).tolist() == [3.0]
    assert np.allclose(smooth(np.full(50, 2.0)), 2.0)
    straight = np.arange(100.0)
    assert np.allclose(smooth(straight)[15:-15], straight[15:-15])
