"""Drawn sets of boxes for the tests of scoring, and what plain pycocotools makes of their files."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from conf.compose import compose
from conf.schema import TrainConfig
from data.index import read_annotations
from train_utils.results import Detections, GroundTruth, make_detections, read_results

CATEGORY_IDS = [3, 7, 8, 90]  # with gaps, as in COCO
NAMES = ["cell", "dog", "no boxes", "crowd only"]


def draw(seed: int = 0, images: int = 12) -> tuple[GroundTruth, Detections]:
    """Boxes of all sizes with crowds and mask areas; detections near them, with ties, duplicates, >
    100 on an image.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, images)
    counts[3] = 0
    total = int(counts.sum())
    classes = rng.choice([0, 1, 3], total, p=[0.6, 0.3, 0.1])
    boxes = np.concatenate([rng.uniform(0, 300, (total, 2)), rng.uniform(5, 200, (total, 2))], axis=1).round(2)
    truth = GroundTruth(
        image_ids=rng.permutation(1000)[:images],
        sizes=np.full((images, 2), 500),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes_xywh=boxes,
        classes=classes,
        crowd=(classes == 3) | (rng.random(total) < 0.1),
        areas=boxes[:, 2] * boxes[:, 3] * rng.uniform(0.4, 1, total),
        names=NAMES,
    )
    found = []
    for image, image_id in enumerate(truth.image_ids.tolist()):
        mine = slice(truth.offsets[image], truth.offsets[image + 1])
        near = np.repeat(truth.boxes_xywh[mine], 4, axis=0)
        far = rng.uniform(5, 200, (150 if image == 1 else 5, 4))
        xywh = np.concatenate([near * rng.normal(1, 0.06, near.shape), far])
        kinds = np.concatenate([np.repeat(truth.classes[mine], 4), rng.integers(0, 4, len(far))])
        scores = rng.integers(1, 20, len(xywh)) / 20  # many equal ones
        found.append(make_detections(image_id, kinds, scores, np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]]))
    return truth, np.concatenate(found)


def many_classes(count: int, images: int = 40) -> tuple[GroundTruth, Detections]:
    """Boxes of ``count`` classes with long names, some found twice or as another class."""
    truth, _ = draw(count, images)
    classes = np.random.default_rng(count).integers(0, count, len(truth.classes))
    names = [f"a rather long name of class {number}, which nobody reads to its end" for number in range(count)]
    truth = replace(truth, classes=classes, names=names)
    rng = np.random.default_rng(count + 1)
    near = np.repeat(np.arange(len(classes)), 2)
    xywh = truth.boxes_xywh[near] * rng.normal(1, 0.08, (len(near), 4))
    reported = np.where(rng.random(len(near)) < 0.8, classes[near], rng.integers(0, count, len(near)))
    found = make_detections(0, reported, rng.random(len(near)), np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]])
    found["image_id"] = truth.image_ids[truth.image_of_box[near]]
    return truth, found


def coco128(shared_dir: Path) -> tuple[GroundTruth, Detections, list[int]]:
    """Labels of coco128, what OpenCV finds with yolo-fastest-1.1 on their images, category ids."""
    root = f"data.root={shared_dir / 'data' / 'coco128'}"
    config = compose("train", TrainConfig, ["data=coco", root, "data.val.images=images/val2017"])
    annotations, *_ = read_annotations(config.data, "val")
    results = shared_dir / "darknet" / "yolo-fastest-1.1" / "opencv_coco128_val_results.json"
    ids = annotations.category_ids.tolist()
    return GroundTruth.of(annotations), read_results(results, annotations.image_ids, ids), ids


def write_coco(truth: GroundTruth, path: Path) -> None:
    image_ids = np.repeat(truth.image_ids, np.diff(truth.offsets))
    annotations = [
        {
            "id": number + 1,
            "image_id": int(image_ids[number]),
            "category_id": CATEGORY_IDS[truth.classes[number]],
            "bbox": truth.boxes_xywh[number].tolist(),
            "area": float(truth.areas[number]),
            "iscrowd": int(truth.crowd[number]),
        }
        for number in range(len(truth.classes))
    ]
    images = [{"id": int(image_id), "height": 500, "width": 500} for image_id in truth.image_ids]
    categories = [{"id": number, "name": name} for number, name in zip(CATEGORY_IDS, NAMES, strict=True)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


def plain_pycocotools(annotations: Path, results: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation
