"""train.overfit: images that are learnt by heart, and what is said if they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf import GROUPS_DIR
from conf.build.report import check_overfit
from conf.entry import compose
from conf.schema import TrainConfig
from data import Annotations, DataError, ShapesConfig, ensure_shapes, first_images, images_of, open_annotations
from train import train
from train_utils.errors import TrainError


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("overfit")
    ensure_shapes(folder / "shapes", ShapesConfig(train_images=6, val_images=2, image_size=64, seed=0))
    return [
        "data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.outlines=true",
        "data.shapes={train_images: 6, val_images: 2, image_size: 64, seed: 0}", "train.image_size=64",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def images(given: list[str]) -> Annotations:
    return open_annotations(compose("train", TrainConfig, given).data, "train")


@pytest.mark.parametrize("name", sorted(path.stem for path in (GROUPS_DIR / "experiment").glob("*.yaml")))
def test_presets_compose_with_data_and_network(name: str, given: list[str]) -> None:
    config = compose("train", TrainConfig, [f"experiment={name}", *given, "model=yolov4-tiny", "train.epochs=7"])
    assert (config.model.cfg, config.train.epochs, config.data.format.value) == ("yolov4-tiny", 7, "shapes")
    assert config.name == (name if name == "quickstart" else f"{name}-shapes")
    tuned = name in ("finetune", "multi-scale", "single-class")
    assert config.model.weights == ("coco" if tuned else None)
    assert (GROUPS_DIR / "experiment" / f"{name}.yaml").read_text().startswith("# @package _global_\n# ")


def test_a_few_images_are_learnt_by_heart(tmp_path: Path) -> None:
    """At 128 pixels any seed tried gets there; smaller objects are too much for so few steps."""
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=6, val_images=2, image_size=128, seed=0))
    given = [
        "data=shapes", f"data.root={tmp_path / 'shapes'}", f"data.index_dir={tmp_path / 'index'}",
        "data.shapes={train_images: 6, val_images: 2, image_size: 128, seed: 0}", "train.image_size=128",
    ]  # fmt: skip
    more = ["train.overfit=2", "train.batch_size=2", "train.epochs=8", "model.width=0.25", "data.cache=none"]
    more += ["train.device=cpu", "logger.pictures=false", f"run_dir={tmp_path / 'run'}"]
    assert train(compose("train", TrainConfig, ["experiment=overfit", *given, *more]))["AP50"] >= 0.95
    log = (tmp_path / "run" / "train.log").read_text()
    assert "train: 50 images" in log and "val: 2 images" in log


def test_chosen_images_keep_all_that_belongs_to_them(images: Annotations) -> None:
    some = images_of(images, np.array([3, 0, 3]))
    for mine, theirs in enumerate((3, 0, 3)):
        assert some.path(mine) == images.path(theirs) and some.image_ids[mine] == images.image_ids[theirs]
        for ours, before in zip(some.training_boxes(mine), images.training_boxes(theirs), strict=True):
            assert np.array_equal(ours, before) and len(ours)
        for box in range(some.offsets[mine + 1] - some.offsets[mine]):
            ours, before = some.outlines.of(some.offsets[mine] + box), images.outlines.of(images.offsets[theirs] + box)
            assert ours and all(map(np.array_equal, ours, before))
    assert first_images(images, 2).tolist() == [0, 1]
    crowd = np.zeros_like(images.crowd)
    crowd[images.offsets[0] : images.offsets[1]] = True
    assert first_images(replace(images, crowd=crowd), 2).tolist() == [1, 2]
    with pytest.raises(DataError, match=r"train\.overfit=7: only 6 training images have objects\. fix:"):
        first_images(images, 7)


@pytest.mark.parametrize(
    ("reached", "anchor", "size", "said"),
    [
        (0.94, (400.0, 3.0), 64, r"100\.0% of the boxes overlap no anchor .* fix: .*anchors"),
        (0.94, (4.0, 4.0), 16, r"of the boxes are smaller than 8 pixels .* fix: train\.image_size=32"),
        (0.94, (14.0, 14.0), 64, r"it was learning, but not for long enough\. fix: train\.epochs=6"),
        (0.1, (14.0, 14.0), 64, r"fix: look at train_batch\.jpg; then a lower optim\.lr"),
        (0.95, (400.0, 3.0), 64, None),
    ],
)
def test_the_likely_cause_is_named(
    reached: float, anchor: tuple[float, float], size: int, said: str | None, given: list[str], images: Annotations
) -> None:
    for on in (True, False):
        more = [f"train.overfit={6 * on}", f"train.image_size={size}", "train.epochs=3"]
        config = compose("train", TrainConfig, [*given, *more])
        state: Any = SimpleNamespace(best_figures={"AP50": reached})
        heads: Any = [SimpleNamespace(anchors=[anchor])]
        if said is None or not on:
            check_overfit(config, state, heads, images)
            continue
        with pytest.raises(TrainError, match=rf"AP50 is {reached:.3f} on the 6 images it learnt from: .*{said}"):
            check_overfit(config, state, heads, images)
