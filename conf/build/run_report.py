"""What a training keeps for its report and for comparisons, and the report itself."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from conf.answers.help import version_page
from conf.build.evaluator import Evaluation
from conf.entry import defaults
from conf.schema import TrainConfig
from data import Annotations
from data.audit.summary import objects_per_image
from train_utils.distributed import World
from train_utils.report.best import Best, keep_best
from train_utils.report.run_files import ABOUT, read_about, read_files
from train_utils.report.run_report import write_report
from train_utils.run.same_start import flat
from train_utils.run.whole_files import whole_file
from train_utils.scores.detections import GroundTruth

CPU_INFO = Path("/proc/cpuinfo")
Say = Callable[[str], object]


def keep_about(folder: Path, config: TrainConfig, world: World, sets: dict[str, Annotations], say: Say) -> None:
    """Add this start to about.json, with what the sets hold, on rank 0."""

    def keep() -> None:
        starts = [*read_about(folder)["starts"], environment(config, world)]
        with whole_file(folder / ABOUT) as file:
            json.dump(
                {"starts": starts, "data": {name: summary_of(part) for name, part in sets.items()}}, file, indent=1
            )

    if world.is_main:
        spare(say, ABOUT, keep)


def environment(config: TrainConfig, world: World) -> dict[str, Any]:
    """The command, the machine of rank 0 and the versions, by words for a reader."""
    places = f"{world.world_size} on {world.num_nodes} node{'s' * (world.num_nodes > 1)}, {world.launcher}"
    if world.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(world.device)}, CUDA {torch.version.cuda}"
    else:
        known = CPU_INFO.is_file() and re.search(r"model name\s*: (.+)", CPU_INFO.read_text(encoding="utf-8"))
        device = known[1] if known else platform.machine()
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["python", *sys.argv]),
        "host": platform.node(),
        "system": platform.platform(),
        "device": device,
        "CPU cores": os.cpu_count(),
        "processes": f"{places}, {world.backend}" if world.world_size > 1 else 1,
        "precision": config.train.precision.value,
        "versions": ", ".join(version_page().splitlines()),
    }


def keep_evaluation(folder: Path, truth: GroundTruth, evaluation: Evaluation, say: Say) -> None:
    """Keep labels and detections of the best epoch so far."""
    best = Best(evaluation.scores, truth, evaluation.detections)
    spare(say, "best_detections.npz", lambda: keep_best(folder, best))


def report_run(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run into ``out``, or its folder; return the file. Raises TrainError."""
    run = read_files(folder)
    # Of the defaults, only the name stands for another option.
    by_default = _defaults() | {"name": run.options["data.name"]}
    return write_report(run, (out or folder) / "report.html", by_default)


@cache  # for the jobs of a sweep
def _defaults() -> dict[str, Any]:
    return flat(defaults("train", TrainConfig))


def summary_of(part: Annotations) -> dict[str, int]:
    """What a set holds."""
    empty = int((objects_per_image(part) == 0).sum())
    return {"images": len(part), "without boxes": empty, "boxes": len(part.classes), "classes": len(part.names)}


def spare(say: Say, what: str, make: Callable[[], object]) -> None:
    """Make something that a training can do without; tell by ``say`` if that fails."""
    try:
        make()
    except Exception as error:  # whatever it is, it is worth a line and not the training
        say(f"warning: {what} was not written ({type(error).__name__}: {error})")
