"""COCO metrics from plain arrays: the same to the last bit however the work was distributed.

pycocotools is the reference; hotcoco computes the same bits a hundred times as fast. Both get what
they would read from files, in the same order: images by id, detections in canonical order (equal
scores rank by it), classes and images counted from 1. Ground truth keeps the float64 numbers of its
file, because a rounded box or area changes matches.
"""

import contextlib
import io
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from conf import ConfigError, install_command
from conf.schema import Scorer
from train_utils.results import Detections, GroundTruth, canonical_order

# In the order of pycocotools' stats; s, m, l: boxes of less than 32**2, up to 96**2, more pixels.
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
PER_CLASS = ("AP", "AP50", "APs", "APm", "APl")
SHORT_NAMES = ("P", "R", "F1", "score")  # of OPERATING_POINT, in tables
OPERATING_POINT = ("precision", "recall", "f1", "threshold")  # at the best F1, as best_f1 finds it
ABSENT = -1.0  # pycocotools' metric where there is no ground truth
TESTED_HOTCOCO = "1.3."  # equals pycocotools to the bit; another version may not


class Evaluation(NamedTuple):
    """The COCO metrics and what they were computed from; one without ground truth is ABSENT."""

    metrics: dict[str, float]  # by METRICS
    per_class: dict[str, dict[str, float]]  # by class name: PER_CLASS, OPERATING_POINT, images, boxes (no crowds)
    at_best_f1: dict[str, float]  # OPERATING_POINT of all classes at one threshold
    truth: GroundTruth
    detections: Detections  # in any order
    losses: dict[str, float]  # by LOSS_NAMES, of the validation images of a training; else empty
    scorer: str  # as choose_scorer names it
    about: Mapping[str, Any] = MappingProxyType({})  # what was evaluated, and how: epoch or scored, split, evaluate
    matches: "Matches | None" = None  # None: of an evaluation that was read from a file


def choose_scorer(wanted: Scorer = Scorer.auto) -> str:
    """Name and version of the package that scores, such as ``pycocotools 2.0.11``.

    ``auto`` takes hotcoco where a tested version is installed, else pycocotools. Raises ConfigError
    if hotcoco is wanted and no tested version is installed.
    """
    try:
        from hotcoco import __version__ as installed
    except ImportError:
        installed = "none"
    if installed.startswith(TESTED_HOTCOCO) and wanted is not Scorer.pycocotools:
        return f"hotcoco {installed}"
    if wanted is Scorer.hotcoco:
        fix = f"evaluate.scorer=auto, or {install_command(f'hotcoco=={TESTED_HOTCOCO}*')}"
        raise ConfigError(f"evaluate.scorer=hotcoco needs hotcoco {TESTED_HOTCOCO}x, found {installed}. fix: {fix}")
    return f"pycocotools {version('pycocotools')}"


def match(truth: GroundTruth, detections: Detections, scorer: str | None = None, *, every_size: bool = True) -> Any:
    """Return COCOeval of pycocotools or hotcoco after ``evaluate`` and ``accumulate``.

    It numbers images, classes, boxes and detections from 1. ``scorer`` comes from choose_scorer;
    None: that of ``auto``. ``every_size`` matches small, medium and large boxes once more.
    """
    assert np.isin(detections["image_id"], truth.image_ids).all(), "a detection on an unknown image"
    by_id, crowd = np.argsort(truth.image_ids), truth.crowd.astype(bool)
    images = [{"id": number, "height": 1, "width": 1} for number in range(1, len(by_id) + 1)]  # sizes are for masks
    categories = [{"id": number, "name": str(number)} for number in range(1, len(truth.names) + 1)]
    image_of_label = np.argsort(by_id)[truth.image_of_box] + 1
    labels = image_of_label, truth.classes.astype(np.int64) + 1, truth.boxes_xywh
    ordered = canonical_order(detections)
    image_of_found = np.searchsorted(truth.image_ids[by_id], ordered["image_id"]) + 1
    classes, scores = ordered["class"] + 1, ordered["score"]
    boxes = ordered["box_xywh"].astype(np.float64)
    evaluation: Any
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
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
        evaluation.params = parameters  # hotcoco's is a copy
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _as_coco(images: list[Any], categories: list[Any], *columns: np.ndarray) -> COCO:
    """Annotations as pycocotools reads them from a file.

    Their ids start at 1: it takes a match with annotation 0 for none.
    """
    coco, keys = COCO(), ("image_id", "category_id", "bbox", "area", "iscrowd", "score")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    annotations = [dict(zip(keys, row, strict=False), id=number) for number, row in enumerate(rows, start=1)]
    coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
    coco.createIndex()
    return coco


