"""``model.anchors=auto``: what is fitted, in which rows it stands, and when nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data import anchors as anchor_choice
from data.anchors import FIT_RECALL, GAIN, Sizes, best_overlaps, choose_anchors

SIDE = 100
PLANTED = np.array([[6.0, 8.0], [12.0, 30.0], [60.0, 50.0]])
FAR = np.array([[200.0, 10.0], [10.0, 300.0], [400.0, 400.0], [2.0, 90.0]])


def boxes(sizes: np.ndarray, crowd: bool = False) -> Any:
    """The index of one image with boxes of these sizes in pixels, letterboxed as it is."""
    count = len(sizes)
    return SimpleNamespace(
        classes=np.zeros(count, np.int32),
        crowd=np.full(count, crowd),
        boxes_xywh=np.concatenate([np.zeros((count, 2)), sizes], axis=1).reshape(count, 4),
        offsets=np.array([0, count]),
        sizes=np.array([[SIDE, SIDE]]),
    )


@pytest.mark.parametrize("slots", [[0, 1, 2], [3, 0, 2]])
def test_planted_sizes_fill_the_rows_in_use_from_small_to_large(tmp_path: Path, slots: list[int]) -> None:
    sizes = np.repeat(PLANTED, 40, axis=0) * np.random.default_rng(0).uniform(0.95, 1.05, (120, 2))
    found, sentence = choose_anchors(boxes(sizes), SIDE, FAR, slots, 0.2, tmp_path)
    assert found is not None
    np.testing.assert_allclose(found[slots], PLANTED, rtol=0.05)
    unused = [row for row in range(len(FAR)) if row not in slots]
    assert (found[unused] == FAR[unused]).all()
    assert sentence.startswith("recall at IoU 0.5 is 0.000 with the anchors of the .cfg, 1.000 with anchors fitted")
    again, said = choose_anchors(boxes(sizes), SIDE, FAR, slots, None, tmp_path / "another")
    assert again is not None and (again == found).all() and said == sentence


def test_anchors_of_the_cfg_stay_unless_the_fit_gains_enough(tmp_path: Path) -> None:
    """One anchor for boxes of one size, so that the fit is exact."""
    sizes = np.full((30, 2), 20.0)
    for lacking, stays in ((GAIN - 0.001, True), (GAIN + 0.001, False)):
        current = np.array([[20.0, 20.0 * (1 - lacking)]])
        assert best_overlaps(sizes, current)[0] == pytest.approx(1 - lacking)
        found, sentence = choose_anchors(boxes(sizes), SIDE, current, [0], 0.999, tmp_path)
        assert (found is None) is stays, sentence
        assert ("the anchors of the .cfg stay: recall at IoU 0.5 is 1.000" in sentence) is stays


@pytest.mark.parametrize("sizes", [[[20.0, 30.0]] * 9, [[20.0, 30.0]], [[20.0, 30.0], [5.0, 5.0]]])
def test_fewer_sizes_than_anchors_are_fitted_with_neighbours(tmp_path: Path, sizes: list[list[float]]) -> None:
    found, _ = choose_anchors(boxes(np.array(sizes)), SIDE, FAR, [0, 1, 2, 3], None, tmp_path)
    assert found is not None and len(np.unique(found, axis=0)) == 4
    assert best_overlaps(np.array(sizes), found).min() > 0.99


def test_no_boxes_and_tiny_boxes(tmp_path: Path) -> None:
    for nothing in (boxes(np.zeros((0, 2))), boxes(PLANTED, crowd=True)):
        found, sentence = choose_anchors(nothing, SIDE, FAR, [0, 1], 0.2, tmp_path)
        assert found is None and "no boxes to fit to" in sentence
    found, _ = choose_anchors(
        boxes(np.array([[0.01, 0.02], [0.03, 0.01], [1.3, 1.4]])), SIDE, FAR, [0, 1], 0.2, tmp_path
    )
    assert found is not None and found[:2].min() >= 1


@pytest.mark.parametrize("missed", [0, 1])
def test_anchors_near_the_boxes_stay_however_well_others_fit(tmp_path: Path, missed: int) -> None:
    """Boxes of 20 x 20 overlap an anchor of 40 x 40 by a quarter, thin ones by less."""
    sizes, current = np.full((100, 2), 20.0), np.array([[40.0, 40.0]])
    sizes[: round((1 - FIT_RECALL) * len(sizes)) + missed] = [20.0, 3.0]
    found, sentence = choose_anchors(boxes(sizes), SIDE, current, [0], 0.2, tmp_path)
    assert (found is None) == (missed == 0)
    stays = "the anchors of the .cfg stay: 70.0% of the boxes overlap one by more than 0.2, and a closer fit can cost"
    assert sentence.startswith(stays) == (missed == 0), sentence
    of_darknet, said = choose_anchors(boxes(sizes), SIDE, current, [0], None, tmp_path)
    assert (of_darknet is None) == (missed == 0) and said == sentence


def test_a_fit_is_made_once_for_the_same_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start reads it, whatever the heads are; other sizes and numbers are fitted anew."""
    fits: list[Sizes] = []
    fit = anchor_choice._fit
    monkeypatch.setattr(anchor_choice, "_fit", lambda *given: (fits.append(fit(*given)), fits[-1])[1])
    sizes = np.repeat(PLANTED, 9, axis=0) * np.random.default_rng(0).uniform(0.9, 1.1, (27, 2))

    def found(boxes: Any, side: int = SIDE, slots: Sequence[int] = (0, 1, 2), folder: Path = tmp_path) -> list[Any]:
        anchors, sentence = choose_anchors(boxes, side, FAR, slots, 0.2, folder)
        assert anchors is not None
        return [anchors[list(slots)].tolist(), sentence]

    first = found(boxes(sizes))
    assert found(boxes(sizes)) == first and len(fits) == 1
    assert found(boxes(sizes), slots=(3, 0, 2))[0] == first[0] and len(fits) == 1
    for number, changed in enumerate((lambda: found(boxes(sizes), 2 * SIDE), lambda: found(boxes(sizes[1:])),
                                      lambda: found(boxes(sizes), slots=(0, 1)))):  # fmt: skip
        assert changed() != first and len(fits) == 2 + number
    for kept in tmp_path.iterdir():
        kept.write_text(kept.read_text()[:-9])
    assert found(boxes(sizes)) == first and len(fits) == 5, "half a file"
    (tmp_path / "file").touch()
    assert found(boxes(sizes), folder=tmp_path / "file" / "index") == first and len(fits) == 6, "no place to keep it"
