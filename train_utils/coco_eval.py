"""COCO metrics from plain arrays: the same to the last bit however the work was distributed.

pycocotools is the reference; hotcoco computes the same bits a hundred times as fast. Both get what
they would read from files, in the same order: images by id, detections in canonical order (equal
scores rank by it), classes and images counted from 1. Ground truth keeps the float64 numbers of its
file, because a rounded box or area changes matches.
"""

import contextlib
import io
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from conf import ConfigError, errors
from conf.schema import Scorer
from train_utils.results import Detections, GroundTruth, canonical_order

# In the order of pycocotools' stats; s, m, l: boxes of less than 32**2, up to 96**2, more pixels.
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
PER_CLASS = ("AP", "AP50", "APs", "APm", "APl")
OPERATING_POINT = ("threshold", "f1", "precision", "recall")  # of a class, as best_f1 finds it
ABSENT = -1.0  # pycocotools' metric where there is no ground truth
IOU = 0.5  # of the confusion matrix
TESTED_HOTCOCO = "1.3."  # gives pycocotools' bits; a later version may not


class Evaluation(NamedTuple):
    """The COCO metrics and what they were computed from; one without ground truth is ABSENT."""

    metrics: dict[str, float]  # by METRICS
    per_class: dict[str, dict[str, float]]  # by class name: PER_CLASS, images, boxes (no crowds)
    truth: GroundTruth
    detections: Detections  # in any order
    losses: dict[str, float]  # by LOSS_NAMES, of the validation images of a training; else empty
    scorer: str  # as choose_scorer names it


def choose_scorer(wanted: Scorer = Scorer.auto) -> str:
    """Name and version of the package that scores, such as ``pycocotools 2.0.11``.

    ``auto`` takes hotcoco where a tested version is installed, else pycocotools. Raises ConfigError
    if hotcoco is wanted and no tested version is installed.
    """
    try:
        from hotcoco import __version__ as installed
    except ImportError:
        installed = "none"
    is_tested = installed.startswith(TESTED_HOTCOCO)
    if wanted is Scorer.hotcoco and not is_tested:
        command = errors.install_command(f"hotcoco=={TESTED_HOTCOCO}*")
        raise ConfigError(
            f"evaluate.scorer=hotcoco needs hotcoco {TESTED_HOTCOCO}x, installed is {installed}. "
            f"fix: evaluate.scorer=auto, or {command}"
        )
    if is_tested and wanted is not Scorer.pycocotools:
        return f"hotcoco {installed}"
    return f"pycocotools {version('pycocotools')}"


def match(truth: GroundTruth, detections: Detections, scorer: str | None = None, *, every_size: bool = True) -> Any:
    """Return COCOeval of pycocotools or hotcoco after ``evaluate`` and ``accumulate``.

    It numbers images, classes, boxes and detections from 1. ``scorer`` comes from choose_scorer;
    None: that of ``auto``. ``every_size`` matches small, medium and large boxes once more.
    """
    assert np.isin(detections["image_id"], truth.image_ids).all(), "a detection on an unknown image"
    by_id = np.argsort(truth.image_ids)
    images = [{"id": number, "height": 1, "width": 1} for number in range(1, len(by_id) + 1)]  # sizes are for masks
    categories = [{"id": number, "name": str(number)} for number in range(1, len(truth.names) + 1)]
    labels = {
        "image_id": np.argsort(by_id)[truth.image_of_box] + 1, "category_id": truth.classes.astype(np.int64) + 1,
        "bbox": truth.boxes_xywh, "area": truth.areas, "iscrowd": truth.crowd.astype(bool),
    }  # fmt: skip
    ordered = canonical_order(detections)
    boxes = ordered["box_xywh"].astype(np.float64)
    found = {
        "image_id": np.searchsorted(truth.image_ids[by_id], ordered["image_id"]) + 1, "bbox": boxes,
        "score": ordered["score"].astype(np.float64), "category_id": ordered["class"] + 1,
        "area": boxes[:, 2] * boxes[:, 3], "iscrowd": np.zeros(len(boxes), bool),
    }  # fmt: skip
    prepare = _hotcoco if (scorer or choose_scorer()).startswith("hotcoco") else _pycocotools
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
        evaluation = prepare(images, categories, labels, found)
        if not every_size:
            parameters = evaluation.params
            parameters.areaRng, parameters.areaRngLbl = parameters.areaRng[:1], parameters.areaRngLbl[:1]
            evaluation.params = parameters
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _pycocotools(images: list[Any], categories: list[Any], *tables: dict[str, np.ndarray]) -> COCOeval:
    """COCOeval of labels and detections. Ids start at 1: a match with id 0 would not count."""
    sets = [COCO(), COCO()]
    for coco, table in zip(sets, tables, strict=True):
        rows = zip(*(column.tolist() for column in table.values()), strict=True)
        annotations = [dict(zip(table, row, strict=True), id=number) for number, row in enumerate(rows, start=1)]
        coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
        coco.createIndex()
    return COCOeval(*sets, "bbox")


