"""Draw the plots of a training or an evaluation."""

import csv
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import printable
from train_utils.coco_eval import ABSENT, Evaluation, find_matches, match, over_scores
from train_utils.report.draw import Cell, save_sheet
from train_utils.results import DETECTION_AS_READ, canonical_order, to_xyxy
from train_utils.train_state import LOSS_NAMES

# matplotlib takes longer to import than to draw, so only the functions that draw import it.
FOLDER = "plots"  # in the folder of the run or of the evaluation
PLOTS = {  # titles by file name, in the order to look at them
    "curves.png": "Losses (validation dashed), AP and learning rate by step; the dotted line is the best epoch",
    "precision_recall.png": "pycocotools' precision at each recall; the area under a line is its AP",
    "confidence.png": "F1, precision and recall at IoU .5 over the lowest score that counts",
    "confusion.png": "Labelled boxes by the class that was reported for them, and as shares of the labels",
    "val_detections.jpg": "The first validation images: labels left, detections right",
}
DPI = 110
STYLE: dict[Any, Any] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "0.9", "legend.frameon": False,
    "text.parse_math": False,  # a "$" in a class name does not start a formula
    "font.family": ["sans-serif", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC"],
}  # fmt: skip

Warn = Callable[[str], object]
Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_training(folder: Path, metrics_csv: Path, warn: Warn) -> None:
    """Draw the curves of a training into ``folder``."""
    _draw(folder / "curves.png", lambda out: draw_curves(metrics_csv, out), warn)


def draw_evaluation(folder: Path, evaluation: Evaluation, read: Read, name_of: NameOf, warn: Warn) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. Errors go to ``warn`` and
    remove an older picture of that name.
    """
    best = evaluation.at_best_f1["threshold"]
    threshold = best if best != ABSENT else USUAL_THRESHOLD
    for name, draw in {
        "precision_recall.png": lambda out: draw_precision_recall(evaluation, out),
        "confidence.png": lambda out: draw_over_confidence(evaluation, out),
        "confusion.png": lambda out: draw_confusion(evaluation, threshold, out),
        "val_detections.jpg": lambda out: draw_detections(evaluation, read, name_of, max(threshold, LEAST_SCORE), out),
    }.items():
        _draw(folder / name, draw, warn)


def _draw(out: Path, draw: Callable[[Path], None], warn: Warn) -> None:
    """Draw; an error is only a warning, because the training or evaluation must not be lost."""
    try:
        import matplotlib

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it warns of each absent font of STYLE
        with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as caught:
            draw(out)
        if caught:  # mostly letters that no font has
            warn(f"warning: {out} was drawn with {len(caught)} warning(s), the first: {caught[0].message}")
    except Exception as error:
        warn(f"warning: {out} was not drawn ({type(error).__name__}: {error})")


CURVES = {
    "loss": LOSS_NAMES,
    "average precision; precision and recall at the best F1": ("AP", "AP50", "AP75", "precision", "recall"),
    "AP by object size": ("APs", "APm", "APl"),
    "learning rate": ("lr",),
}
MOST_POINTS = 300  # of a line; neighbours are averaged


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the steps, without empty cells.

    A steps.csv beside it gives losses by step instead of by epoch. A vertical line marks the epoch
    with the best AP.
    """
    from matplotlib.figure import Figure

    rows, steps_csv = _rows(metrics_csv), metrics_csv.with_name("steps.csv")
    tables = (rows, _rows(steps_csv) if steps_csv.exists() else [])
    scored = [row for row in rows if row.get("AP") and float(row["AP"]) >= 0]
    best = max(scored, key=lambda row: float(row["AP"]), default=None)  # the first, as the checkpoint
    figure = Figure(figsize=(10, 7.5), layout="constrained")  # as wide as a page shows it
    axes = figure.subplots(2, 2, sharex=True)  # a single evaluation stands at its step
    for axis, (title, columns) in zip(axes.flat, CURVES.items(), strict=True):
        for number, column in enumerate(columns):
            for name, line in ((column, "-"), (f"val_{column}", "--")):
                points = max((_points(table, name) for table in tables), key=len)
                if len(points) and (points[:, 1].any() or column not in LOSS_NAMES):  # 0: the loss lacks this term
                    axis.plot(*points.T, line, label=name, color=f"C{number}", marker="." if len(points) < 60 else "")
        if best is not None:
            text = f"best: epoch {best['epoch']}, AP {float(best['AP']):.3f}"
            axis.axvline(int(best["step"]), color="black", linestyle=":", label=text)
        axis.set(title=title, xlabel="step", ylim=(0, 1.05 * axis.get_ylim()[1]))
        if axis.lines:
            axis.legend(fontsize=8, ncol=2)
    figure.savefig(out, dpi=DPI)


