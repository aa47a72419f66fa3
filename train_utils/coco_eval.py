"""COCO metrics from plain arrays: the same to the last bit however the work was distributed.

pycocotools is the reference; hotcoco computes the same bits a hundred times as fast. Both get
images by id and detections in canonical order, since equal scores rank by it.
"""

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from conf import ConfigError, install_command
from conf.schema import Scorer
from train_utils.results import Detections, GroundTruth, canonical_order


def _silent(name: str) -> Any:
    """A copy of a module that prints nothing, so that other threads keep their stdout."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["print"] = lambda *_: None
    spec.loader.exec_module(module)
    return module


COCO, COCOeval = _silent("pycocotools.coco").COCO, _silent("pycocotools.cocoeval").COCOeval

# In the order of pycocotools' stats; s, m, l: boxes of less than 32**2, up to 96**2, more pixels.
METRICS = tuple("AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl".split())
PER_CLASS = "AP AP50 APs APm APl".split()
OPERATING_POINT = ("precision", "recall", "f1", "threshold")  # at the best F1, as best_f1 finds it
ABSENT = -1.0  # pycocotools' metric where there is no ground truth
Metrics = dict[str, float]  # by name
TESTED_HOTCOCO = "1.3."  # equals pycocotools to the bit; another version may not


class Evaluation(NamedTuple):
    """The COCO metrics and what they were computed from; one without ground truth is ABSENT."""

    metrics: Metrics  # those of METRICS
    per_class: dict[str, Metrics]  # by class: PER_CLASS, OPERATING_POINT, images, boxes (no crowds)
    at_best_f1: Metrics  # OPERATING_POINT of all classes at one threshold
    truth: GroundTruth
    detections: Detections  # in any order
    losses: Metrics  # by LOSS_NAMES, of the validation images of a training; else empty
    scorer: str  # as choose_scorer names it
    about: Mapping[str, Any] = MappingProxyType({})  # what was evaluated: epoch or scored, split, evaluate
    matches: "Matches | None" = None  # None: of an evaluation that was read from a file


def choose_scorer(wanted: Scorer = Scorer.auto) -> str:
    """Name and version of the package that scores; ConfigError if hotcoco must, and is missing."""
    try:
        from hotcoco import __version__ as installed
    except ImportError:
        installed = "none"
    if installed.startswith(TESTED_HOTCOCO) and wanted is not Scorer.pycocotools:
        return f"hotcoco {installed}"
    if wanted is Scorer.hotcoco:
        fix = f"evaluate.scorer=auto, or {install_command(f'hotcoco=={TESTED_HOTCOCO}*')}"
        raise ConfigError(f"evaluate.scorer=hotcoco needs hotcoco {TESTED_HOTCOCO}x, found {installed}", fix)
    return f"pycocotools {version('pycocotools')}"


def match(
    truth: GroundTruth, detections: Detections, scorer: str | None = None, every_size: bool = True, ious: int = 10
) -> Any:
    """Return COCOeval of pycocotools or hotcoco after ``evaluate`` and ``accumulate``.

    It numbers images, classes, boxes and detections from 1. ``scorer`` comes from choose_scorer.
    ``every_size`` matches small, medium and large boxes once more; ``ious`` of COCO's ten count,
    from .5 on.
    """
    assert np.isin(detections["image_id"], truth.image_ids).all(), "a detection on an unknown image"
    by_id = np.argsort(truth.image_ids)
    crowd = truth.crowd.astype(bool)
    images = [{"id": number} for number in range(1, len(by_id) + 1)]  # sizes are for masks
    categories = [{"id": number, "name": str(number)} for number in range(1, len(truth.names) + 1)]
    image_of_label = np.argsort(by_id)[truth.image_of_box] + 1
    labels = image_of_label, truth.classes.astype(np.int64) + 1, truth.boxes_xywh
    ordered = canonical_order(detections)
    image_of_found = np.searchsorted(truth.image_ids[by_id], ordered["image_id"]) + 1
    classes, scores = ordered["class"] + 1, ordered["score"]
    boxes = ordered["box_xywh"].astype(np.float64)
    evaluation: Any
    if (scorer or choose_scorer()).startswith("hotcoco"):
        import hotcoco

        coco = hotcoco.COCO.from_arrays(images, categories, *labels, area=truth.areas, iscrowd=crowd)
        found = coco.load_res(np.column_stack((image_of_found, boxes, scores, classes)))
        evaluation = hotcoco.COCOeval(coco, found, "bbox")
    else:
        coco = _as_coco(images, categories, *labels, truth.areas, crowd)
        no_crowd = np.zeros(len(boxes), bool)
        columns = image_of_found, classes, boxes, boxes[:, 2:].prod(1), no_crowd, scores
        evaluation = COCOeval(coco, _as_coco(images, categories, *columns), "bbox")
    parameters = evaluation.params
    if not every_size:
        parameters.areaRng, parameters.areaRngLbl = parameters.areaRng[:1], parameters.areaRngLbl[:1]
    parameters.iouThrs = parameters.iouThrs[:ious]
    evaluation.params = parameters  # hotcoco's is a copy
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _as_coco(images: list[Any], categories: list[Any], *columns: ndarray) -> Any:
    """Annotations as pycocotools reads them from a file; it takes a match with id 0 for none."""
    keys = ("image_id", "category_id", "bbox", "area", "iscrowd", "score")
    annotations = []
    for number, row in enumerate(zip(*map(ndarray.tolist, columns), strict=True), start=1):
        annotations.append(dict(zip(keys, row, strict=False), id=number))
    coco = COCO()
    coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
    coco.createIndex()
    return coco


def score(truth: GroundTruth, detections: Detections, scorer: str | None = None) -> Evaluation:
    """The 12 COCO metrics and those of each class, as by COCOeval.summarize."""
    scorer = scorer or choose_scorer()
    evaluation = match(truth, detections, scorer)
    summary = COCOeval(iouType="bbox")
    summary.eval = evaluation.eval
    summary.summarize()
    metrics = dict(zip(METRICS, summary.stats.tolist(), strict=True))
    matches = find_matches(truth, detections, scorer)
    absent = dict.fromkeys(OPERATING_POINT, ABSENT)
    counted = ~truth.crowd.astype(bool)
    per_class = {}
    for index, name in enumerate(truth.names):
        # Precision has the axes IoU, recall, class, area and limit, of which the last is 100.
        every, small, medium, large = np.moveaxis(evaluation.eval["precision"][:, :, index, :, 2], -1, 0)
        row = {}
        for metric, values in zip(PER_CLASS, (every, every[0], small, medium, large), strict=True):
            present = values[values > ABSENT]
            row[metric] = float(present.mean()) if present.size else ABSENT
        row |= best_f1(matches, index) or absent
        images = truth.image_of_box[counted & (truth.classes == index)]
        per_class[name] = row | {"images": len(np.unique(images)), "boxes": len(images)}
    at_best = best_f1(matches) or absent
    return Evaluation(metrics, per_class, at_best, truth, detections, {}, scorer, matches=matches)


class Matches(NamedTuple):
    """n detections, by class and image, and boxes of K classes on N images, at T of COCO's IoUs."""

    classes: ndarray  # int64 (n,)
    images: ndarray  # int64 (n,) positions in the order of image ids
    scores: ndarray  # float64 (n,)
    right: ndarray  # bool (T, n) matched with a box that counts
    wrong: ndarray  # bool (T, n) matched with none; those matched with crowds are neither
    boxes: ndarray  # int64 (K, N) number of boxes that count, all but crowds
    found: ndarray  # int64 (n,) positions in canonical order
    labels: ndarray  # int64 (n,) the box that each is matched with at IoU .5; -1: none


