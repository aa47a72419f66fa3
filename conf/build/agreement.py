"""What all ranks of a training must have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from conf.entry import to_dictionary
from conf.schema import TrainConfig
from data import Annotations
from train_utils.distributed import World
from train_utils.run.same_start import require_agreement
from train_utils.run.same_training import flat

# Options that may differ between ranks: nodes have their own folders and cores, and the weights are
# those of rank 0.
MAY_DIFFER = ("run_dir", "resume", "plugins", "data.root", "data.index_dir", "data.workers", "model.weights")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("conf", "data", "models", "train_utils")  # the packages that a training runs


def check_agreement(
    world: World, config: TrainConfig, saved: dict[str, Any] | None, train_set: Annotations, val_set: Annotations
) -> None:
    """Raise TrainError on all ranks if one differs from rank 0 in options, data or program.

    ``saved`` is the checkpoint of a resumed run, compared by its step. The program includes the
    version of torch. All ranks must call this.
    """
    if world.world_size == 1:
        return
    options = {key: value for key, value in flat(to_dictionary(config)).items() if key not in MAY_DIFFER}
    sets: dict[str, Any] = {}
    for split, found in (("training", train_set), ("validation", val_set)):
        sets[f"the number of {split} images"] = len(found)
        sets[f"the number of {split} boxes"] = len(found.classes)
        sets[f"the list of {split} classes"] = list(found.names)
    start = {
        "the step of the checkpoint": saved["step"] if saved is not None else "none",
        "the version of torch": str(torch.__version__),
        "the program (digest of its source)": source_digest(),
    }
    require_agreement(world, options | sets | start)


def source_digest(root: Path = ROOT) -> str:
    """Sha256, shortened, over every module of the program below ``root``."""
    packages = (path for part in PROGRAM for path in (root / part).rglob("*.py"))
    sha = hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *packages]):
        sha.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return sha.hexdigest()[:12]
