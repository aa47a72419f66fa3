"""The plots of a training or an evaluation: which there are, what they show, and their drawing."""

import csv
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from conf import errors
from train_utils.coco_eval import IOU, Evaluation, best_f1, find_matches, match
from train_utils.draw import Cell, save_sheet
from train_utils.results import to_xyxy

# matplotlib takes longer to import than to draw, so only the functions that draw import it.
FOLDER = "plots"  # in the folder of the run or of the evaluation
PLOTS = {  # titles by file name, in the order in which one looks at them
    "curves.png": "Losses (validation dashed), AP and learning rate by step; the dotted line is the best epoch",
    "precision_recall.png": "pycocotools' precision at each recall; the area under a line is its AP",
    "confusion.png": "Labelled boxes by the class that was reported for them",
    "val_detections.jpg": "The first validation images: labels left, detections right",
}
DPI = 110

Warn = Callable[[str], object]
Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_training(folder: Path, metrics_csv: Path, warn: Warn) -> None:
    """Draw the curves of a training into ``folder``."""
    _draw(folder / "curves.png", lambda out: draw_curves(metrics_csv, out), warn)


def draw_evaluation(folder: Path, evaluation: Evaluation, read: Read, name_of: NameOf, warn: Warn) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. ``warn`` gets what cannot be
    drawn; an old picture in its place goes.
    """
    best = best_f1(find_matches(evaluation.truth, evaluation.detections, evaluation.scorer))
    threshold = best["threshold"] if best is not None else USUAL_THRESHOLD
    for name, draw in {
        "precision_recall.png": lambda out: draw_precision_recall(evaluation, out),
        "confusion.png": lambda out: draw_confusion(evaluation, threshold, out),
        "val_detections.jpg": lambda out: draw_detections(evaluation, read, name_of, max(threshold, LEAST_SHOWN), out),
    }.items():
        _draw(folder / name, draw, warn)


def _draw(out: Path, draw: Callable[[Path], None], warn: Warn) -> None:
    """If drawing fails, only say so: what it shows is done, and must not be lost."""
    try:
        import matplotlib
        from hotcoco.plot import style

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        # hotcoco asks for bolder letters than its fonts have, which is nobody's news.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with style(paper_mode=True), warnings.catch_warnings(record=True) as caught:
            fonts = [*matplotlib.rcParams["font.family"], "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC"]
            with matplotlib.rc_context({"text.parse_math": False, "font.family": fonts}):  # a "$" starts no formula
                draw(out)
        if caught:  # mostly letters that no font has
            warn(f"warning: {out} was drawn with {len(caught)} warning(s), the first: {caught[0].message}")
    except Exception as error:
        warn(f"warning: {out} was not drawn ({type(error).__name__}: {error})")


CURVES = {
    "loss": ("loss", "loss_box", "loss_objectness", "loss_classification"),
    "average precision": ("AP", "AP50", "AP75"),
    "AP by object size": ("APs", "APm", "APl"),
    "learning rate": ("lr",),
}
MOST_POINTS = 300  # of a line: of more, neighbours are averaged


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the steps to the file ``out``; skip empty cells.

    A steps.csv beside it gives losses by step instead of by epoch. A vertical line marks the epoch
    with the best AP.
    """
    from matplotlib.figure import Figure

    rows, steps_csv = _rows(metrics_csv), metrics_csv.with_name("steps.csv")
    tables = (rows, _rows(steps_csv) if steps_csv.exists() else [])
    scored = [row for row in rows if row.get("AP") and float(row["AP"]) >= 0]
    best = max(scored, key=lambda row: float(row["AP"]), default=None)  # the first, as the checkpoint
    figure = Figure(figsize=(17, 4.4), layout="constrained")
    for axis, (title, columns) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for number, column in enumerate(columns):
            for name, line in ((column, "-"), (f"val_{column}", "--")):
                points = max((_points(table, name) for table in tables), key=len)
                if len(points):
                    axis.plot(*points.T, line, label=name, color=f"C{number}", marker="." if len(points) < 60 else "")
        if best is not None:
            text = f"best: epoch {best['epoch']}, AP {float(best['AP']):.3f}"
            axis.axvline(int(best["step"]), color="black", linestyle=":", label=text)
        axis.set(title=title, xlabel="step")
        if axis.lines:
            axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)
    figure.savefig(out, dpi=DPI)


