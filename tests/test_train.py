"""Whole trainings in this process, a few steps long: resume, options, weights, checkpoints."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from conf import CheckpointError, TrainError
from conf.cli.from_checkpoint import complete_from_checkpoint, complete_training
from conf.compose import compose
from conf.schema import EvalConfig, TrainConfig
from data import DataError, ensure_shapes
from eval import evaluate
from models import Darknet, save_darknet_weights, zoo_cfg
from tests.runs.kill_resume import differences
from tests.small_run import SHAPES, dying_after, random_weights, rows, small_run
from train import train
from train_utils import auto, coco_eval
from train_utils.checkpoint import CheckpointWriter, load_checkpoint, load_last
from train_utils.coco_eval import METRICS
from train_utils.inference.open_checkpoint import open_detector
from train_utils.report.report_page import read_best
from train_utils.train_state import TrainState


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "shapes"
    ensure_shapes(path, SHAPES)
    return path


def options(shapes: Path, run_dir: Path, *more: str) -> TrainConfig:
    own = ("train.batch_size=8", "train.micro_batch_size=4", "train.epochs=1", "evaluate.every=1")
    return small_run(shapes, run_dir, *own, *more)


@pytest.fixture(scope="module")
def trained(shapes: Path) -> tuple[Path, dict[str, float]]:
    run = shapes.parent / "run"
    return run, train(options(shapes, run))


def resumed(config: TrainConfig, run: Path, **more: Any) -> TrainConfig:
    return replace(config, run_dir=None, resume=str(run), **more)


def test_a_resumed_run_is_the_uninterrupted_one(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often = ["train.save_every_steps=1", "train.epochs=2", "train.multi_scale=[0.5,1.5]"]
    train(options(shapes, tmp_path / "whole", *often))
    expected = load_last(tmp_path / "whole")[0]
    for step in (1, 2):
        run = tmp_path / f"cut{step}"
        config = options(shapes, run, *often)
        with dying_after(monkeypatch, step):
            train(config)
        assert load_last(run)[0]["step"] == step
        torch.manual_seed(step)  # what generators did in the meantime must not matter
        train(resumed(config, run))
        found = load_last(run)[0]
        for part in set(expected) - {"config"}:
            assert differences(expected[part], found[part], part) == []
        assert (run / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
        assert ("not evaluated yet" in (run / "train.log").read_text()) == (step == 1), "an epoch has 2 steps"


STILL = "optim.lr=1e-9", "optim.ema_decay=0", "model.freeze=22", "train.epochs=9", "train.patience=2"


@pytest.mark.release
def test_patience_ends_a_training_that_does_not_get_better_and_a_resume_knows(shapes, tmp_path, monkeypatch) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    still = *STILL, random_weights(tmp_path / "a.pt")
    with monkeypatch.context() as patch:
        evaluated = Mock(wraps=coco_eval.score)
        patch.setattr(coco_eval, "score", evaluated)
        train(options(shapes, whole, *still))
    assert evaluated.call_count == len(rows(whole))
    config = options(shapes, run, *still)
    with monkeypatch.context() as patch, pytest.raises(TrainError, match="power cut"):
        patch.setattr("train_utils.report.run_report.RunReport.finish", power_cut)
        train(config)
    assert closing_tables(run) == []
    before, table = load_last(run)[0], (run / "metrics.csv").read_bytes()
    assert len(rows(run)) == before["best_epoch"] + 2 < 9
    for number in (1, 2):
        train(resumed(config, run))
        assert differences(load_last(run)[0], before) == []
        assert (run / "metrics.csv").read_bytes() == table
        assert closing_tables(run) == closing_tables(whole) * number != []
    log = (run / "train.log").read_text()
    assert log.count("the training ends here: no better AP in 2 epochs (train.patience)") == 2
    train(resumed(config, run, train=replace(config.train, patience=3)))
    assert len(rows(run)) == before["best_epoch"] + 3, "more patience is given"


@pytest.mark.release
def test_a_finished_run_that_is_resumed_on_another_validation_set_has_its_scores(trained, shapes, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    shutil.copytree(shapes, tmp_path / "shapes")
    (path,) = (tmp_path / "shapes").glob("*/annotations/instances_val.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"annotations": content["annotations"][:3]}))
    found = train(resumed(options(tmp_path / "shapes", run), run))
    best, kept = load_checkpoint(run, "best"), read_best(run)
    assert best["val"]["boxes"] == len(kept.truth.classes) == 3
    assert found == best["metrics"] == kept.metrics != trained[1]


def power_cut(*_: Any) -> None:
    raise TrainError("power cut")


def closing_tables(run: Path) -> list[str]:
    text = re.sub(r"^\d{4}-\S+ \S+ ?", "", (run / "train.log").read_text(), flags=re.MULTILINE)
    return re.findall(r"^ *AP  AP50.+?^best AP [\d.]+ after epoch \d+", text, re.MULTILINE | re.DOTALL)


def test_a_validation_set_without_boxes_leaves_checkpoints_and_no_metrics(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "shapes")
    (path,) = (tmp_path / "shapes").glob("*/annotations/instances_val.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []}))
    run = tmp_path / "run"
    train(options(tmp_path / "shapes", run, "train.patience=1", "train.epochs=3"))
    assert load_checkpoint(run, "best")["epoch"] == 3
    log = (run / "train.log").read_text()
    assert "no AP, since the validation set has no boxes" in log and f"eval.py ckpt={run}" in log
    proposed = re.findall(r"(?:ckpt|source)=(\S+)", log.partition("next:\n")[2])
    assert len(proposed) == 3 and all(Path(place).exists() for place in proposed), proposed
    assert re.search(r" 3/3( +[-+.\de]+){4}( +-){2} .*\*$", log, re.MULTILINE) and "no better AP" not in log


def test_a_network_that_computes_no_finite_numbers_in_validation_is_named(shapes: Path, tmp_path: Path) -> None:
    """One step of such a rate leaves finite weights, whose products overflow. No other follows."""
    step = ("train.batch_size=18", "train.micro_batch_size=18", "optim.warmup_epochs=0", "optim.ema_decay=0")
    train(options(shapes, tmp_path / "run", *step, "optim.lr=1e9"))
    assert rows(tmp_path / "run")[0]["val_loss"] == "nan"
    assert "val: the loss is not finite" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_vanish_end_a_training_and_a_damaged_one_is_counted(split, shapes, tmp_path, monkeypatch) -> None:
    shutil.copytree(shapes, tmp_path / "shapes")
    (folder,) = (tmp_path / "shapes").glob(f"*/{split}")
    damaged = sorted(folder.iterdir())[1]
    damaged.write_bytes(b"")
    skip = "train.epochs=3", "evaluate.confidence=0.5", "data.on_error=skip"
    config = options(tmp_path / "shapes", tmp_path / "run", *skip)
    end_epoch, save = TrainState.end_epoch, CheckpointWriter.save

    def end_and_lose_the_disk(state: TrainState) -> None:
        end_epoch(state)
        if state.epoch == 2:
            shutil.rmtree(folder)

    monkeypatch.setattr(TrainState, "end_epoch", end_and_lose_the_disk)
    monkeypatch.setattr(CheckpointWriter, "save", lambda one, *state: (save(one, *state), one.pending.exception()))
    with pytest.raises(DataError, match=rf"{folder}, a folder of images, is gone, .* fix: restore"):
        train(config)
    epochs, total, what = (2, 18, "epoch 1, train") if split == "train" else (1, 5, "val")
    said = f"{what}: 1 of {total} images cannot be read, the last one: {damaged}. fix: "
    log = (tmp_path / "run" / "train.log").read_text()
    assert said in log and f" error: {folder}, a folder of images, is gone" in log.splitlines()[-1]
    assert load_last(tmp_path / "run")[0]["epoch"] == epochs == len(rows(tmp_path / "run"))


def test_evaluation_leaves_the_training_alone(shapes: Path, tmp_path: Path) -> None:
    for every in (0, 1):
        train(options(shapes, tmp_path / str(every), f"evaluate.every={every}", "train.epochs=2"))
    one, other = (load_last(tmp_path / name)[0] for name in ("0", "1"))
    for part in ("model", "ema", "optimizer", "rng", "seen"):
        assert differences(one[part], other[part], part) == []


@pytest.mark.release
def test_the_epochs_without_mosaics_add_the_distance_of_boxes(shapes: Path, tmp_path: Path) -> None:
    own = "model=yolov3-tiny-decoupled", "augment=none", "augment.mosaic=1e-9", "train.epochs=4", "evaluate.every=0"
    for last in (0, 15):
        train(options(shapes, tmp_path / str(last), *own, f"augment.close_mosaic_epochs={last}"))
    (*before, overlap), (*same, both) = (rows(tmp_path / name) for name in ("0", "15"))
    assert len(before) == 3 and [row["loss"] for row in before] == [row["loss"] for row in same]
    assert all(float(row["loss_l1"]) == 0 for row in (*before, overlap, *same)) and float(both["loss_l1"]) > 0


@pytest.mark.release
def test_a_run_that_was_moved_goes_on_where_its_data_are_named(shapes, tmp_path, monkeypatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(next(path.parent for path in shapes.glob("*/annotations")), first / "data")
    cfg, weights = first / "own.cfg", first / "start.weights"
    cfg.write_text(zoo_cfg("yolov3-tiny").text)
    save_darknet_weights(Darknet(zoo_cfg("yolov3-tiny"), 5, 0.125), weights)
    given = [
        "data=coco", f"data.root={first}/data", f"data.index_dir={first}/index", "data.workers=0",
        "data.train={annotations: annotations/instances_train.json, images: train}", "name=moved",
        "data.val={annotations: annotations/instances_val.json, images: val}", "device=cpu",
        f"model.cfg={cfg}", "model.width=0.125", f"model.weights={weights}", "train.image_size=64", "evaluate.every=0",
        "train.batch_size=8", "train.epochs=2", "train.save_every_steps=1", "logger.pictures=false",
    ]  # fmt: skip

    def run(*more: str) -> None:
        train(compose("train", TrainConfig, list(more), complete_training))

    run(*given, f"run_dir={tmp_path}/whole")
    with dying_after(monkeypatch, 1):
        run(*given, f"run_dir={first}/run")
    first.rename(second)
    shutil.copytree(second / "run", second / "other")
    with pytest.raises(DataError, match=rf"there is no {first}/data/\S+json\. fix: set data\.root to the folder"):
        run(f"resume={second}/run")
    places = [f"data.root={second}/data", f"data.index_dir={second}/index"]
    run(f"resume={second}/run", *places)
    expected, found = load_last(tmp_path / "whole")[0], load_last(second / "run")[0]
    for part in ("model", "ema", "optimizer", "step", "seen"):
        assert differences(found[part], expected[part], part) == []
    annotations = second / "data" / "annotations"
    (annotations / "instances_train.json").rename(annotations / "elsewhere.json")
    elsewhere = "data.train={annotations: annotations/elsewhere.json, images: train}"
    content = json.loads((annotations / "elsewhere.json").read_text())
    run(f"resume={second}/other", *places, elsewhere)
    content["annotations"][0]["bbox"][2] += 1
    (annotations / "elsewhere.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"the training set would change "):
        run(f"resume={second}/other", *places, elsewhere)


@pytest.mark.release
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_in_its_folder(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(options(shapes, tmp_path / "whole", "train.epochs=2"))
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(TrainError, match="power cut"):
        patch.setattr("train_utils.checkpoint.CheckpointWriter.save", power_cut)
        train(options(shapes, run, "train.epochs=2"))
    assert len(rows(run)) == 1
    train(compose("train", TrainConfig, [f"run_dir={run}", "resume=auto"], complete_training))
    assert (run / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
    assert f"{run} holds no checkpoint yet: its run starts over" in (run / "train.log").read_text()


def test_the_options_of_such_repositories_do_what_they_say(shapes: Path, tmp_path: Path) -> None:
    config = options(
        shapes, tmp_path / "run", "data.single_class=true", "data.cache=ram", "model.freeze=4", "data.split=0.1",
        random_weights(tmp_path / "a.pt"),
        "train.epochs=2", "train.multi_scale=[0.5,1.5]", "train.precision=float32", "train.deterministic=true",
        "evaluate.every=0", "evaluate.rect=false", "loss.iou=ciou", "optim.clip_norm=10",
        "optim.decay=linear", "augment.degrees=10", "augment.shear=2", "augment.flip_vertical=0.5", "train.seed=7",
    )  # fmt: skip
    seen: list[tuple[int, ...]] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: seen.append(tuple(inputs[0].shape)) if isinstance(module, Darknet) else None
    )
    try:
        metrics = train(config)
    finally:
        hook.remove()
        torch.use_deterministic_algorithms(False)
    assert set(metrics) == set(METRICS)
    table = rows(tmp_path / "run")
    assert [row["AP"] != "" for row in table] == [False, True], "evaluated after the last epoch only"
    assert len({shape[-2:] for shape in seen}) > 1 and seen[0][-2:] == (96, 96), "largest size first"
    log = (tmp_path / "run" / "train.log").read_text()
    assert re.search(r"data\.split=0\.1 holds out [1-5] of 18 images, by name", log)
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert state["names"] == ["object"] and state["network"]["num_classes"] == 1
    fresh = torch.load(tmp_path / "a.pt")
    changed = {name.split(".")[1] for name, value in state["model"].items() if not torch.equal(value, fresh[name])}
    assert not changed & {"0", "1", "2", "3"} and "4" in changed, "frozen layers moved, or all stood still"
    assert not list(Path("/dev/shm").glob("hydra-yolov3-spp-*")), "the cache was left in memory"


@pytest.mark.release
def test_fitted_anchors_go_with_the_checkpoint(shapes, tmp_path, capsys, monkeypatch) -> None:
    own = ["train.save_every_steps=1", "data.single_class=true"]
    own += ["model.anchors=auto", "loss.anchor_iou=0.9", "train.multi_scale=[0.5,1.5]"]  # .9: more than the .cfg's give
    config = options(shapes, tmp_path / "run", *own)
    with dying_after(monkeypatch, 1):
        train(config)
    said = capsys.readouterr().out
    assert said.count("model.anchors=auto: recall at IoU 0.5 is ") == 1 and "which replace them" in said
    kept = load_last(tmp_path / "run")[0]["config"]["model"]["anchors"]
    assert "  ".join(f"{width:g},{height:g}" for width, height in kept) in said
    monkeypatch.setattr(auto, "choose_anchors", None)  # not asked again
    metrics = train(resumed(config, tmp_path / "run"))
    assert evaluate(compose("eval", EvalConfig, [f"ckpt={tmp_path / 'run'}"], complete_from_checkpoint)) == metrics
    network = open_detector(str(tmp_path / "run"), None, None, None)
    assert [list(pair) for pair in network.model.heads[0].all_anchors] == kept and len(network.names) == 1
