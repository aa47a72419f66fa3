"""Losses of four recipes as they were: a change that moves a training has to say so.

``python -m tests.test_golden`` writes tests/golden.csv anew. Name the reason in CHANGELOG.md.
"""

import csv
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from data import ShapesConfig
from tests.small_run import small_run
from train import train

FILE = Path(__file__).with_name("golden.csv")
SHAPES = ShapesConfig(train_images=40, val_images=2, image_size=96)
RECIPES = {
    "default": ["model=yolov3-tiny-decoupled", "model.width=0.25"],
    "anchors": ["model=yolov3-tiny"],
    "archive": ["experiment=archive", "model=yolov4-tiny"],
    "fine-tuning": ["loss=darknet", "optim=adamw", "augment=strong"],
}


def losses_of(recipe: str, folder: Path) -> list[float]:
    more = [*RECIPES[recipe], "train.precision=float64", "train.batch_size=4", "train.epochs=2", "train.compile=off"]
    train(small_run(folder / "shapes", folder / recipe, *more, "logger.every_steps=1", shapes=SHAPES))
    with (folder / recipe / "steps.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "recipe", ["default", *(pytest.param(recipe, marks=pytest.mark.release) for recipe in list(RECIPES)[1:])]
)
def test_a_recipe_trains_as_before(recipe: str, tmp_path: Path) -> None:
    with FILE.open(newline="") as file:
        golden = [float(row[recipe]) for row in csv.DictReader(file)]
    # Another version of OpenCV rounds some pixels another way, which 20 steps multiply.
    assert losses_of(recipe, tmp_path) == pytest.approx(golden, rel=5e-3)


if __name__ == "__main__":
    with TemporaryDirectory() as folder, FILE.open("w", newline="") as file:
        columns = [losses_of(recipe, Path(folder)) for recipe in RECIPES]
        csv.writer(file).writerows([list(RECIPES), *zip(*columns, strict=True)])
    print(f"wrote {FILE}", file=sys.stderr)
