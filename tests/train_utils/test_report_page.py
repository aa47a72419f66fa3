"""The report of a real run: what it shows, in a real browser, and what a training keeps for it."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from conf import ConfigError
from conf.compose import compose
from conf.schema import CompareConfig
from scripts.compare import compare
from tests.small_run import small_run
from train import train
from train_utils.coco_eval import Evaluation, score
from train_utils.evaluator import Evaluator
from train_utils.report import plots, report_page
from train_utils.report.report_page import read_best, write_report


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    more = ("train.epochs=2", "train.batch_size=8", "evaluate.every=1", "logger.pictures=true", "name='<b>&'")
    train(small_run(root / "shapes", root / "first run", *more))
    return root / "first run"


def test_what_a_training_keeps(run_folder: Path) -> None:
    best = read_best(run_folder)
    assert len(best.truth.image_ids) == 5 and len(best.detections)
    assert [Path(name).name for name in best.truth.file_names] == [f"{number:06}.jpg" for number in range(1, 6)]
    again = score(best.truth, best.detections)
    assert again[:3] == best[:3]
    rows = list(csv.DictReader((run_folder / "metrics.csv").open()))
    kept = [{name: float(row[name]) for name in (*best.metrics, *best.at_best_f1)} for row in rows]
    assert best.metrics | best.at_best_f1 in kept


@pytest.mark.release
def test_the_report_in_a_browser(run_folder: Path, page, tmp_path: Path) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.split(":")[0]))
    page.goto((run_folder / "report.html").as_uri())
    assert set(loaded) <= {"file", "data"}, "the page loads something from elsewhere"
    assert page.title() == "<b>& · first run"
    pictures = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(pictures) >= 3 and all(complete and width > 0 and alt for complete, width, alt in pictures)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    shown = page.inner_text("#options")
    assert re.search(r"train\.epochs\s+2\s+300", shown) and re.search(r"model\.width\s+0\.125\s+1\.0", shown)
    assert "optim.lr" not in shown.split("All other")[0], "a default is listed as changed"
    best = read_best(run_folder)
    assert f"{best.metrics['AP']:.3f}" in page.inner_text("#metrics")
    shot = tmp_path / "shot.png"
    for scheme, darker in (("light", False), ("dark", True)):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=shot)
        picture = cv2.imread(str(shot))
        assert picture.shape == (900, 1200, 3) and picture.std() > 10
        assert (float(np.median(picture.astype(float))) < 128) == darker
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a telephone scrolls sideways"


def test_written_again_without_what_may_be_absent(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run_folder / "config.yaml").read_text())
    assert compare(compose("compare", CompareConfig, [f"runs=[{tmp_path}]"])) == []
    text = (tmp_path / "report.html").read_text()
    assert "No epoch was evaluated" in text
    with pytest.raises(ConfigError, match=r"nowhere: .* fix: the folder of a run"):
        compare(compose("compare", CompareConfig, [f"runs=[{tmp_path.parent}/nowhere]"]))


@pytest.mark.release
def test_plots_and_table_are_of_the_best_epoch_also_after_a_resume(tmp_path, monkeypatch) -> None:
    drawn: list[Evaluation] = []
    monkeypatch.setattr(plots, "draw_evaluation", lambda folder, evaluation, *more: drawn.append(evaluation))
    evaluate, scores = Evaluator.__call__, iter((0.5, 0.1, 0.1, 0.1))

    def scored(self: Evaluator, *given: Any) -> Evaluation:
        evaluation = evaluate(self, *given)
        return evaluation._replace(metrics=evaluation.metrics | {"AP": next(scores)})

    monkeypatch.setattr(Evaluator, "__call__", scored)
    more = ("train.epochs=2", "train.batch_size=8", "evaluate.every=1", "logger.pictures=true")
    train(small_run(tmp_path / "shapes", tmp_path / "run", *more))
    train([f"resume={tmp_path / 'run'}", "train.epochs=3"])
    assert [(one.metrics["AP"], one.about["epoch"]) for one in drawn] == [(0.5, 1)] * 2
    (tmp_path / "run/plots/confusion.png").touch()
    text = write_report(tmp_path / "run").read_text()
    assert "epoch=1, split=val, evaluate.image_size=null" in text
    assert re.findall(r"<figcaption>([^<]*epoch 1[^<]*)<", text) == [f"{plots.PLOTS['confusion.png']} (epoch 1)"]
    of_another = read_best(tmp_path / "run")._replace(about={"epoch": 0})  # as a full disk leaves it
    report_page.keep_best(tmp_path / "run", of_another)
    train([f"resume={tmp_path / 'run'}", "train.epochs=3"])
    assert "metrics of epoch 0:" in (tmp_path / "run/train.log").read_text()


def test_a_report_that_fails_is_a_line_and_the_training_goes_on(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(report_page, "write_report", lambda folder: 1 / 0)
    monkeypatch.setattr(report_page, "keep_best", lambda *given: 1 / 0)
    train(small_run(tmp_path / "shapes", tmp_path / "run", "train.epochs=1", "train.batch_size=8"))
    said = capsys.readouterr().out
    assert "warning: report.html was not written (ZeroDivisionError" in said
    assert "warning: best_detections.npz was not written" in said
    assert (tmp_path / "run/checkpoints/last.pt").exists()
