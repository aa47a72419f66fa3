"""Runs compared: groups by seed, differences of options, and gains that are real or not."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf import CheckpointError, ConfigError, TrainError
from conf.cli.program import start
from conf.compose import compose, to_yaml
from conf.schema import CompareConfig, TrainConfig
from scripts.compare import compare, read_groups, split_gain
from tests.train_utils.coco_sets import draw
from train_utils.bootstrap import draw_images, gain, resampled_aps
from train_utils.coco_eval import match, score
from train_utils.report.report_page import BEST_DETECTIONS, keep_best, read_best
from train_utils.results import DETECTION, Detections, GroundTruth

IMAGES, BOXES = 40, 4  # boxes of each image


def labels(images: int = IMAGES) -> GroundTruth:
    draw = np.random.default_rng(0)
    count = images * BOXES
    boxes = np.concatenate([draw.uniform(0, 200, (count, 2)), draw.uniform(20, 90, (count, 2))], axis=1)
    return GroundTruth(
        np.arange(images) + 5, np.full((images, 2), 300), np.arange(images + 1) * BOXES, boxes,
        draw.integers(0, 2, count), np.zeros(count, bool), boxes[:, 2] * boxes[:, 3], ["cat", "dog"],
    )  # fmt: skip


def make_run(
    folder: Path, noise: float, seed: int, *more: str, truth: GroundTruth | None = None, trained_on: str = "1"
) -> Path:
    """The folder of a run that found each box, moved by ``noise`` pixels or so."""
    truth, draw = truth or labels(), np.random.default_rng(seed)
    found = np.zeros(len(truth.classes), DETECTION)
    found["image_id"], found["class"] = truth.image_ids[truth.image_of_box], truth.classes
    found["score"] = draw.uniform(0.2, 1, len(found))
    found["box_xywh"] = truth.boxes_xywh + draw.normal(0, noise, (len(found), 4))
    folder.mkdir(parents=True)
    config = compose("train", TrainConfig, [f"train.seed={seed}", f"run_dir=dir{seed}", *more])
    (folder / "config.yaml").write_text(to_yaml(config))
    keep_best(folder, score(truth, found)._replace(about={"trained_on": {"digest": trained_on}}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "a0": make_run(root / "a=0, it's", 4, 0),
        "a1": make_run(root / "a1", 4, 1, "data.workers=3"),
        "b0": make_run(root / "b0", 2, 10, "optim.lr=0.02"),
        "b1": make_run(root / "b1", 2, 11, "optim.lr=0.02"),
        "c": make_run(root / "c", 3.9, 12, "train.epochs=7", trained_on="2"),
        "small": make_run(root / "small", 4, 0, truth=labels(9)),
    }


def test_the_text(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(runs[name]) for name in ("a0", "b0", "a1", "b1", "c")]
    monkeypatch.setattr(sys, "argv", ["compare", *names, "resamples=200"])
    monkeypatch.setattr("conf.cli.run_files.progress_of", lambda run: (3 * (run == runs["c"]), 0))
    start("compare")
    said = capsys.readouterr().out
    assert "B against A: the gain of 0." in said and "AP is real: 95% interval +0." in said
    assert "C against A: the " in said and "AP is unproven: 95% interval -0." in said
    assert "over images and seeds.\nC against A" in said and "may be lucky in its seed" in said
    assert re.search(r"optim\.lr +0\.01 +0\.02 +0\.01$", said, re.M)
    assert re.search(r"train\.epochs +300 +300 +7$", said, re.M)
    assert re.search(r"trained_on\.digest +1 +1 +2$", said, re.M)
    assert "data.workers" not in said and "run_dir" not in said
    assert all(name in said for name in names)
    assert re.search(r"^A +- of 300 +/", said, re.M) and re.search(r"^C +3 of 7 +/.*/c$", said, re.M)


def test_seeds_are_one_setting(runs: dict[str, Path]) -> None:
    groups = read_groups([runs[name] for name in ("a0", "b0", "a1", "b1")])
    assert [group.runs for group in groups] == [[runs["a0"], runs["a1"]], [runs["b0"], runs["b1"]]]
    values = [read_best(runs[name]).metrics["AP"] for name in ("a0", "a1")]
    assert groups[0].mean() == pytest.approx(np.mean(values))
    assert groups[0].spread() == pytest.approx(np.std(values, ddof=1))
    (gain,) = compare(CompareConfig([str(runs[n]) for n in ("a0", "b0", "a1", "b1")], 200, 0, False))
    assert gain.value == pytest.approx(groups[1].mean() - groups[0].mean())
    assert "is real" in gain.sentence() and gain.source == "images and seeds" and gain.low < gain.value < gain.high
    assert compare(CompareConfig([f"{runs['a0'].parent}/[ab]*[01]*"], 200, 0, False)) == [gain], "a pattern"
    assert gain._replace(value=0.0, low=0.0, high=0.0).sentence().startswith("equal: no difference in AP")


def resampled_by_pycocotools(truth: GroundTruth, found: Detections, draws: np.ndarray) -> np.ndarray:
    """The AP of each sample, of a set of its own in which an image may stand several times."""
    scores = []
    for times in draws:
        chosen = np.repeat(np.argsort(truth.image_ids), times)
        boxes = np.concatenate([np.arange(*truth.offsets[image : image + 2]) for image in chosen])
        offsets = np.append(0, np.diff(truth.offsets)[chosen].cumsum())
        columns = {name: getattr(truth, name)[boxes] for name in ("boxes_xywh", "classes", "crowd", "areas")}
        sample = replace(truth, image_ids=np.arange(len(chosen)), sizes=truth.sizes[chosen], offsets=offsets, **columns)
        rows = [np.flatnonzero(found["image_id"] == truth.image_ids[image]) for image in chosen]
        reported = found[np.concatenate(rows)]
        reported["image_id"] = np.repeat(np.arange(len(chosen)), [len(row) for row in rows])
        precision = match(sample, reported, "pycocotools", every_size=False).eval["precision"][..., 0, 2]
        scores.append(precision[precision > -1].mean())
    return np.array(scores)


def test_samples_and_the_interval_are_those_of_a_plain_bootstrap_over_images(runs: dict[str, Path]) -> None:
    """The plain one scores each sample by pycocotools, as a data set of its own."""
    truth, reported = draw(1, images=30)  # with crowds, and classes that a sample may lack
    reported["score"] = np.random.default_rng(1).permutation(len(reported)) / len(reported)  # ties fall differently
    draws = draw_images(30, 12, 1)
    assert (draws[0] == 1).all() and (draws.sum(1) == 30).all() and draws.max() > 2
    plain = resampled_by_pycocotools(truth, reported, draws)
    assert resampled_aps([score(truth, reported)], draws)[0] == pytest.approx(plain, rel=1e-12)
    first, second = read_groups([runs["a0"], runs["c"]])
    draws = draw_images(IMAGES, 40, 0)[1:]
    before, after = (resampled_by_pycocotools(x.truth, x.detections, draws) for x in (*first.best, *second.best))
    low, high = np.quantile(after - before, [0.025, 0.975])
    found, reverse = gain(first.best, second.best, 40, 0), gain(second.best, first.best, 40, 0)
    assert found.high - found.low == pytest.approx(high - low, rel=0.05)
    assert (reverse.low, reverse.value, reverse.high) == pytest.approx((-found.high, -found.value, -found.low))


def test_seeds_widen_the_interval_as_students_t(runs: dict[str, Path]) -> None:
    """With the same detections on both sides no image makes a difference; the seeds decide."""
    (group,) = read_groups([runs["a0"], runs["a1"]])
    spread = group.spread()
    assert spread is not None
    found = gain(group.best, group.best, 10, 0)
    assert found.value == 0 and found.high == pytest.approx(4.303 * spread, rel=0.02)  # 2 degrees of freedom
    assert gain(group.best[:1], group.best[:1], 10, 0).high == 0


def part(truth: GroundTruth, images: list[int]) -> GroundTruth:
    """These images with all their boxes, as a set of its own: ids count anew."""
    boxes = np.concatenate([np.arange(*truth.offsets[image : image + 2]) for image in images])
    columns = {name: getattr(truth, name)[boxes] for name in ("boxes_xywh", "classes", "crowd", "areas")}
    return GroundTruth(
        np.arange(len(images)), truth.sizes[images], np.arange(len(images) + 1) * BOXES, names=truth.names,
        file_names=[f"{image}.jpg" for image in images], **columns,
    )  # fmt: skip


def test_a_gain_on_another_set_is_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = labels(46)
    old, new = part(every, list(range(40))), part(every, list(range(45, 4, -1)))
    new.classes[-1] = 1 - new.classes[-1]
    new = replace(new, classes=1 - new.classes, names=["dog", "cat"])
    groups = read_groups([make_run(tmp_path / "a", 4, 0, truth=old), make_run(tmp_path / "b", 2, 1, truth=new)])
    assert len(groups) == 2
    whole, network, of_data = split_gain(groups[0], groups[1], 50, 0)
    common, values = part(new, list(range(6, 41))), []  # the images 39 to 5
    for group, last in zip(groups, (None, 45), strict=True):
        found = group.best[0].detections.copy()
        image = found["image_id"].copy() if last is None else last - found["image_id"]
        found["image_id"], found["class"] = 39 - image, found["class"] if last else 1 - found["class"]
        values.append(score(common, found[(image >= 5) & (image < 40)], "pycocotools").metrics["AP"])
    assert whole.value == pytest.approx(groups[1].mean() - groups[0].mean())
    assert network.value == pytest.approx(values[1] - values[0])
    assert of_data.value == pytest.approx(whole.value - network.value)
    assert all(one.low < one.value < one.high for one in (whole, network, of_data))
    said = capsys.readouterr().out
    assert "35 images in both" in said and "5 images only in A" in said and "6 images only in B" in said


def test_the_parts_of_a_gain_are_zero_where_nothing_changed(tmp_path: Path) -> None:
    old = part(labels(46), list(range(40)))
    a, b = (make_run(tmp_path / name, noise, 0, truth=old) for name, noise in (("a", 4), ("b", 2)))
    first, second = read_groups([a])[0], read_groups([b])[0]
    renamed = replace(old, image_ids=99 - old.image_ids, file_names=[f"x/{name}" for name in old.file_names])
    found = second.best[0].detections.copy()
    found["image_id"] = 99 - found["image_id"]  # they fall
    moved = second._replace(best=[score(renamed, found)])
    whole, network, of_data = split_gain(first, moved, 50, 0)
    assert whole == pytest.approx(gain(first.best, second.best, 50, 0)) and network == pytest.approx(whole)
    assert of_data[:3] == pytest.approx((0, 0, 0))


def test_runs_that_cannot_be_compared_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="small was scored on another validation set"):
        compare(CompareConfig([str(runs["a0"]), str(runs["small"])], 10, 0, False))
    some, twice = part(labels(), [0, 1]), replace(part(labels(), [0, 1, 2]), file_names=["0.jpg"] * 3)
    larger = replace(some, sizes=some.sizes + 1)  # other images of the same names
    known = make_run(tmp_path / "known", 4, 0, truth=some)
    for name, truth in {"twice": twice, "larger": larger}.items():
        other = make_run(tmp_path / name, 4, 0, truth=truth)
        with pytest.raises(TrainError, match=f"{name} was scored on another validation set"):
            compare(CompareConfig([str(known), str(other)], 10, 0, False))
    copy, plugged = make_run(tmp_path / "copy", 3, 0), make_run(tmp_path / "plugged", 4, 0, "plugins=[mine.py]")
    for repeated in (runs["a0"], copy):
        with pytest.raises(TrainError, match=r"are one training, of train.seed=0\. fix: name one of them"):
            read_groups([runs["a0"], runs["a1"], repeated])
    assert len(read_groups([runs["a0"], plugged])) == 2
    bare = make_run(tmp_path / "bare", 4, 0)
    (bare / BEST_DETECTIONS).write_bytes(b"no archive")
    with pytest.raises(TrainError, match="is damaged"):
        read_groups([runs["a0"], bare])
    (bare / BEST_DETECTIONS).unlink()
    with pytest.raises(ConfigError, match=r"there is no .*nowhere/config\.yaml\. fix: the folder of a run$"):
        read_groups([tmp_path / "nowhere"])
    with pytest.raises(TrainError, match=r"fix: python eval.py ckpt=.*bare out=.*bare"):
        read_groups([runs["a0"], bare])


def test_forged_evaluations_and_options_are_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4, 0, truth=labels(9))
    config = CompareConfig(runs=[str(run)], resamples=1, seed=0, debug=False)
    with np.load(run / BEST_DETECTIONS) as file:
        arrays = dict(file)
    scores = json.loads(str(arrays["scores"]))
    cases = [arrays | {key: np.array(value)} for key in arrays for value in ("x", np.zeros(0), np.zeros((2, 3)), 7)]
    texts = [scores | {key: value} for key in scores for value in (None, "x", {}, {"AP": "x"})]
    cases += [arrays | {"scores": np.array(json.dumps(text))} for text in texts]
    refused = 0
    for case in cases[::5]:  # all take half a minute
        np.savez(run / BEST_DETECTIONS, **case)
        try:
            compare(config)
            group = read_groups([run])[0]
            gain(group.best, group.best, 1, 0)
        except TrainError as error:
            refused += 1
            assert re.fullmatch(r"[^\n]*best_detections.npz is damaged \([^\n]*\)\. fix: [^\n]*", str(error))
    assert refused > len(cases) * 0.12
    for text in ("a: &a [x]\nb: [*a, *a]\ntrain: {}\n", "train: [", "\0", "train: {}\nplugins: x\n"):
        (run / "config.yaml").write_text(text)
        with pytest.raises((ConfigError, CheckpointError), match=r"^[^\n]*run[^\n]* fix: [^\n]*$"):
            compare(config)
