"""Whole trainings in this process, a few steps long: resume, options, initial weights, what a checkpoint holds."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import train as program
from conf.build import complete_from_checkpoint, model_from_checkpoint
from conf.entry import compose, layered
from conf.schema import EvalConfig, TrainConfig
from data import ShapesConfig, ensure_shapes
from eval import evaluate
from models import Darknet, ModelError, zoo_cfg
from models.weights import weight_tensors
from train import train
from train_utils.checkpoint import load_checkpoint, load_last
from train_utils.coco_eval import FIGURES
from train_utils.errors import CheckpointError, TrainError


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "shapes"
    ensure_shapes(path, ShapesConfig(train_images=18, val_images=5, image_size=64, seed=0))
    return path


def options(shapes: Path, run_dir: Path, *more: str) -> TrainConfig:
    return compose(
        "train",
        TrainConfig,
        [
            "data=shapes", f"data.root={shapes}", f"data.index_dir={shapes.parent / 'index'}", "data.workers=0",
            "data.shapes={train_images: 18, val_images: 5, image_size: 64, seed: 0}", "model=yolov3-tiny",
            "model.width=0.125", "train.image_size=64", "train.batch_size=8", "train.device_batch_size=4",
            "train.epochs=3", "evaluate.every=1", f"run_dir={run_dir}", *more,
        ],
    )  # fmt: skip


def write_darknet(model: Darknet, path: Path) -> Path:
    values = np.concatenate([tensor.tensor.detach().numpy().ravel() for tensor in weight_tensors(model)])
    path.write_bytes(np.array([0, 2, 5], "<i4").tobytes() + np.array([7], "<i8").tobytes() + values.tobytes())
    return path


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(one: Any, other: Any, key: str = "state") -> None:
    assert type(one) is type(other), key
    if isinstance(one, dict):
        assert one.keys() == other.keys(), key
        for name in one:
            assert_same(one[name], other[name], f"{key}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), key
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{key}[{number}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, key


def test_a_resumed_run_is_the_uninterrupted_one(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, average, optimiser, schedule and counters after the last epoch, bit for bit, and the table of epochs."""
    train(options(shapes, tmp_path / "whole"))
    epochs_begun = []
    whole_epoch = program.train_one_epoch

    def dies_in_the_second_epoch(**arguments: Any) -> Any:
        epochs_begun.append(arguments["step"])
        if len(epochs_begun) == 2:
            raise TrainError("power cut")
        return whole_epoch(**arguments)

    monkeypatch.setattr(program, "train_one_epoch", dies_in_the_second_epoch)
    with pytest.raises(TrainError, match="power cut"):
        train(options(shapes, tmp_path / "cut"))
    assert len(rows(tmp_path / "cut")) == 1
    monkeypatch.setattr(program, "train_one_epoch", whole_epoch)
    train(replace(options(shapes, tmp_path / "cut"), run_dir=None, resume=str(tmp_path / "cut")))

    whole, resumed = (load_last(tmp_path / name)[0] for name in ("whole", "cut"))
    for part in ("model", "ema", "ema_updates", "optimizer", "scheduler", "scaler", "epoch", "step", "best", "figures"):
        assert_same(whole[part], resumed[part], part)
    columns = [name for name in program.COLUMNS if name not in ("seconds", "images_per_second")]
    assert [[row[c] for c in columns] for row in rows(tmp_path / "whole")] == [
        [row[c] for c in columns] for row in rows(tmp_path / "cut")
    ]


def test_a_run_folder_is_not_trained_into_twice(shapes: Path, tmp_path: Path) -> None:
    config = options(shapes, tmp_path / "run", "train.epochs=1", "logger.pictures=false")
    train(config)
    with pytest.raises(TrainError, match=r"already holds a run\. fix: resume="):
        train(config)
    with pytest.raises(CheckpointError, match="network differs"):
        other = options(shapes, tmp_path / "run", "model.width=0.25")
        train(replace(other, run_dir=None, resume=str(tmp_path / "run")))
    assert "width: 0.125" in (tmp_path / "run" / "config.yaml").read_text(), "a refused resume changed the folder"


