"""Runs compared: groups by seed, differences of options, and gains that are real or not."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from conf import ConfigError
from conf.compose import compose, to_yaml
from conf.errors import CheckpointError, TrainError
from conf.run import run
from conf.schema import CompareConfig, TrainConfig
from scripts.compare import Group, bootstrap, compare, gain, read_groups
from train_utils.coco_eval import Evaluation, score
from train_utils.report_page import FILE, keep_best, read_best
from train_utils.results import DETECTION, GroundTruth

IMAGES, BOXES = 40, 4  # boxes of each image


def labels(images: int = IMAGES) -> GroundTruth:
    draw = np.random.default_rng(0)
    count = images * BOXES
    boxes = np.concatenate([draw.uniform(0, 200, (count, 2)), draw.uniform(20, 90, (count, 2))], axis=1)
    return GroundTruth(
        np.arange(images) + 5, np.full((images, 2), 300), np.arange(images + 1) * BOXES, boxes,
        draw.integers(0, 2, count), np.zeros(count, bool), boxes[:, 2] * boxes[:, 3], ["cat", "dog"],
    )  # fmt: skip


def make_run(folder: Path, noise: float, seed: int, *more: str, truth: GroundTruth | None = None) -> Path:
    """The folder of a run that found each box, moved by ``noise`` pixels or so."""
    truth, draw = truth or labels(), np.random.default_rng(seed)
    found = np.zeros(len(truth.classes), DETECTION)
    found["image_id"], found["class"] = truth.image_ids[truth.image_of_box], truth.classes
    found["score"] = draw.uniform(0.2, 1, len(found))
    found["box_xywh"] = truth.boxes_xywh + draw.normal(0, noise, (len(found), 4))
    folder.mkdir(parents=True)
    config = compose("train", TrainConfig, [f"train.seed={seed}", f"run_dir=dir{seed}", *more])
    (folder / "config.yaml").write_text(to_yaml(config))
    keep_best(folder, score(truth, found))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "a0": make_run(root / "a=0, it's", 4, 0),
        "a1": make_run(root / "a1", 4, 1, "data.workers=3"),
        "b0": make_run(root / "b0", 2, 10, "optim.lr=0.02"),
        "b1": make_run(root / "b1", 2, 11, "optim.lr=0.02"),
        "c": make_run(root / "c", 3.9, 12, "train.epochs=7"),
        "small": make_run(root / "small", 4, 0, truth=labels(9)),
    }


def test_the_text(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(runs[name]) for name in ("a0", "b0", "a1", "b1", "c")]
    monkeypatch.setattr(sys, "argv", ["compare", *names, "resamples=200"])
    run("compare")
    said = capsys.readouterr().out
    assert "B against A: the gain of 0." in said and "AP is real: 95% interval +0." in said
    assert "C against A: the " in said and "AP is unproven: 95% interval -0." in said
    assert "over images and seeds.\nC against A" in said and "may be lucky in its seed" in said
    assert re.search(r"optim\.lr +0\.01 +0\.02 +0\.01$", said, re.M)
    assert re.search(r"train\.epochs +300 +300 +7$", said, re.M)
    assert "data.workers" not in said and "run_dir" not in said
    assert all(name in said for name in names)


def test_short_names(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs["c"], "runs/y/1")
    (tmp_path / "runs/y/1/checkpoints").mkdir()
    (tmp_path / "runs/y/1/checkpoints/last.pt").touch()
    for name in ("last", "runs/y"):
        compare(CompareConfig([name], 10, 0, False))
        assert "page: runs/y/1/report.html" in capsys.readouterr().out


def test_seeds_are_one_setting(runs: dict[str, Path]) -> None:
    groups = read_groups([runs[name] for name in ("a0", "b0", "a1", "b1")])
    assert [group.runs for group in groups] == [
        [runs["a0"], runs["a1"]], [runs["b0"], runs["b1"]],
    ]  # fmt: skip
    values = [read_best(runs[name]).metrics["AP"] for name in ("a0", "a1")]
    assert groups[0].mean() == pytest.approx(np.mean(values))
    assert groups[0].spread() == pytest.approx(np.std(values, ddof=1))
    (gain,) = compare(CompareConfig([str(runs[n]) for n in ("a0", "b0", "a1", "b1")], 200, 0, False))
    assert gain.value == pytest.approx(groups[1].mean() - groups[0].mean())
    assert "is real" in gain.sentence() and gain.source == "images and seeds" and gain.low < gain.value < gain.high


def test_the_interval_is_that_of_a_bootstrap_over_images(runs: dict[str, Path]) -> None:
    """Against scores of sets with images drawn anew."""
    sides = before, after = [read_best(runs[name]) for name in ("a0", "c")]
    assert list(bootstrap(before, after, 9, 0)) == [-delta for delta in bootstrap(after, before, 9, 0)]
    first, second = read_groups([runs["a0"], runs["c"]])
    found = gain(first, second, 400, 0)
    deltas, draw = [], np.random.default_rng(1)
    for _ in range(150):
        chosen = draw.integers(0, IMAGES, IMAGES)
        deltas.append(np.subtract(*(drawn_ap(side, chosen) for side in reversed(sides))))
    assert found.high - found.low == pytest.approx(2 * 1.96 * np.std(deltas), rel=0.15)


def drawn_ap(side: Evaluation, chosen: np.ndarray) -> float:
    rows = (chosen[:, None] * BOXES + np.arange(BOXES)).ravel()
    truth = side.truth
    found = side.detections[rows].copy()  # a detection for each box, in their order
    found["image_id"] = np.repeat(np.arange(IMAGES), BOXES)
    drawn = GroundTruth(
        np.arange(IMAGES), truth.sizes, truth.offsets, truth.boxes_xywh[rows], truth.classes[rows], truth.crowd[rows],
        truth.areas[rows], truth.names,
    )  # fmt: skip
    return score(drawn, found).metrics["AP"]


def test_seeds_widen_the_interval_as_students_t(runs: dict[str, Path]) -> None:
    """With the same detections on both sides no image makes a difference; the seeds decide."""
    (group,) = read_groups([runs["a0"], runs["a1"]])
    spread = group.spread()
    assert spread is not None
    found = gain(group, group, 10, 0)
    assert found.value == 0 and found.high == pytest.approx(4.303 * spread, rel=0.02)  # 2 degrees of freedom
    single = Group("A", {}, group.runs[:1], group.best[:1])
    assert gain(single, single, 10, 0).high == 0


def test_runs_that_cannot_be_compared_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="small was scored on another validation set"):
        read_groups([runs["a0"], runs["small"]])
    bare = make_run(tmp_path / "bare", 4, 0)
    (bare / FILE).write_bytes(b"no archive")
    with pytest.raises(TrainError, match="is damaged"):
        read_groups([runs["a0"], bare])
    (bare / FILE).unlink()
    with pytest.raises(TrainError, match=r"fix: python eval.py ckpt=.*bare out=.*bare"):
        read_groups([runs["a0"], bare])


def test_forged_evaluations_and_options_are_one_sentence(tmp_path: Path) -> None:
    """Arrays are missing, or of another type or shape; so are metrics. YAML is cut, or a bomb."""
    run = make_run(tmp_path / "run", 4, 0, truth=labels(9))
    config = CompareConfig([str(run)], resamples=1, seed=0, debug=False)
    with np.load(run / FILE) as file:
        arrays = dict(file)
    scores = json.loads(str(arrays["scores"]))
    cases = [arrays | {key: np.array(value)} for key in arrays for value in ("x", np.zeros(0), np.zeros((2, 3)), 7)]
    texts = [scores | {key: value} for key in scores for value in (None, "x", {}, {"AP": "x"})]
    cases += [arrays | {"scores": np.array(json.dumps(text))} for text in texts]
    refused = 0
    for case in cases[::5]:  # all take half a minute
        np.savez(run / FILE, **case)
        try:
            compare(config)
            group = read_groups([run])[0]
            gain(group, group, 1, 0)
        except TrainError as error:
            refused += 1
            assert re.fullmatch(r"[^\n]*best_detections.npz is damaged \([^\n]*\)\. fix: [^\n]*", str(error))
    assert refused > len(cases) * 0.12
    for text in ("a: &a [x]\nb: [*a, *a]\ntrain: {}\n", "train: [", "\0", "train: {}\nplugins: x\n"):
        (run / "config.yaml").write_text(text)
        with pytest.raises((ConfigError, CheckpointError), match=r"^[^\n]*run[^\n]* fix: [^\n]*$"):
            compare(config)
