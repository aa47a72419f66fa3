"""The plots of a training or an evaluation: which there are, what they show, and their drawing."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from train_utils.coco_eval import accumulate, hotcoco_evaluation
from train_utils.curves import IOU, pooled_curve
from train_utils.detections import Detections, GroundTruth, boxes_xyxy_of
from train_utils.draw import Cell, save_sheet

if TYPE_CHECKING:  # matplotlib takes longer to import than to draw, so only charts pay for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Four of Okabe and Ito's colours (Color Universal Design, 2008) and two darker ones of Tol (2021).
# Lines with the same dashes differ in lightness, which is what a grey print shows of a colour.
COLORS = ("#0072B2", "#D55E00", "#E69F00", "#56B4E9", "#882255", "#117733")
DASHES = ("-", "--", "-.", ":")
LONGEST = 30  # characters of a class name that show
DPI = 110


def chart(
    width: float, height: float, columns: int = 1, layout: Literal["constrained", "tight"] = "constrained"
) -> tuple[Figure, list[Axes]]:
    """A figure of that size in inches, with its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save(figure: Figure, out: Path) -> None:
    """Write ``figure`` to the file ``out``."""
    figure.savefig(out, dpi=DPI)


def label(name: str) -> str:
    """Escape a class name: in matplotlib "$" starts a formula, and a leading "_" hides a label.

    Letters that its font lacks show as their code, U+732B, instead of as squares that are alike.
    """
    name = "".join(letter if ord(letter) in _letters() else f"U+{ord(letter):04X}" for letter in name)
    shown = (name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}...").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _letters() -> frozenset[int]:
    """The code points of DejaVu Sans, which comes with matplotlib and stands in for other fonts."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the ``number``-th line of a chart."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}


def write_instead(axis: Axes, text: str) -> None:
    """Write ``text`` in the middle of an empty chart."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color="grey")


CURVE_GROUPS = (
    ("loss", ("loss", "loss_box", "loss_objectness", "loss_classification")),
    ("average precision", ("AP", "AP50", "AP75")),
    ("AP by object size", ("APs", "APm", "APl")),
    ("learning rate", ("lr",)),
)
FRACTIONS = ("average precision", "AP by object size")  # groups with an axis from 0 to at most 1
SMOOTHED = ("loss", *FRACTIONS)  # the learning rate has no noise
MARKED_POINTS = 60  # a line of fewer points shows each
MOST_POINTS = 2000  # of a line: more are narrower than a pixel
LEAST_SMOOTHED = 15  # points; fewer are shown as they are
SPREAD = 0.03  # standard deviation of the smoothing, as a share of the points


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the steps to the file ``out``; skip empty cells.

    A steps.csv beside it gives losses by step instead of by epoch. Long curves are smoothed, with
    the figures themselves behind them in pale. A vertical line marks the epoch with the best AP.
    """
    from matplotlib.ticker import MaxNLocator

    rows, steps_csv = _rows(metrics_csv), metrics_csv.with_name("steps.csv")
    tables = (rows, _rows(steps_csv) if steps_csv.exists() else [])
    figure, axes = chart(4.2 * len(CURVE_GROUPS), 4.4, len(CURVE_GROUPS))
    scored = [row for row in rows if row.get("AP") and float(row["AP"]) >= 0]
    best = max(scored, key=lambda row: float(row["AP"]), default=None)  # the first, as the checkpoint
    for axis, (title, group) in zip(axes, CURVE_GROUPS, strict=True):
        for number, column in enumerate(group):
            points = max((_points(table, column) for table in tables), key=len)
            if not len(points):
                continue
            steps, values = points.T
            style = line_style(number) | {"marker": "." if len(points) < MARKED_POINTS else "", "label": column}
            if title in SMOOTHED and len(points) >= LEAST_SMOOTHED:
                axis.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.35)
                values, style["marker"] = smooth(values), ""
            axis.plot(steps, values, **style)
        axis.set(
            title=title,
            xlabel="step" + (f" ({int(rows[-1]['step']) / int(rows[-1]['epoch']):g} per epoch)" if rows else ""),
        )
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if rows:  # the same for all, even for figures that are not there in every epoch
            axis.set_xlim(0, int(rows[-1]["step"]) * 1.02)
        if title in FRACTIONS:
            top = max((float(np.max(line.get_ydata())) for line in axis.lines), default=1)
            axis.set_ylim(0, 1 if top > 0.4 else max(0.1, 1.3 * top))
        if not axis.lines:
            write_instead(axis, "no figures")
            continue
        if best is not None:
            text = f"best: epoch {best['epoch']}" + (f", AP {float(best['AP']):.3f}" if title in FRACTIONS else "")
            axis.axvline(int(best["step"]), color="black", linestyle=":", linewidth=1, label=text)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)
    save(figure, out)


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the neighbours of each of the values (n,), weighted by a Gaussian.

    Unlike a running average it does not lag; at the ends it takes what neighbours there are.
    """
    spread = max(1.0, SPREAD * len(values))
    away = np.subtract.outer(np.arange(len(values)), np.arange(len(values))) / spread
    weights = np.exp(-(away**2) / 2)
    return np.asarray(weights @ values / weights.sum(1))


