"""eval.py: protocols, and figures that others measured with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.entry import compose
from conf.schema import EvalConfig, TrainConfig
from data import ShapesConfig, ensure_shapes
from eval import evaluate
from train import train


@pytest.mark.slow
def test_darknet_weights_score_what_opencv_scores_with_them(shared_dir: Path, tmp_path: Path) -> None:
    """../shared/darknet/README.md: AP .161054, AP50 .369500 by pycocotools on OpenCV's detections."""
    network = shared_dir / "darknet" / "yolo-fastest-1.1"
    options = [
        "model=base", f"model.cfg={network / 'yolo-fastest-1.1.cfg'}", "evaluate=darknet", "evaluate.image_size=320",
        f"model.weights={network / 'yolo-fastest-1.1.weights'}", "data=coco", "data.val.images=images/val2017",
        f"data.root={shared_dir / 'data' / 'coco128'}", f"data.index_dir={tmp_path}", "data.workers=0", "device=cpu",
    ]  # fmt: skip
    figures = evaluate(compose("eval", EvalConfig, options))
    assert figures["AP"] == pytest.approx(0.161054, abs=0.001)
    assert figures["AP50"] == pytest.approx(0.369500, abs=0.001)


@pytest.mark.slow
def test_training_scores_as_the_evaluation_does_with_stretched_images(tmp_path: Path) -> None:
    shapes = ["data=shapes", f"data.root={tmp_path / 'shapes'}", f"data.index_dir={tmp_path / 'index'}"]
    shapes += ["data.workers=0", "data.shapes={train_images: 18, val_images: 5, image_size: 64, seed: 0}"]
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=18, val_images=5, image_size=64, seed=0))
    small = ["model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.batch_size=8", "train.epochs=1"]
    run = [f"run_dir={tmp_path / 'run'}", "logger.pictures=false"]
    trained = train(compose("train", TrainConfig, [*shapes, *small, *run, "evaluate=darknet"]))
    scored = {}
    for protocol in ("darknet", "coco"):
        options = [*shapes, "model=yolov3-tiny", f"ckpt={tmp_path / 'run'}", "evaluate.image_size=64"]
        scored[protocol] = evaluate(compose("eval", EvalConfig, [*options, f"evaluate={protocol}"]))
    assert trained == scored["darknet"] != scored["coco"]