def _hotcoco(
    images: list[Any], categories: list[Any], labels: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> Any:
    import hotcoco

    coco = hotcoco.COCO.from_arrays(
        images, categories, image_ids=labels["image_id"], category_ids=labels["category_id"], boxes=labels["bbox"],
        area=labels["area"], iscrowd=labels["iscrowd"],
    )  # fmt: skip
    columns = [found[name] for name in ("image_id", "bbox", "score", "category_id")]
    return hotcoco.COCOeval(coco, coco.load_res(np.column_stack(columns)), "bbox")


def score(truth: GroundTruth, detections: Detections, scorer: str | None = None) -> Evaluation:
    """Compute the 12 COCO metrics and those of each class; ``detections`` in any order.

    To the last bit those of COCOeval.summarize: means over what is present. ``scorer`` is as in
    ``match``.
    """
    scorer = scorer or choose_scorer()
    evaluation = match(truth, detections, scorer)
    # (IoU thresholds, recalls, classes, areas: all, small, medium, large; limits: 1, 10, 100),
    # and the same without recalls.
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
    of_all, by_size = precision[..., 0, 2], np.moveaxis(precision[..., 1:, 2], -1, 0)
    by_limit, recall_by_size = np.moveaxis(recall[..., 0, :], -1, 0), np.moveaxis(recall[..., 1:, 2], -1, 0)
    parts = [of_all, of_all[0], of_all[5], *by_size, *by_limit, *recall_by_size]
    metrics = dict(zip(METRICS, map(_mean_of_present, parts), strict=True))
    per_class = {}
    for index, name in enumerate(truth.names):
        of_class = (truth.classes == index) & ~truth.crowd.astype(bool)
        parts = [of_all[..., index], of_all[0, :, index], *by_size[..., index]]
        row = dict(zip(PER_CLASS, map(_mean_of_present, parts), strict=True))
        per_class[name] = row | {"images": len(np.unique(truth.image_of_box[of_class])), "boxes": int(of_class.sum())}
    return Evaluation(metrics, per_class, truth, detections, losses={}, scorer=scorer)


def _mean_of_present(values: np.ndarray) -> float:
    present = values[values > ABSENT]
    return float(present.mean()) if present.size else ABSENT


class Matches(NamedTuple):
    """The n detections and the boxes of K classes on N images, matched at COCO's T = 10 IoUs.

    Of each class at most 100 detections on an image; by class, then by image.
    """

    classes: np.ndarray  # int64 (n,)
    images: np.ndarray  # int64 (n,) positions in the order of image ids
    scores: np.ndarray  # float64 (n,)
    right: np.ndarray  # bool (T, n) matched with a box that counts
    wrong: np.ndarray  # bool (T, n) matched with none; those matched with crowds are neither
    boxes: np.ndarray  # int64 (K, N) without crowds


def find_matches(truth: GroundTruth, detections: Detections, scorer: str | None = None) -> Matches:
    """The matches that AP is computed from. ``scorer`` is as in ``match``."""
    pairs = [pair for pair in match(truth, detections, scorer, every_size=False).evalImgs if pair is not None]
    pairs.sort(key=lambda pair: (pair["category_id"], pair["image_id"]))
    boxes = np.zeros((len(truth.names), len(truth.image_ids)), np.int64)
    for pair in pairs:
        boxes[pair["category_id"] - 1, pair["image_id"] - 1] = np.logical_not(pair["gtIgnore"]).sum()
    scores = np.concatenate([[], *(pair["dtScores"] for pair in pairs)])
    sizes = np.array([len(pair["dtScores"]) for pair in pairs], np.int64)
    classes, images = (
        np.repeat([pair[key] - 1 for pair in pairs], sizes).astype(np.int64) for key in ("category_id", "image_id")
    )
    matched, ignored = (
        np.concatenate([np.zeros((10, 0)), *(np.reshape(pair[key], (10, -1)) for pair in pairs)], axis=1) > 0
        for key in ("dtMatches", "dtIgnore")
    )
    return Matches(classes, images, scores, matched & ~ignored, ~matched & ~ignored, boxes)


def best_f1(matches: Matches, index: int | None = None) -> dict[str, float] | None:
    """The highest threshold of the best F1 at IoU .5 of a class, or of all, as OPERATING_POINT.

    A threshold reports all detections with at least that score. None if no detection is right:
    then no threshold is better than another.
    """
    chosen, boxes = matches.right[0] | matches.wrong[0], matches.boxes.sum()
    if index is not None:
        chosen, boxes = chosen & (matches.classes == index), matches.boxes[index].sum()
    scores, right = matches.scores[chosen], matches.right[0, chosen]
    if not right.any():
        return None
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(right[order])
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # equal scores are reported together
    precision, recall = hits[last] / (last + 1), hits[last] / boxes
    total = precision + recall
    f1 = 2 * precision * recall / np.where(total > 0, total, 1)
    at = int(f1.argmax())
    values = (scores[last][at], f1[at], precision[at], recall[at])
    return dict(zip(OPERATING_POINT, map(float, values), strict=True))


def format_table(result: Evaluation) -> str:
    """Format the 12 metrics and a row per class; "-" means no ground truth."""
    lines = [f"scored by {result.scorer}", " ".join(f"{name:>5}" for name in METRICS)]
    lines.append(" ".join(f"{format_metric(result.metrics[name]):>5}" for name in METRICS))  # fits into 80 columns
    width = max(len(name) for name in ("class", *result.per_class))
    columns = PER_CLASS + OPERATING_POINT * any("f1" in row for row in result.per_class.values())
    titles = "  ".join(f"{name:>5}" for name in columns)
    lines += ["", f"{'class':<{width}}  {'images':>7}  {'boxes':>7}  {titles}"]
    for name, row in result.per_class.items():
        cells = "  ".join(f"{format_metric(row[column]):>{max(5, len(column))}}" for column in columns)
        lines.append(f"{name:<{width}}  {row['images']:>7.0f}  {row['boxes']:>7.0f}  {cells}")
    return "\n".join(lines)


def format_metric(metric: float | None) -> str:
    """A metric of 0 to 1 with three places; a dash where there is none."""
    return "-" if metric is None or metric == ABSENT else f"{metric:.3f}"