def _rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _points(rows: list[dict[str, str]], column: str) -> np.ndarray:
    """Step and value (n, 2) of a column; more than MOST_POINTS become means of neighbours."""
    points = [(float(row["step"]), float(row[column])) for row in rows if row.get(column) and float(row[column]) >= 0]
    blocks = np.array_split(np.array(points).reshape(-1, 2), min(MOST_POINTS, max(1, len(points))))
    return np.array([block.mean(0) for block in blocks if len(block)]).reshape(-1, 2)


RECALLS = np.linspace(0, 1, 101)  # pycocotools' sample of the recalls
NAMED = 10  # classes with a line of their own in the legend; 12 pairs of colour and dashes differ
GREY: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
MOST_ROWS = 30  # classes of a whole confusion matrix; of more, hotcoco draws the 25 most confused


def draw_precision_recall(truth: GroundTruth, detections: Detections, out: Path) -> None:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    precision = accumulate(truth, detections, "hotcoco").precision[..., 0, 2]  # (IoU thresholds, recalls, classes)
    boxes = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    order = [cls for cls in np.argsort(boxes)[::-1] if precision[0, 0, cls] > -1]
    figure, axes = chart(14, 4.6, 2)
    for axis, values, title in (
        (axes[0], precision[0], "IoU .5: the area is AP50"),
        (axes[1], precision.mean(0), "mean over IoU .5 to .95: the area is AP"),
    ):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), title=title, xlabel="recall", ylabel="precision")
        if not order:
            write_instead(axis, "no labels")
            continue
        for number, cls in enumerate(order):
            text = f"{label(truth.names[cls])}  {values[:, cls].mean():.3f}"
            axis.plot(RECALLS, values[:, cls], **(line_style(number) | {"label": text} if number < NAMED else GREY))
        mean = values[:, order].mean(1)
        axis.plot(RECALLS, mean, color="black", linewidth=2.5, label=f"mean of all classes  {mean.mean():.3f}")
        if len(order) > NAMED:
            axis.plot([], [], label=f"{len(order) - NAMED} more classes", **GREY)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, out)


def draw_confusion(truth: GroundTruth, detections: Detections, threshold: float, out: Path) -> None:
    """Count labels by the class that detections from a score on report; draw it with background."""
    from hotcoco.plot import confusion_matrix

    reported = detections[detections["score"] >= threshold]
    evaluation = hotcoco_evaluation(truth, reported)
    names = [label(name) for name in truth.names]
    side = 4 + 0.35 * min(len(names), MOST_ROWS)
    figure, (axis,) = chart(side, side, layout="tight")
    confusion_matrix(evaluation.confusion_matrix(iou_thr=IOU) | {"cat_names": names}, normalize=False, ax=axis)
    shown = [text.get_text() for text in axis.get_xticklabels()][:-1]
    axis.set_xticklabels([*shown, "missed"])
    axis.set_yticklabels([*shown, "nothing there"])
    part = f", the {len(shown)} most confused of {len(names)} classes" if len(shown) < len(names) else ""
    axis.set(xlabel="reported class", ylabel="labelled class", title=f"boxes, score from {threshold:.2g}{part}")
    save(figure, out)