def find_matches(truth: GroundTruth, detections: Detections, scorer: str | None = None, ious: int = 1) -> Matches:
    """The matches that AP is computed from; ``scorer`` and ``ious`` are those of ``match``."""
    pairs = filter(None, match(truth, detections, scorer, every_size=False, ious=ious).evalImgs)
    boxes = np.zeros((len(truth.names), len(truth.image_ids)), np.int64)
    places, scores = [], []
    numbers = []
    matches: Any = [[] for _ in range(ious)]  # lists of whole numbers, by IoU
    ignores: Any = [[] for _ in range(ious)]
    for pair in sorted(pairs, key=itemgetter("category_id", "image_id")):
        place = pair["category_id"] - 1, pair["image_id"] - 1
        boxes[place] = [*pair["gtIgnore"]].count(0)
        places += [place] * len(pair["dtScores"])
        scores += pair["dtScores"]
        numbers += pair["dtIds"]
        for iou in range(ious):
            matches[iou].extend(pair["dtMatches"][iou])
            ignores[iou].extend(pair["dtIgnore"][iou])
    classes, images = np.array(places, np.int64).reshape(-1, 2).T
    partners, counted = np.array(matches, np.int64), ~np.array(ignores, bool)
    right, wrong = (partners > 0) & counted, (partners == 0) & counted
    found, labels = np.array(numbers, np.int64) - 1, partners[0] - 1
    return Matches(classes, images, np.array(scores, np.float64), right, wrong, boxes, found, labels)


