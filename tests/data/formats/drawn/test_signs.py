"""Drawn signs: few, large, of alike looks, each with its whole mark in sight."""

from __future__ import annotations

import numpy as np
import pytest

from data.formats.drawn import signs


def test_signs_are_few_and_large_and_their_marks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[np.ndarray, np.ndarray]] = []
    original = signs._sign

    def recording(*arguments):
        tried.append(original(*arguments))
        return tried[-1]

    monkeypatch.setattr(signs, "_sign", recording)
    generator = np.random.default_rng(0)
    counts, kinds, shares = [], set(), []
    for _ in range(60):
        tried.clear()
        drawing = signs.draw_image(96, generator)
        counts.append(len(drawing.classes))
        kinds |= set(drawing.classes)
        assert np.sum(drawing.masks, axis=0, dtype=int).max() == 1, "every pixel once"
        for mask in drawing.masks:
            body, mark = next(pair for pair in tried if (mask <= pair[0]).all() and mask.sum() >= 0.8 * pair[0].sum())
            assert mark.any() and (mark <= mask).all(), "the mark decides the class"
            shares.append(body.sum() / body.size)
    assert kinds == set(range(len(signs.CLASSES))) and set(counts) == {1, 2, 3} and 1.6 < np.mean(counts) < 2.1
    assert min(shares) > 0.03 and 0.1 < np.mean(shares) < 0.3
