"""Mistakes are TIDE's, by both scorers; their costs add up; files and report show the worst."""

import csv
import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.small_run import small_run
from tests.train_utils.coco_sets import coco128, draw, many_classes
from train import train
from train_utils.coco_eval import Evaluation, choose_scorer, find_matches, match, score
from train_utils.report import mistakes
from train_utils.report.draw import GAP, LINE, SIDE
from train_utils.report.mistakes import KINDS, LABELS, MISSED, NONE, draw_mistakes, find_mistakes, gains
from train_utils.results import GroundTruth, make_detections

# A cat of [0, 0, 100, 100] in each of six pictures, and a dog that is labelled as a cow first.
TRUTH = GroundTruth(
    np.arange(10, 18), np.full((8, 2), 300), np.array([0, 1, 2, 3, 4, 5, 6, 8, 8]),
    np.array([[0.0, 0, 100, 100]] * 8), np.array([0, 0, 0, 0, 0, 0, 2, 1]), np.zeros(8, bool),
    np.full(8, 1e4), ["cat", "dog", "cow"], [f"{number}.jpg" for number in range(8)],
)  # fmt: skip
FOUND = [  # picture, class, score, box, kind
    (10, 0, 0.99, [0, 0, 100, 100], ""),
    (10, 0, 0.90, [0, 0, 100, 90], "twice"),
    (11, 1, 0.80, [0, 0, 100, 90], "wrong class"),
    (12, 0, 0.70, [0, 0, 100, 40], "badly placed"),
    (13, 1, 0.50, [0, 0, 100, 30], "class and place"),  # and its cat is missed
    (14, 0, 0.05, [0, 0, 100, 95], ""),  # below the threshold: a miss there
    (16, 1, 0.95, [0, 0, 100, 99], ""),
    (16, 0, 0.30, [0, 0, 100, 90], ""),  # below the threshold: near the dog, which comes first
    (17, 0, 0.85, [200, 200, 250, 250], "background"),
]


def scored(scorer: str | None = None) -> Evaluation:
    rows = [make_detections(row[0], *map(np.array, ([row[1]], [row[2]], [row[3]]))) for row in FOUND]
    return score(TRUTH, np.concatenate(rows), scorer)


