"""``best_detections.npz``: what the best weights of a run found, with the labels it was scored by.

It makes runs comparable later, image by image, without their data and without a network.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from train_utils.errors import TrainError
from train_utils.scores.coco_eval import CocoResult
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.shell import option

FILE = "best_detections.npz"


@dataclass(frozen=True)
class Best:
    """The evaluation that a run is judged by."""

    scores: CocoResult
    truth: GroundTruth
    detections: Detections


def keep_best(folder: Path, best: Best) -> None:
    """Write ``best_detections.npz`` whole or not at all. Raises OSError."""
    temporary = folder / f"{FILE}.tmp"
    try:
        with temporary.open("wb") as file:
            np.savez(file, scores=json.dumps(vars(best.scores)), detections=best.detections, **vars(best.truth))
        os.replace(temporary, folder / FILE)
    finally:
        temporary.unlink(missing_ok=True)


def read_best(folder: Path) -> Best:
    """Read what ``keep_best`` wrote. Raises TrainError if it is absent or damaged."""
    path = folder / FILE
    again = f"fix: python eval.py {option('ckpt', folder)} {option('out', folder)}"
    if not path.is_file():
        raise TrainError(f"{folder} holds no {FILE}: not evaluated yet. {again}")
    try:
        with np.load(path) as file:
            arrays = dict(file)
        scores, detections, names = (arrays.pop(name) for name in ("scores", "detections", "names"))
        return Best(CocoResult(**json.loads(str(scores))), GroundTruth(**arrays, names=names.tolist()), detections)
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise TrainError(f"{path} is damaged ({error}). {again}") from error