def score(truth: GroundTruth, detections: Detections, scorer: str | None = None) -> Evaluation:
    """Compute the 12 COCO metrics and those of each class, as COCOeval.summarize does.

    Precision and recall are those at the best F1. ``detections`` come in any order, ``scorer`` is
    that of ``match``.
    """
    scorer = scorer or choose_scorer()
    evaluation = match(truth, detections, scorer)
    summary = COCOeval(iouType="bbox")
    summary.eval = evaluation.eval
    with contextlib.redirect_stdout(io.StringIO()):
        summary.summarize()
    metrics = dict(zip(METRICS, summary.stats.tolist(), strict=True))
    matches = find_matches(truth, detections, scorer)
    absent = dict.fromkeys(OPERATING_POINT, ABSENT)
    counted = ~truth.crowd.astype(bool)
    per_class = {}
    for index, name in enumerate(truth.names):
        # Precision has the axes IoU, recall, class, area and limit, of which the last is 100.
        every, small, medium, large = np.moveaxis(evaluation.eval["precision"][:, :, index, :, 2], -1, 0)
        row = dict(zip(PER_CLASS, map(_mean_of_present, (every, every[0], small, medium, large)), strict=True))
        images = truth.image_of_box[counted & (truth.classes == index)]
        row |= best_f1(matches, index) or absent
        per_class[name] = row | {"images": len(np.unique(images)), "boxes": len(images)}
    at_best = best_f1(matches) or absent
    return Evaluation(metrics, per_class, at_best, truth, detections, losses={}, scorer=scorer, matches=matches)


def _mean_of_present(values: np.ndarray) -> float:
    present = values[values > ABSENT]
    return float(present.mean()) if present.size else ABSENT


class Matches(NamedTuple):
    """n detections and the boxes of K classes on N images, matched at COCO's T = 10 IoUs.

    Of each class at most 100 detections on an image; by class, then by image.
    """

    classes: np.ndarray  # int64 (n,)
    images: np.ndarray  # int64 (n,) positions in the order of image ids
    scores: np.ndarray  # float64 (n,)
    right: np.ndarray  # bool (T, n) matched with a box that counts
    wrong: np.ndarray  # bool (T, n) matched with none; those matched with crowds are neither
    boxes: np.ndarray  # int64 (K, N) number of boxes that count, all but crowds
    found: np.ndarray  # int64 (n,) positions in canonical order
    labels: np.ndarray  # int64 (n,) the box that each is matched with at IoU .5; -1: none