def test_the_options_of_such_repositories_do_what_they_say(shapes: Path, tmp_path: Path) -> None:
    config = options(
        shapes, tmp_path / "run", "data.single_class=true", "data.cache=ram", "model.freeze=4", "train.best_only=true",
        "train.multi_scale=[0.5,1.5]", "evaluate.every=0", "evaluate.rect=false", "train.precision=float32",
        "train.deterministic=true", "train.cudnn_benchmark=false", "train.channels_last=false", "loss.iou=ciou",
        "loss.focal_gamma=1.5", "loss.label_smoothing=0.1", "optim.clip_norm=10", "optim.decay=linear",
        "augment.degrees=10", "augment.shear=2", "augment.flip_vertical=0.5", "train.seed=7",
    )  # fmt: skip
    seen: list[tuple[int, ...]] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: seen.append(tuple(inputs[0].shape)) if isinstance(module, Darknet) else None
    )
    try:
        figures = train(config)
    finally:
        hook.remove()
        torch.use_deterministic_algorithms(False)
    assert set(figures) == set(FIGURES)
    table = rows(tmp_path / "run")
    assert [row["AP"] != "" for row in table] == [False, False, True], "evaluated after the last epoch only"
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"best.pt"}
    assert len({shape[-2:] for shape in seen}) > 1 and seen[0][-2:] == (96, 96), "largest size first"
    longer = replace(config, run_dir=None, resume=str(tmp_path / "run"), train=replace(config.train, epochs=4))
    train(longer)
    torch.use_deterministic_algorithms(False)
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["1", "2", "3", "4"], "best.pt did not serve to go on"
    assert len(list((tmp_path / "run").glob("config*.yaml"))) == 2
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert state["names"] == ["object"] and state["network"]["num_classes"] == 1
    torch.manual_seed(7)
    fresh = Darknet(zoo_cfg("yolov3-tiny"), 1, 0.125).state_dict()
    changed = {name.split(".")[1] for name, value in state["model"].items() if not torch.equal(value, fresh[name])}
    assert not changed & {"0", "1", "2", "3"} and "4" in changed, "frozen layers moved, or all stood still"
    assert not list(Path("/dev/shm").glob("hydra-yolov3-spp-*")), "the cache was left in memory"


def test_evaluation_needs_nothing_but_the_checkpoint(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = train(options(shapes, tmp_path / "run", "train.epochs=1"))
    monkeypatch.chdir(tmp_path)
    base = {"ckpt": str(tmp_path / "run"), "out": "out", "device": "auto", "timeout_seconds": 60, "debug": False}
    given = base | {"evaluate": vars(options(shapes, tmp_path / "x").evaluate)}
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EvalConfig), complete_from_checkpoint(given, [])))
    assert isinstance(config, EvalConfig)
    assert evaluate(config) == figures
    assert json.loads((tmp_path / "out" / "figures.json").read_text()) == figures
    table = capsys.readouterr().out
    assert all(name in table for name in ("AP50", "circle", "triangle"))
    with pytest.raises(TrainError, match=r"cannot be written .* fix: out="):
        evaluate(replace(config, out="/proc/nothing"))
    per_class = json.loads((tmp_path / "out" / "per_class.json").read_text())
    assert sum(row["boxes"] for row in per_class.values()) > 5


def test_initial_weights_from_a_checkpoint_and_from_darknet(shapes: Path, tmp_path: Path) -> None:
    train(options(shapes, tmp_path / "run", "train.epochs=1", "logger.pictures=false"))
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    trained, _ = model_from_checkpoint(load_checkpoint(best))
    darknet = write_darknet(trained, tmp_path / "trained.weights")
    for number, source in enumerate((best, darknet)):
        # Frozen layers stay as loaded; at a learning rate of next to nothing so do the kernels of the others.
        same = [
            "optim.lr=1e-12",
            "optim.burn_in_bias_lr=0",
            "model.freeze=22",
            "train.epochs=1",
            "logger.pictures=false",
        ]
        train(options(shapes, tmp_path / f"from{number}", f"model.weights={source}", *same))
        loaded = load_last(tmp_path / f"from{number}")[0]["ema"]
        for name, value in trained.state_dict().items():
            if not name.endswith("num_batches_tracked"):  # Darknet keeps no such counter
                torch.testing.assert_close(loaded[name], value, msg=name)
        with pytest.raises(ModelError, match=r"model\.freeze=24 leaves nothing to train"):
            train(options(shapes, tmp_path / "refused", "model.freeze=24"))
        single = ["data.single_class=true", "train.epochs=1", "logger.pictures=false"]
        with pytest.raises(ModelError, match=r"model\.fresh_heads=true"):
            train(options(shapes, tmp_path / "refused", f"model.weights={source}", *single))
        train(
            options(shapes, tmp_path / f"fresh{number}", f"model.weights={source}", "model.fresh_heads=true", *single)
        )
        assert not (tmp_path / "refused").exists()


def test_darknet_weights_are_scored_without_a_checkpoint(shapes: Path, tmp_path: Path) -> None:
    figures = train(options(shapes, tmp_path / "run", "train.epochs=1", "logger.pictures=false"))
    trained, _ = model_from_checkpoint(load_checkpoint(tmp_path / "run"))
    darknet = write_darknet(trained, tmp_path / "trained.weights")
    config = compose(
        "eval",
        EvalConfig,
        [
            "model=yolov3-tiny", "model.width=0.125", f"model.weights={darknet}", "data=shapes", f"data.root={shapes}",
            f"data.index_dir={shapes.parent / 'index'}", "data.workers=0", "evaluate.image_size=64",
            "data.shapes={train_images: 18, val_images: 5, image_size: 64, seed: 0}",
        ],
    )  # fmt: skip
    assert evaluate(config) == figures


def test_merging_keeps_what_was_not_named() -> None:
    assert layered({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}}) == {"a": {"b": 1, "c": 4}, "d": 3}