def _rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _points(rows: list[dict[str, str]], column: str) -> np.ndarray:
    """Step and value (n, 2) of a column; more than MOST_POINTS become means of neighbours."""
    points = [(float(row["step"]), float(row[column])) for row in rows if row.get(column) and float(row[column]) >= 0]
    blocks = np.array_split(np.array(points).reshape(-1, 2), min(MOST_POINTS, max(1, len(points))))
    return np.array([block.mean(0) for block in blocks if len(block)]).reshape(-1, 2)


NAMED = 10  # classes with a line of their own in the legend: as many colours differ


def draw_precision_recall(evaluation: Evaluation, out: Path) -> None:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    from matplotlib.figure import Figure

    truth = evaluation.truth
    coco = match(truth, evaluation.detections, evaluation.scorer, every_size=False)
    precision = coco.eval["precision"][..., 0, 2]  # (IoU thresholds, recalls, classes)
    boxes = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    order = [index for index in np.argsort(boxes)[::-1] if boxes[index]]
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    for axis, values, title in zip(
        figure.subplots(1, 2),
        (precision[0], precision.mean(0)),
        ("IoU .5: the area is AP50", "mean over IoU .5 to .95: the area is AP"),
        strict=True,
    ):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), title=title, xlabel="recall", ylabel="precision")
        recalls = np.linspace(0, 1, len(values))
        for number, index in enumerate(order):
            named = {"label": f"{label(truth.names[index])}  {values[:, index].mean():.3f}"}
            axis.plot(recalls, values[:, index], **(named if number < NAMED else {"color": "0.8", "zorder": 1}))
        if order:
            mean = values[:, order].mean(1)
            axis.plot(recalls, mean, color="black", linewidth=2.5, label=f"mean of all classes  {mean.mean():.3f}")
            axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out, dpi=DPI)


def label(name: str) -> str:
    """A class name that fits beside a chart; matplotlib hides labels that start with "_"."""
    name = errors.printable(name)
    shown = name if len(name) <= 30 else f"{name[:27]}..."
    return f" {shown}" if shown.startswith("_") else shown


def draw_confusion(evaluation: Evaluation, threshold: float, out: Path) -> None:
    """Count labels by the class that detections from a score on report; draw it with background.

    Of more than 30 classes hotcoco draws the 25 most confused.
    """
    from hotcoco.plot import confusion_matrix
    from matplotlib.figure import Figure

    truth, found = evaluation.truth, evaluation.detections
    coco = match(truth, found[found["score"] >= threshold], every_size=False)
    names = [label(name) for name in truth.names]
    side = 4 + 0.35 * min(len(names), 30)
    figure = Figure(figsize=(side, side), layout="tight")
    axis = figure.subplots()
    confusion_matrix(coco.confusion_matrix(iou_thr=IOU) | {"cat_names": names}, normalize=False, ax=axis)
    shown = [text.get_text() for text in axis.get_xticklabels()][:-1]
    axis.set_xticklabels([*shown, "missed"])
    axis.set_yticklabels([*shown, "nothing there"])
    part = f", the {len(shown)} most confused of {len(names)} classes" if len(shown) < len(names) else ""
    axis.set(xlabel="reported class", ylabel="labelled class", title=f"boxes, score from {threshold:.2g}{part}")
    figure.savefig(out, dpi=DPI)


USUAL_THRESHOLD = 0.3  # where no detection is right, so that no score is better than another
SHEET_IMAGES, MOST_DRAWN = 8, 30  # images, and detections on one; more hide one another
LEAST_SHOWN = 0.1  # score of a box beside the labels: a young network's best threshold may be lower


def draw_detections(evaluation: Evaluation, read: Read, name_of: NameOf, confidence: float, out: Path) -> None:
    """Save the first images twice: labels on the left, crowds aside, detections on the right.

    Of the detections from ``confidence`` at most MOST_DRAWN are drawn, the best.
    """
    truth, found, cells = evaluation.truth, evaluation.detections, []
    for i in range(min(SHEET_IMAGES, len(truth.image_ids))):
        if (image := read(i)) is None:
            continue
        labels = np.flatnonzero((truth.image_of_box == i) & ~truth.crowd.astype(bool))
        title = f"{name_of(i)}, labels: {len(labels)}"
        cells.append(Cell(image, to_xyxy(truth.boxes_xywh[labels]), truth.classes[labels], truth.names, None, title))
        of_image = found[(found["image_id"] == truth.image_ids[i]) & (found["score"] >= confidence)]
        shown = of_image[np.argsort(-of_image["score"], kind="stable")][:MOST_DRAWN]
        title = f"detections: {len(shown)}, score from {confidence:.2g}"
        cells.append(Cell(image, to_xyxy(shown["box_xywh"]), shown["class"], truth.names, shown["score"], title))
    if cells:
        save_sheet(cells, 4, out)
