"""``about.json``: on what a run was started, each time, and on which data."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from train_utils.errors import TrainError
from train_utils.processes.world import World
from train_utils.run.whole_files import whole_file

FILE = "about.json"
PACKAGES = (
    "hydra-yolov3-spp", "torch", "torchvision", "numpy", "opencv-python-headless", "pycocotools", "hotcoco",
    "faster-coco-eval", "simplejpeg", "hydra-core",
)  # fmt: skip
CPU_INFO = Path("/proc/cpuinfo")
SOURCE = Path(__file__).parents[2]  # the checkout, or the folder of installed packages


def keep_start(folder: Path, precision: str, data: dict[str, dict[str, Any]], world: World) -> None:
    """Add this start to a run's about.json and keep the summary of its sets. Raises OSError."""
    path = folder / FILE
    starts = read_about(folder)["starts"]
    with whole_file(path) as file:
        json.dump({"starts": [*starts, environment(world, precision)], "data": data}, file, indent=1)


def read_about(folder: Path) -> dict[str, Any]:
    """``starts``, oldest first, and ``data`` by set; both empty if the run kept none.

    Raises TrainError if the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return {"starts": [], "data": {}}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(f"cannot read {path} ({error}). fix: move the file away") from error
    assert isinstance(content, dict)
    return content


def environment(world: World, precision: str) -> dict[str, Any]:
    """The machine of rank 0, the versions, the commit and the command, by words for a reader."""
    cuda = world.device.type == "cuda"
    places = f"{world.world_size} on {world.num_nodes} node{'s' * (world.num_nodes > 1)}, {world.launcher}"
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(SOURCE),
        "host": platform.node(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(world.device) if cuda else _cpu(),
        "CPU cores": os.cpu_count(),
        "processes": f"{places}, {world.backend}" if world.world_size > 1 else 1,
        "precision": precision,
        "python": platform.python_version(),
        **({"CUDA": torch.version.cuda} if cuda else {}),
        **{name: known for name in PACKAGES if (known := _version(name)) is not None},
    }


def commit(folder: Path) -> str | None:
    """The git commit of a checkout, with a word if files differ from it; None without one."""
    if not (folder / ".git").exists():
        return None
    try:
        found = [
            subprocess.run(["git", "-C", folder, *arguments], check=False, capture_output=True, text=True, timeout=10)
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.TimeoutExpired):  # no git, or a disk that does not answer
        return None
    if any(process.returncode for process in found):
        return None
    return found[0].stdout.strip() + (" with changes" if found[1].stdout.strip() else "")


def _cpu() -> str:
    """The processor's name where Linux tells it, else its kind."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