USUAL_THRESHOLD = 0.3  # where no detection is right, so that no score is better than another
SHEET_IMAGES, MOST_DRAWN = 8, 30  # images, and detections on one; more hide one another
LEAST_SHOWN = 0.1  # score of a box beside the labels: a young network's best threshold may be lower
FOLDER = "plots"  # in the folder of the run or of the evaluation
PLOTS = {  # titles by file name, in the order in which one looks at them
    "curves.png": "Losses, AP and learning rate by step; the dotted line is the best epoch",
    "precision_recall.png": "pycocotools' precision at each recall; the area under a line is its AP",
    "confusion.png": "Labelled boxes by the class that was reported for them",
    "val_detections.jpg": "The first validation images: labels left, detections right",
}

Warn = Callable[[str], object]
Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_training(folder: Path, metrics_csv: Path, warn: Warn) -> None:
    """Draw the curves of a training into ``folder``."""
    _draw(folder / "curves.png", partial(draw_curves, metrics_csv), warn)


def draw_evaluation(
    folder: Path, truth: GroundTruth, detections: Detections, read: Read, name_of: NameOf, warn: Warn
) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. ``warn`` gets what cannot be
    drawn; an old picture in its place goes.
    """
    best = pooled_curve(truth, detections).best()
    threshold = best["threshold"] if best is not None else USUAL_THRESHOLD
    least = max(threshold, LEAST_SHOWN)
    drawings: dict[str, Callable[[Path], None]] = {
        "precision_recall.png": partial(draw_precision_recall, truth, detections),
        "confusion.png": partial(draw_confusion, truth, detections, threshold),
        "val_detections.jpg": partial(draw_detections, truth, detections, read, name_of, least),
    }
    for name, draw in drawings.items():
        _draw(folder / name, draw, warn)


def _draw(out: Path, draw: Callable[[Path], None], warn: Warn) -> None:
    """If drawing fails, only say so: what it shows is done, and must not be lost."""
    try:
        from hotcoco.plot import style

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        # hotcoco asks for bolder letters than its fonts have, which is nobody's news.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with style(paper_mode=True):
            draw(out)
    except Exception as error:
        warn(f"warning: {out} was not drawn ({type(error).__name__}: {error})")


def draw_detections(
    truth: GroundTruth, detections: Detections, read: Read, name_of: NameOf, confidence: float, out: Path
) -> None:
    """Save the first images twice: labels on the left, crowds aside, detections on the right.

    Of the detections from ``confidence`` at most MOST_DRAWN are drawn, the best.
    """
    cells = []
    for i in range(min(SHEET_IMAGES, len(truth.image_ids))):
        if (image := read(i)) is None:
            continue
        labels = np.flatnonzero((truth.image_of_box == i) & ~truth.crowd.astype(bool))
        title = f"{name_of(i)}: {len(labels)} labels"
        cells.append(Cell(image, truth.boxes_xyxy(labels), truth.classes[labels], truth.names, None, title))
        of_image = detections[detections["image_id"] == truth.image_ids[i]]
        ranked = of_image[np.argsort(-of_image["score"], kind="stable")]
        shown = ranked[ranked["score"] >= confidence][:MOST_DRAWN]
        title = f"{len(shown)} detections, score from {confidence:.2g}"
        cells.append(Cell(image, boxes_xyxy_of(shown), shown["class"], truth.names, shown["score"], title))
    if cells:
        save_sheet(cells, 4, out)
