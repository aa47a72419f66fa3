"""Draw the plots of a training or an evaluation."""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from data import Annotations
from data.errors import printable
from data.progress import LogLine
from train_utils.coco_eval import ABSENT, Evaluation, find_matches, match, over_scores
from train_utils.report import draw, mistakes
from train_utils.results import DETECTION_AS_READ, canonical_order, to_xyxy
from train_utils.train_state import LOSS_NAMES

FOLDER = "plots"  # in the folder of the run or of the evaluation
PLOTS = {  # titles by file name, in the order to look at them
    "curves.png": "Losses (validation dashed), AP and learning rate by step; dotted: the best epoch",
    "precision_recall.png": "pycocotools' precision at each recall; the area under a line is its AP",
    "confidence.png": "F1, precision and recall at IoU .5 over the lowest score that counts",
    "confusion.png": "Labelled boxes by the class that was reported for them, and as shares of the labels",
    "val_detections.jpg": "The first validation images: labels left, detections right",
    "mistakes.jpg": "The worst mistakes: false boxes orange, labels blue; see mistakes.csv",
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 110,
    "text.parse_math": False,  # a "$" in a class name does not start a formula
    "font.family": ["sans-serif", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC"],
}

Read = Callable[[int], ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_evaluation(folder: Path, evaluation: Evaluation, read: Read, name_of: NameOf, warn: LogLine) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. Errors go to ``warn`` and
    remove an older picture of that name.
    """
    threshold = evaluation.at_best_f1["threshold"]
    if threshold == ABSENT:
        threshold = USUAL_THRESHOLD
    sheet = folder / f"{evaluation.about.get('split', 'val')}_detections.jpg"
    save_plot(folder / "precision_recall.png", warn, draw_precision_recall, evaluation)
    save_plot(folder / "confidence.png", warn, draw_over_confidence, evaluation)
    save_plot(folder / "confusion.png", warn, draw_confusion, evaluation, threshold)
    save_plot(sheet, warn, draw_detections, evaluation, read, name_of, max(threshold, LEAST_SCORE), sheet)
    sheet = folder / "mistakes.jpg"
    save_plot(sheet, warn, mistakes.draw_mistakes, evaluation, threshold, read, name_of, sheet)


def save_plot(out: Path, warn: LogLine, draw: Callable[..., Any], *arguments: Any) -> None:
    """Draw, and save the figure if there is one; an error is only a warning: the run goes on."""
    try:
        import matplotlib

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        # It warns of each absent font of STYLE.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as caught:
            figure = draw(*arguments)
            if figure is not None:
                figure.savefig(out)
        if caught:  # mostly letters that no font has
            warn(f"warning: {out} was drawn with {len(caught)} warning(s), the first: {caught[0].message}")
    except Exception as error:
        warn(f"warning: {out} was not drawn ({type(error).__name__}: {error})")


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure of matplotlib, which takes longer to import than to draw; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


CURVES = {
    "loss": LOSS_NAMES,
    "average precision; precision and recall at the best F1": "AP AP50 AP75 precision recall".split(),
    "AP by object size": ("APs", "APm", "APl"),
    "learning rate": ("lr",),
}
MOST_POINTS = 300  # of a line; neighbours are averaged


def draw_curves(metrics_csv: Path, best_epoch: int) -> Any:
    """Draw the columns of a metrics.csv over the steps, without empty cells.

    A steps.csv beside it gives losses by step instead of by epoch. A vertical line marks
    ``best_epoch``: earlier ones may have been scored on other images.
    """
    epochs = _read(metrics_csv)
    steps = _read(metrics_csv.with_name("steps.csv"))
    figure = new_figure(10, 7.5)  # as wide as a page shows it
    axes = figure.subplots(2, 2, sharex=True)  # a single evaluation stands at its step
    for axis, (title, columns) in zip(axes.flat, CURVES.items(), strict=True):
        for number, column in enumerate(columns):
            for name, line in ((column, "-"), (f"val_{column}", "--")):
                points = max(_points(epochs, name), _points(steps, name), key=len)
                is_absent = column in LOSS_NAMES and not points[:, 1].any()  # a term that the loss lacks
                if len(points) and not is_absent:
                    marker = "." if len(points) < 60 else ""
                    axis.plot(*points.T, line, label=name, color=f"C{number}", marker=marker)
        for best in epochs[(epochs["epoch"] == best_epoch) & (epochs["AP"] >= 0)]:
            text = f"best: epoch {best['epoch']:.0f}, AP {best['AP']:.3f}"
            axis.axvline(best["step"], color="black", linestyle=":", label=text)
        axis.set(title=title, xlabel="step", ylim=(0, 1.05 * axis.get_ylim()[1]))
        if axis.lines:
            axis.legend(ncol=2)
    return figure


def _read(table: Path) -> ndarray:
    """The rows of a table with float columns, NaN for empty cells; none if it is absent."""
    if not table.exists():
        return np.zeros(0, [("step", float)])
    return np.atleast_1d(np.genfromtxt(table, delimiter=",", names=True))


def _points(table: ndarray, column: str) -> ndarray:
    """Step and value (n, 2) of a column; more than MOST_POINTS become means of neighbours."""
    if column not in (table.dtype.names or ()):
        return np.zeros((0, 2))
    measured = table[table[column] >= 0]
    points = np.stack([measured["step"], measured[column]], 1)
    if len(points) > MOST_POINTS:
        blocks = np.array_split(points, MOST_POINTS)
        points = np.array([block.mean(0) for block in blocks])
    return points


NAMED_CLASSES = 10  # in the legend: as many colours differ
OF_ALL = {"color": "black", "linewidth": 2.5}  # the line of all classes
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # a legend
SHARES = {"xlim": (0, 1), "ylim": (0, 1.02)}  # an axis


def _lines(evaluation: Evaluation) -> dict[int | None, dict[str, Any]]:
    """How to draw the line of each class with boxes, those with most first."""
    boxes = [row["boxes"] for row in evaluation.per_class.values()]
    styles: dict[int | None, dict[str, Any]] = {}
    for index in np.argsort(boxes)[::-1]:
        if boxes[index]:
            is_named = len(styles) < NAMED_CLASSES
            name = label(evaluation.truth.names[index])
            styles[index] = {"label": name} if is_named else {"label": f"_{name}", "color": "0.8", "zorder": 1}
    return styles


def draw_precision_recall(evaluation: Evaluation) -> Any:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    coco = match(evaluation.truth, evaluation.detections, evaluation.scorer, every_size=False)
    precision = coco.eval["precision"][..., 0, 2]  # (IoU thresholds, recalls, classes)
    lines = _lines(evaluation)
    figure = new_figure(11, 4.2)
    titles = ("IoU .5: the area is AP50", "mean over IoU .5 to .95: the area is AP")
    heights = (precision[0], precision.mean(0))
    for axis, title, values in zip(figure.subplots(1, 2), titles, heights, strict=True):
        axis.set(**SHARES, title=title, xlabel="recall", ylabel="precision")
        curves = [(values[:, index], style) for index, style in lines.items()]
        if lines:
            curves.append((values[:, list(lines)].mean(1), {"label": "mean of all classes", **OF_ALL}))
        for curve, style in curves:
            text = f"{style['label']}  {curve.mean():.3f}"
            axis.plot(np.linspace(0, 1, len(curve)), curve, **style | {"label": text})
        if lines:
            axis.legend(**BESIDE)
    return figure


def draw_over_confidence(evaluation: Evaluation) -> Any:
    """Draw F1, precision and recall over the score from which detections count, of each class."""
    matches = find_matches(evaluation.truth, evaluation.detections, evaluation.scorer)
    best = evaluation.at_best_f1
    text = f"all: best F1 {best['f1']:.3f} from {best['threshold']:.3f} on"
    lines = _lines(evaluation)
    lines[None] = {"label": text, **OF_ALL}
    figure = new_figure(11, 3.8)
    axes = figure.subplots(1, 3)
    for index, style in lines.items():
        scores, *curves = over_scores(matches, index)
        step = len(scores) // MOST_POINTS + 1
        for axis, title, curve in zip(axes, ("F1", "precision", "recall"), curves, strict=True):
            axis.set(**SHARES, title=title, xlabel="confidence")
            axis.plot(scores[::step], curve[::step], **style)
    axes[-1].legend(**BESIDE)
    return figure


def draw_labels(splits: Mapping[str, Annotations]) -> Any:
    """Draw of each split how many boxes a class has, how large they are and where they lie."""
    figure = new_figure(14, 5)
    counts, sizes, centres = figure.subplots(1, 3)
    names = [*map(label, next(iter(splits.values())).names)]
    step = len(names) // MOST_CONFUSED + 1
    for split, found in splits.items():
        counts.plot(np.bincount(found.classes, minlength=len(names)), "o", label=split)
        sides = np.tile(found.sizes[:, ::-1], 2).repeat(np.diff(found.offsets), axis=0)
        left, top, width, height = (found.boxes_xywh / sides).T
        sizes.plot(width, height, ".", alpha=0.3)
        centres.plot(left + width / 2, top + height / 2, ".", alpha=0.3)
    counts.legend(title=f"boxes of {len(names)} classes")
    counts.set_xticks(range(0, len(names), step), names[::step], rotation=90)  # names cut to 30 letters may be equal
    sizes.set(**SHARES, title="sizes: width and height in shares of the image")
    centres.set(xlim=(0, 1), ylim=(1, 0), title="places: centres, as the image lies")
    return figure


def label(name: str) -> str:
    """A class name that fits beside a chart; matplotlib hides labels that start with "_"."""
    name = printable(name)
    text = name if len(name) <= 30 else f"{name[:27]}..."
    return f" {text}" if text.startswith("_") else text


MOST_CONFUSED = 30  # classes in the matrix: more cannot be read


def count_confusions(evaluation: Evaluation, threshold: float) -> ndarray:
    """Count labels (rows) by the class reported for them (columns), int64 (K + 1, K + 1).

    The last row counts detections where nothing is labelled, the last column missed labels.
    Detections from ``threshold`` on are matched as pycocotools does at IoU .5, but to labels of any
    class: by falling score, at most 100 on an image, those on crowds do not count.
    """
    truth, found = evaluation.truth, evaluation.detections
    found = canonical_order(found[found["score"] >= threshold]).astype(DETECTION_AS_READ)  # keeps this order
    reported = found["class"].copy()
    found["class"] = 0
    one_class = replace(truth, classes=np.zeros_like(truth.classes), names=["any"])
    classes = len(truth.names)
    labelled = np.append(truth.classes, classes)  # the last one is for match 0: none
    counts = np.zeros((classes + 1, classes + 1), np.int64)
    for image in match(one_class, found, evaluation.scorer, every_size=False, ious=1).evalImgs:
        if image is not None:
            label_ids, found_ids, ignored = np.array([image["dtMatches"][0], image["dtIds"], image["dtIgnore"][0]], int)
            np.add.at(counts, (labelled[label_ids - 1], reported[found_ids - 1]), 1 - ignored)
    boxes = [row["boxes"] for row in evaluation.per_class.values()]
    counts[:-1, -1] = boxes - counts[:-1].sum(1)
    return counts


def draw_confusion(evaluation: Evaluation, threshold: float) -> Any:
    """Draw the confusions from a score on, of at most MOST_CONFUSED classes."""
    counts = count_confusions(evaluation, threshold)
    classes = len(evaluation.truth.names)
    between = counts[:-1, :-1] * ~np.eye(classes, dtype=bool)
    confused = between.sum(0) + between.sum(1)
    drawn = sorted(np.argsort(-confused, kind="stable")[:MOST_CONFUSED])
    names = [label(evaluation.truth.names[index]) for index in drawn]
    drawn.append(classes)
    counts = counts[drawn][:, drawn]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    from_score = f"score from {threshold:.3g}"
    if len(names) < classes:
        from_score += f", the {len(names)} most confused of {classes} classes"
    side = 4 + 0.35 * len(names)
    figure = new_figure(2 * side, side, layout="tight")
    panels = (("boxes", counts, "d"), ("shares of each row", shares, ".2f"))
    for axis, (title, cells, form) in zip(figure.subplots(1, 2), panels, strict=True):
        most = cells[:-1].max(initial=0) or 1  # detections where nothing is may outnumber all others
        axis.imshow(cells, cmap="Blues", vmin=0, vmax=most)
        for row, column in np.argwhere(cells):
            cell = cells[row, column]
            color = "white" if cell > most / 2 else "black"
            axis.text(column, row, f"{cell:{form}}", ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(cells)), [*names, "missed"], rotation=90)
        axis.set_yticks(range(len(cells)), [*names, "nothing there"])
        axis.grid(visible=False)
        axis.set(title=f"{title}, {from_score}", xlabel="reported class", ylabel="labelled class")
    return figure


USUAL_THRESHOLD = 0.3  # if no detection is right, so that no score is better than another
SHEET_IMAGES, MOST_DRAWN = 8, 30  # images, and detections on one; more hide one another
LEAST_SCORE = 0.1  # of a drawn detection: the best threshold of a young network may be lower


def draw_detections(result: Evaluation, read: Read, name_of: NameOf, confidence: float, out: Path) -> None:
    """Save the first images twice: labels without crowds left, the best detections right."""
    truth, found = result.truth, result.detections
    counted = ~truth.crowd.astype(bool)
    cells = []
    for i, number in enumerate(truth.image_ids[:SHEET_IMAGES]):
        image = read(i)
        if image is None:
            continue
        labels = np.flatnonzero((truth.image_of_box == i) & counted)
        drawn = draw.draw_cell(image, to_xyxy(truth.boxes_xywh[labels]), truth.classes[labels], truth.names)
        cells.append((drawn, f"{name_of(i)}, labels: {len(labels)}"))
        best = found[(found["image_id"] == number) & (found["score"] >= confidence)]
        best = best[np.argsort(-best["score"], kind="stable")][:MOST_DRAWN]
        drawn = draw.draw_cell(image, to_xyxy(best["box_xywh"]), best["class"], truth.names, best["score"])
        cells.append((drawn, f"detections: {len(best)}, score from {confidence:.3g}"))
    if cells:
        draw.save_sheet(cells, out)