def _rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _points(rows: list[dict[str, str]], column: str) -> np.ndarray:
    """Step and value (n, 2) of a column; more than MOST_POINTS become means of neighbours."""
    points = [(float(row["step"]), float(row[column])) for row in rows if row.get(column) and float(row[column]) >= 0]
    blocks = np.array_split(np.array(points).reshape(-1, 2), min(MOST_POINTS, max(1, len(points))))
    return np.array([block.mean(0) for block in blocks if len(block)]).reshape(-1, 2)


NAMED_CLASSES = 10  # in the legend: as many colours differ


def draw_precision_recall(evaluation: Evaluation, out: Path) -> None:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    from matplotlib.figure import Figure

    truth = evaluation.truth
    coco = match(truth, evaluation.detections, evaluation.scorer, every_size=False)
    precision = coco.eval["precision"][..., 0, 2]  # (IoU thresholds, recalls, classes)
    boxes = [row["boxes"] for row in evaluation.per_class.values()]
    order = [index for index in np.argsort(boxes)[::-1] if boxes[index]]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, values, title in (
        (left, precision[0], "IoU .5: the area is AP50"),
        (right, precision.mean(0), "mean over IoU .5 to .95: the area is AP"),
    ):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), title=title, xlabel="recall", ylabel="precision")
        recalls = np.linspace(0, 1, len(values))
        for number, index in enumerate(order):
            named = {"label": f"{label(truth.names[index])}  {values[:, index].mean():.3f}"}
            axis.plot(recalls, values[:, index], **(named if number < NAMED_CLASSES else {"color": "0.8", "zorder": 1}))
        if order:
            mean = values[:, order].mean(1)
            axis.plot(recalls, mean, color="black", linewidth=2.5, label=f"mean of all classes  {mean.mean():.3f}")
            axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out, dpi=DPI)


def draw_over_confidence(evaluation: Evaluation, out: Path) -> None:
    """Draw F1, precision and recall over the score from which detections count, of each class."""
    from matplotlib.figure import Figure

    names, boxes = evaluation.truth.names, [row["boxes"] for row in evaluation.per_class.values()]
    matches = find_matches(evaluation.truth, evaluation.detections, evaluation.scorer)
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    with_boxes = [index for index in np.argsort(boxes)[::-1].tolist() if boxes[index]]
    for number, index in enumerate([*with_boxes, None]):
        scores, *curves = over_scores(matches, index)
        points = np.linspace(0, len(scores) - 1, min(MOST_POINTS, len(scores))).astype(int)
        style: dict[str, Any] = {"label": label(names[index])} if index is not None else {}
        style = style if number < NAMED_CLASSES else {"color": "0.8", "zorder": 1}
        if index is None:
            at = evaluation.at_best_f1
            style = {"label": f"all: best F1 {at['f1']:.3f} from {at['threshold']:.3f} on"}
            style |= {"color": "black", "linewidth": 2.5}
        for axis, curve in zip(axes, curves, strict=True):
            axis.plot(scores[points], curve[points], **style)
    for axis, title in zip(axes, ("F1", "precision", "recall"), strict=True):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), title=title, xlabel="confidence")
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out, dpi=DPI)


def label(name: str) -> str:
    """A class name that fits beside a chart; matplotlib hides labels that start with "_"."""
    name = printable(name)
    text = name if len(name) <= 30 else f"{name[:27]}..."
    return f" {text}" if text.startswith("_") else text


MOST_CONFUSED = 30  # classes in the matrix: more cannot be read