def best_f1(matches: Matches, index: int | None = None) -> Metrics | None:
    """The highest threshold of the best F1 at IoU .5, as OPERATING_POINT; None without a hit."""
    scores, f1, precision, recall = over_scores(matches, index)
    if not f1.any():
        return None
    values = np.stack((precision, recall, f1, scores))[:, f1.argmax()]
    return dict(zip(OPERATING_POINT, values.tolist(), strict=True))


def over_scores(matches: Matches, index: int | None) -> tuple[ndarray, ...]:
    """Falling scores (n,); F1, precision, recall at IoU .5 from each on, of a class or all."""
    chosen = matches.right[0] | matches.wrong[0]
    boxes = matches.boxes.sum()
    if index is not None:
        chosen &= matches.classes == index
        boxes = matches.boxes[index].sum()
    # Equal scores count together.
    falling, ranks, counts = np.unique(-matches.scores[chosen], return_inverse=True, return_counts=True)
    found, hits = counts.cumsum(), np.bincount(ranks, matches.right[0, chosen]).cumsum()
    return -falling, 2 * hits / (found + boxes), hits / found, hits / max(boxes, 1)


def rows_of_classes(result: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of a table with a row for all classes, then for each; "-" means none."""
    with_box = result.truth.image_of_box[~result.truth.crowd.astype(bool)]
    counts = {"images": len(np.unique(with_box)), "boxes": len(with_box)}
    of_all = {**result.metrics, **result.at_best_f1, **counts}
    rows = []
    for name, row in (("all", of_all), *result.per_class.items()):
        cells = map(format_metric, itemgetter(*PER_CLASS, *OPERATING_POINT)(row))
        rows.append([name, f"{row['images']:.0f}", f"{row['boxes']:.0f}", *cells])
    return ["class", "images", "boxes", *PER_CLASS, *"P R F1 score".split()], rows


def format_table(result: Evaluation) -> str:
    """Format the 12 metrics and a row per class; "-" means no ground truth."""
    aligned = "{:>5}".format
    values = map(format_metric, itemgetter(*METRICS)(result.metrics))
    names = " ".join(map(aligned, METRICS))
    lines = [f"scored by {result.scorer}", names, " ".join(map(aligned, values)), ""]
    titles, rows = rows_of_classes(result)
    width = max(map(len, ("class", "all", *result.per_class)))
    for name, images, boxes, *cells in (titles, *rows):
        lines.append(f"{name:<{width}} {images:>6} {boxes:>6} {' '.join(map(aligned, cells))}")
    return "\n".join(lines)


def format_metric(metric: float | None) -> str:
    """A metric of 0 to 1 with three places; a dash where there is none."""
    return "-" if metric is None or metric == ABSENT else f"{metric:.3f}"
