"""Tiles of one image on one canvas, against bilinear interpolation at each pixel's centre."""

import numpy as np
import pytest

from data.geometry import Image, Matrix
from data.tiles import UprightTile, WarpedTile, tile_of

SIDE = 60
EMPTY = 250  # what the canvas holds where no image is; the ramps stay below


def ramps() -> Image:
    """Ramps: the first channel tells the column, the second the row, four levels a pixel."""
    y, x = np.mgrid[:SIDE, :SIDE]
    return np.stack([4 * x, 4 * y, np.zeros_like(x)], axis=2).astype(np.uint8)


def expected(matrix: Matrix, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Levels (h, w, 2) of the ramps on the canvas, and which pixels (h, w) lie well inside."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    points = np.stack([(x - matrix[0, 2]) / matrix[0, 0], (y - matrix[1, 2]) / matrix[1, 1]], axis=2)
    inside = np.all((points > 1) & (points < SIDE - 1), axis=2)
    return 4 * (points - 0.5), inside


@pytest.mark.parametrize("at_end", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("mirrored", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_resized_tile_samples_where_its_matrix_says(at_end: tuple[int, int], mirrored: tuple[int, int]) -> None:
    """``at_end``: the last column or row of the image, not the first, lands on a whole pixel."""
    generator = np.random.default_rng(0)
    differences, resized, flipped = [], 0, 0
    for _ in range(60):
        matrix, size = np.eye(3), (int(generator.integers(20, 90)), int(generator.integers(20, 90)))
        for axis in (0, 1):
            factor = float(generator.uniform(0.4, 1.7)) * (-1 if mirrored[axis] else 1)
            side = size[1 - axis]
            grows = bool(at_end[axis]) == bool(mirrored[axis])
            edge = int(generator.integers(-5, side - 5)) if grows else int(generator.integers(5, side + 5))
            matrix[axis, axis], matrix[axis, 2] = factor, edge - factor * SIDE * at_end[axis]
        tile = tile_of(matrix, (SIDE, SIDE), size)
        if not isinstance(tile, UprightTile):
            assert tile is None or isinstance(tile, WarpedTile)
            continue
        resized += 1
        flipped += tile.rows.from_end or tile.columns.from_end
        canvas = np.full((*size, 3), EMPTY, dtype=np.uint8)
        image = ramps()
        image[tile.last_row :] = EMPTY  # rows that it says it does not need
        tile.draw(canvas, image)
        levels, inside = expected(matrix, size)
        difference = np.abs(canvas[..., :2] - levels)[inside]
        # Half a level by rounding to a whole one, one more by OpenCV's fixed-point weights; half a
        # pixel would be two.
        assert difference.max(initial=0) < 1.5, (matrix, tile)
        differences.append(difference.reshape(-1))
    assert np.concatenate(differences).mean() < 0.3
    assert resized > 40
    assert 0 < flipped < resized or at_end == (0, 0), "both ways were tried"
