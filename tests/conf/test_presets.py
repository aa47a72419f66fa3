"""The presets of ``experiment=``: each composes with a data set and a network of the user."""

from __future__ import annotations

import pytest

from conf import CONF_DIR
from conf.entry import compose
from conf.schema import TrainConfig


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")))
def test_presets_compose_with_data_and_network(name: str) -> None:
    given = ["data=shapes", "model=yolov4-tiny", "train.epochs=7"]
    config = compose("train", TrainConfig, [f"experiment={name}", *given])
    assert (config.model.cfg, config.train.epochs, config.data.format.value) == ("yolov4-tiny", 7, "shapes")
    assert config.name == (name if name == "quickstart" else f"{name}-shapes")
    tuned = name in ("finetune", "multi-scale", "single-class")
    assert config.model.weights == ("coco" if tuned else None)
    assert (CONF_DIR / "experiment" / f"{name}.yaml").read_text().startswith("# @package _global_\n# ")