def count_confusions(evaluation: Evaluation, threshold: float) -> np.ndarray:
    """Count labels (rows) by the class reported for them (columns), int64 (K + 1, K + 1).

    The last row counts detections where nothing is labelled, the last column missed labels.
    Detections from ``threshold`` on are matched as pycocotools does at IoU .5, but to labels of any
    class: by falling score, at most 100 on an image, those on crowds do not count.
    """
    truth, found = evaluation.truth, evaluation.detections
    found = canonical_order(found[found["score"] >= threshold]).astype(DETECTION_AS_READ)  # keeps this order
    reported, found["class"] = found["class"].copy(), 0
    one_class = replace(truth, classes=np.zeros_like(truth.classes), names=["any"])
    labelled = np.append(truth.classes, len(truth.names))  # the last one is for match 0: none
    counts = np.zeros((len(truth.names) + 1, len(truth.names) + 1), np.int64)
    for image in match(one_class, found, evaluation.scorer, every_size=False).evalImgs:
        if image is not None:
            rows = image["dtMatches"][0], image["dtIds"], image["dtIgnore"][0]
            matches, numbers, ignored = (np.array(row, np.int64) for row in rows)
            np.add.at(counts, (labelled[matches - 1], reported[numbers - 1]), 1 - ignored)
    counts[:-1, -1] = [row["boxes"] for row in evaluation.per_class.values()] - counts[:-1].sum(1)
    return counts


def draw_confusion(evaluation: Evaluation, threshold: float, out: Path) -> None:
    """Draw the confusions from a score on, of at most MOST_CONFUSED classes."""
    from matplotlib.figure import Figure

    counts, classes = count_confusions(evaluation, threshold), len(evaluation.truth.names)
    between = counts[:-1, :-1] * ~np.eye(classes, dtype=bool)
    drawn = np.sort(np.argsort(-between.sum(0) - between.sum(1), kind="stable")[:MOST_CONFUSED])
    names = [label(evaluation.truth.names[index]) for index in drawn]
    counts = counts[np.ix_([*drawn, classes], [*drawn, classes])]
    side = 4 + 0.35 * len(names)
    figure = Figure(figsize=(2 * side, side), layout="tight")
    limit = f", the {len(names)} most confused of {classes} classes" if len(names) < classes else ""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for axis, cells, what in zip(figure.subplots(1, 2), (counts, shares), ("boxes", "shares of each row"), strict=True):
        most = cells[:-1].max(initial=0) or 1  # detections where nothing is may outnumber all others
        axis.imshow(cells, cmap="Blues", vmin=0, vmax=most)
        for row, column in np.argwhere(cells):
            text = f"{cells[row, column]:.2f}".removeprefix("0") if what != "boxes" else str(cells[row, column])
            color = "white" if cells[row, column] > most / 2 else "black"
            axis.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(cells)), [*names, "missed"], rotation=90)
        axis.set_yticks(range(len(cells)), [*names, "nothing there"])
        axis.grid(visible=False)
        axis.set(xlabel="reported class", ylabel="labelled class", title=f"{what}, score from {threshold:.3g}{limit}")
    figure.savefig(out, dpi=DPI)


USUAL_THRESHOLD = 0.3  # if no detection is right, so that no score is better than another
SHEET_IMAGES, MOST_DRAWN = 8, 30  # images, and detections on one; more hide one another
LEAST_SCORE = 0.1  # of a drawn detection: the best threshold of a young network may be lower


def draw_detections(evaluation: Evaluation, read: Read, name_of: NameOf, confidence: float, out: Path) -> None:
    """Save the first images twice: labels without crowds left, the best detections right."""
    truth, found, cells = evaluation.truth, evaluation.detections, []
    for i in range(min(SHEET_IMAGES, len(truth.image_ids))):
        if (image := read(i)) is None:
            continue
        labels = np.flatnonzero((truth.image_of_box == i) & ~truth.crowd.astype(bool))
        title = f"{name_of(i)}, labels: {len(labels)}"
        cells.append(Cell(image, to_xyxy(truth.boxes_xywh[labels]), truth.classes[labels], truth.names, None, title))
        of_image = found[(found["image_id"] == truth.image_ids[i]) & (found["score"] >= confidence)]
        best = of_image[np.argsort(-of_image["score"], kind="stable")][:MOST_DRAWN]
        title = f"detections: {len(best)}, score from {confidence:.3g}"
        cells.append(Cell(image, to_xyxy(best["box_xywh"]), best["class"], truth.names, best["score"], title))
    if cells:
        save_sheet(cells, 4, out)