def find_matches(truth: GroundTruth, detections: Detections, scorer: str | None = None) -> Matches:
    """The matches that AP is computed from; ``scorer`` is that of ``match``."""
    pairs = [pair for pair in match(truth, detections, scorer, every_size=False).evalImgs if pair is not None]
    pairs.sort(key=lambda pair: (pair["category_id"], pair["image_id"]))
    boxes = np.zeros((len(truth.names), len(truth.image_ids)), np.int64)
    places, scores, numbers = list[tuple[int, int]](), list[float](), list[int]()
    matches, ignores = [np.zeros((10, 0))], [np.zeros((10, 0))]
    for pair in pairs:
        place = pair["category_id"] - 1, pair["image_id"] - 1
        boxes[place] = np.logical_not(pair["gtIgnore"]).sum()
        places += [place] * len(pair["dtScores"])
        scores += pair["dtScores"]
        numbers += pair["dtIds"]
        matches.append(np.reshape(pair["dtMatches"], (10, -1)))
        ignores.append(np.reshape(pair["dtIgnore"], (10, -1)))
    classes, images = np.array(places, np.int64).reshape(-1, 2).T
    partners, counted = np.concatenate(matches, axis=1), np.concatenate(ignores, axis=1) == 0
    right, wrong = (partners > 0) & counted, (partners == 0) & counted
    found, labels = np.array(numbers, np.int64) - 1, partners[0].astype(np.int64) - 1
    return Matches(classes, images, np.array(scores, np.float64), right, wrong, boxes, found, labels)


def best_f1(matches: Matches, index: int | None = None) -> dict[str, float] | None:
    """The highest threshold of the best F1 at IoU .5 of a class, or of all, as OPERATING_POINT.

    A threshold reports all detections with at least that score. None if no detection is right:
    then no threshold is better than another.
    """
    scores, f1, precision, recall = over_scores(matches, index)
    if not f1.any():
        return None
    best = int(f1.argmax())
    values = (precision[best], recall[best], f1[best], scores[best])
    return dict(zip(OPERATING_POINT, map(float, values), strict=True))


def over_scores(matches: Matches, index: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Falling scores (n,), and F1, precision and recall at IoU .5 of the detections from each on.

    ``index`` is that of a class; None: all classes. Recall is 0 without boxes.
    """
    chosen, boxes = matches.right[0] | matches.wrong[0], matches.boxes.sum()
    if index is not None:
        chosen, boxes = chosen & (matches.classes == index), matches.boxes[index].sum()
    order = np.argsort(-matches.scores[chosen], kind="stable")
    scores = matches.scores[chosen][order]
    hits = matches.right[0, chosen][order].cumsum()
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)[: len(scores)])  # equal scores count together
    scores, found, hits = scores[last], last + 1, hits[last]
    return scores, 2 * hits / (found + boxes), hits / found, hits / max(boxes, 1)


def rows_of_classes(result: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of a table with a row for all classes, then for each; "-" means none."""
    with_box = result.truth.image_of_box[~result.truth.crowd.astype(bool)]
    of_all = {**result.metrics, **result.at_best_f1, "images": len(np.unique(with_box)), "boxes": len(with_box)}
    rows = []
    for name, row in (("all", of_all), *result.per_class.items()):
        cells = [format_metric(row[column]) for column in (*PER_CLASS, *OPERATING_POINT)]
        rows.append([name, f"{row['images']:.0f}", f"{row['boxes']:.0f}", *cells])
    return ["class", "images", "boxes", *PER_CLASS, *SHORT_NAMES], rows


def format_table(result: Evaluation) -> str:
    """Format the 12 metrics and a row per class; "-" means no ground truth."""
    values = [format_metric(result.metrics[name]) for name in METRICS]
    lines = [f"scored by {result.scorer}"]
    lines += [" ".join(f"{cell:>5}" for cell in cells) for cells in (METRICS, values)]  # fits into 80 columns
    titles, rows = rows_of_classes(result)
    rows.insert(0, titles)
    width = max(len(row[0]) for row in rows)
    lines.append("")
    for name, images, boxes, *cells in rows:
        lines.append(f"{name:<{width}} {images:>6} {boxes:>6} " + " ".join(f"{cell:>5}" for cell in cells))
    return "\n".join(lines)


def format_metric(metric: float | None) -> str:
    """A metric of 0 to 1 with three places; a dash where there is none."""
    return "-" if metric is None or metric == ABSENT else f"{metric:.3f}"