def written(folder: Path, evaluation: Evaluation, threshold: float) -> list[dict[str, str]]:
    image = np.full((300, 300, 3), 90, np.uint8)
    draw_mistakes(
        evaluation, threshold, lambda _: image, lambda i: evaluation.truth.file_names[i], folder / "mistakes.jpg"
    )
    with (folder / "mistakes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_kind_is_told_and_labels_to_look_at_are_suspected(tmp_path: Path) -> None:
    rows = written(tmp_path, scored(), 0.5)
    by_kind, costs = {row["kind"]: row for row in rows}, [float(row["cost"]) for row in rows]
    assert set(by_kind) == set(KINDS) and costs == sorted(costs, reverse=True)
    told = {
        (int(row["picture"][0]) + 10, float(row["score"])): row["kind"] for row in rows if row["kind"] in KINDS[:MISSED]
    }
    assert told == {(row[0], row[2]): row[4] for row in FOUND if row[4]}
    assert sorted(row["picture"] for row in rows if row["kind"] == "missed") == ["3.jpg", "4.jpg", "5.jpg"]
    assert [by_kind["wrong class"][key] for key in ("class", "other class", "IoU")] == ["dog", "cat", "0.9"]
    assert [by_kind["labelled twice"][key] for key in ("class", "other class", "IoU")] == ["cow", "dog", "1"]
    suspected = sorted((float(row["suspicion"]), row["picture"]) for row in rows if row["suspicion"] != "0")
    assert suspected == [(0.5, "5.jpg"), (0.85, "7.jpg"), (1, "6.jpg")]  # nothing near, no label, two labels


def average(evaluation: Evaluation) -> float:
    """Mean over the classes of the precision at each label's detection."""
    matches, total = find_matches(evaluation.truth, evaluation.detections), []
    for index, labels in enumerate(matches.boxes.sum(1)):
        own = (matches.classes == index) & (matches.right[0] | matches.wrong[0])
        right = matches.right[0, own][np.argsort(-matches.scores[own], kind="stable")]
        if labels:
            total.append((right * right.cumsum() / np.arange(1, len(right) + 1)).sum() / labels)
    return float(np.mean(total))


def sets(shared_dir: Path) -> list[Evaluation]:
    drawn = [(replace(truth, crowd=np.zeros_like(truth.crowd)), found) for truth, found in (draw(1), many_classes(20))]
    cases = [*drawn, (drawn[0][0], drawn[0][1][:0]), draw(1), coco128(shared_dir)[:2]]
    return [scored(), *(score(*case) for case in cases)]


def test_costs_are_the_parts_of_what_precision_lacks(shared_dir: Path) -> None:
    for evaluation in sets(shared_dir):
        rows = find_mistakes(evaluation, find_matches(evaluation.truth, evaluation.detections))
        false = rows.kind < MISSED
        lost = (rows.kind >= MISSED) & (rows.kind < NONE) & ~rows.is_mended
        assert rows.cost[false | lost].sum() == pytest.approx(1 - average(evaluation), abs=1e-9)


def test_gains_are_tides_and_those_of_both_scorers(shared_dir: Path) -> None:
    """The oracle is hotcoco's, which compares with crowds, too: without those that were drawn."""
    tables = []
    for evaluation in sets(shared_dir):
        assert evaluation.matches is not None
        table = gains(find_mistakes(evaluation, evaluation.matches), evaluation.matches)
        reference = find_matches(evaluation.truth, evaluation.detections, "pycocotools")
        assert gains(find_mistakes(evaluation, reference), reference) == table
        tables.append(table)
    assert [count for _, count, _ in tables[0]] == [1, 2, 1, 1, 1, 3]
    if find_spec("hotcoco") is None:
        pytest.skip("no hotcoco to compare with")
    names = dict(zip(KINDS, ("Loc", "Cls", "Dupe", "Bkg", "Both", "Miss"), strict=False))
    for evaluation, table in zip(sets(shared_dir), tables, strict=True):
        if evaluation.truth.crowd.any():
            continue
        oracle = match(evaluation.truth, evaluation.detections, choose_scorer()).tide_errors()
        for kind, count, gain in table:
            assert count == oracle["counts"][names[kind]], kind
            assert gain == pytest.approx(oracle["delta_ap"][names[kind]], abs=1e-6), kind


def test_the_sheet_frames_false_boxes_and_labels_in_two_colours(tmp_path: Path) -> None:
    truth = replace(TRUTH, file_names=[f"{'a' * 40}\n_jpg.rf.{number}{'f' * 31}.jpg" for number in range(8)])
    rows = written(tmp_path, scored()._replace(truth=truth), 0.5)
    sheet = cv2.imread(str(tmp_path / "mistakes.jpg"))[..., ::-1].astype(int)
    assert len(sheet) == 2 * (SIDE + 2 * LINE + GAP) + GAP and len({row["picture"] for row in rows}) == 8
    for color in mistakes.COLORS[[0, LABELS]]:
        assert (abs(sheet - color).max(axis=2) < 25).sum() > 500


def test_a_picture_of_the_sheet_shows_the_mistake_in_its_title_in_any_case(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mistakes, "BOXES", 1)
    monkeypatch.setattr("train_utils.report.draw.draw_cell", lambda _, boxes, *__, **___: boxes)
    cells: list[tuple[np.ndarray, str, str]] = []
    monkeypatch.setattr("train_utils.report.draw.save_sheet", lambda drawn, _: cells.extend(drawn))
    truth, found = draw(1)
    evaluation = score(replace(truth, file_names=[f"{number}.jpg" for number in range(12)]), found)
    shown = set()
    for row in written(tmp_path, evaluation, 0.2):
        title = f"{row['picture']}\n{row['kind']}: {row['class']} {float(row['score']):.2f},"
        left, top, width, height = (float(row[side]) for side in ("left", "top", "width", "height"))
        near = [abs(cell[0] - [left, top, left + width, top + height]).max() < 0.01 for cell in cells]
        shown |= {c[1] for c, fits in zip(cells, near, strict=True) if fits and "\n".join(c[1:]).startswith(title)}
    assert len(shown) == len(cells) > 5


def test_a_training_with_default_options_lists_its_mistakes(tmp_path: Path, page) -> None:
    more = ("train.epochs=2", "train.batch_size=8", "evaluate.every=1", "logger.pictures=true")
    train(small_run(tmp_path / "shapes", tmp_path / "run", *more))
    folder = tmp_path / "run" / "plots"
    assert (folder / "mistakes.jpg").is_file()
    with (folder / "mistakes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    page.goto((tmp_path / "run" / "report.html").as_uri())
    frame = page.frames[1]
    assert frame.inner_text("#gains").count("\n") == MISSED + 1
    kind = rows[0]["kind"]
    frame.select_option("#kind", kind)
    shown = frame.evaluate("[...document.querySelectorAll('#mistakes tr')].map(row => row.cells[1].textContent)")
    assert shown[0] == "kind" and set(shown[1:]) == {kind}
    assert len(shown) == 1 + min(200, sum(row["kind"] == kind for row in rows))


def test_names_are_no_markup_and_half_of_a_long_list_are_suspects(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mistakes, "ROWS", 4)
    truth = replace(TRUTH, names=["</script><b>", "dog", "cow"])
    written(tmp_path, scored()._replace(truth=truth), 0.5)
    text = (tmp_path / "mistakes.html").read_text()
    assert text.count("</script>") == 1 and "<b>" not in text and "7.jpg" in text and "3.jpg" not in text
    content = re.search(r"= (\[\[.*\]\]);", text)
    assert content is not None and "</script><b>" in str(json.loads(content[1]))
