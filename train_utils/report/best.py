"""``best_detections.npz``: what the best weights of a run found, with the labels it was scored by.

It makes runs comparable later, image by image, without their data and without a network.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from train_utils.errors import TrainError
from train_utils.scores.coco_eval import CocoResult
from train_utils.scores.detections import DETECTION, Detections, GroundTruth
from train_utils.shell import option

FILE = "best_detections.npz"
LABELS = ("image_ids", "sizes", "offsets", "boxes_xywh", "classes", "crowd", "areas")  # of GroundTruth, but names


@dataclass(frozen=True)
class Best:
    """The evaluation that a run is judged by."""

    epoch: int  # 0: not of a training
    scores: CocoResult
    truth: GroundTruth
    detections: Detections


def keep_best(folder: Path, best: Best) -> None:
    """Write ``best_detections.npz`` whole or not at all. Raises TrainError."""
    text = json.dumps({"epoch": best.epoch, "names": list(best.truth.names), **vars(best.scores)})
    arrays: dict[str, Any] = {"text": np.array(text), **{name: getattr(best.truth, name) for name in LABELS}}
    arrays |= {f"found_{name}": best.detections[name] for name in DETECTION.names or ()}
    path = folder / FILE
    temporary = path.with_name(f"{FILE}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainError(f"cannot write {path} ({error.strerror}). fix: free some space there") from error


def read_best(folder: Path) -> Best:
    """Read what ``keep_best`` wrote. Raises TrainError if it is absent or damaged."""
    path = folder / FILE
    if not path.is_file():
        raise TrainError(
            f"{folder} holds no {FILE}: not evaluated yet, or by an earlier version. "
            f"fix: python eval.py {option('ckpt', folder)} {option('out', folder)}"
        )
    try:
        with np.load(path) as arrays:
            text = json.loads(str(arrays["text"]))
            labels = {name: arrays[name] for name in LABELS}
            detections = np.empty(len(arrays["found_score"]), DETECTION)
            for name in DETECTION.names or ():
                detections[name] = arrays[f"found_{name}"]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise TrainError(f"{path} is damaged ({error}). fix: evaluate the run again with out={folder}") from error
    names, epoch = text.pop("names"), text.pop("epoch")
    return Best(epoch, CocoResult(**text), GroundTruth(**labels, names=names), detections)
