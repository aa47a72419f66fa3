"""What a training depends on besides its data: options, code, packages, machines, weights."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.answers.help import version_page
from conf.build.agreement import ROOT, source_files
from conf.entry import to_dictionary
from conf.schema import TrainConfig
from conf.sources.weights import weights_folder
from data.index.hashes import hash_file
from models.weights.published import LICENCE
from train_utils.distributed import World, gather_arrays
from train_utils.numerics import precision_name
from train_utils.report.proof import UNKNOWN
from train_utils.run.checkpoint_files import find_checkpoint
from train_utils.run.plain_data import digest_of

NAMED = 3  # files or options that a sentence lists
CPU_INFO, NVIDIA_DRIVER = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
DRIVER = "NVIDIA driver"
PROVED = (".py", ".yaml", ".cfg", ".names", ".jinja")  # files of the program


def start_facts(config: TrainConfig, world: World, devices: str, step: int) -> dict[str, Any]:
    """What this start of a run, after ``step``, depends on, with the hardware of all ranks."""
    places = f"{world.world_size} on {world.num_nodes} node{'s' * (world.num_nodes > 1)}, {world.launcher}"
    return {
        "environment": {  # for a reader; the machine is that of rank 0
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": shlex.join(["python", *sys.argv]),
            "host": platform.node(),
            "system": platform.platform(),
            "device": device_name(world.device) + f", driver {packages()[DRIVER]}" * (world.device.type == "cuda"),
            "processor": f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores",
            "processes": f"{places}, {world.backend}" if world.world_size > 1 else 1,
            "precision": precision_name(config.train.precision.value, world.device),
            "versions": ", ".join(version_page().splitlines()),
        },
        "step": step,
        "processes": world.world_size,
        "threads": torch.get_num_threads(),
        "hardware": devices,
        "code": digest_of(code_of(config)),
        "packages": digest_of(packages()),
        "options": to_dictionary(config),
    }


def commit_of(start: Mapping[str, Any]) -> str:
    """The commit of a start, with a note if there were uncommitted changes."""
    found = re.search(r"commit (.+)", start["environment"]["versions"])
    return found[1] if found else UNKNOWN


def on_gpu(start: Mapping[str, Any]) -> bool:
    """Whether a start trained on GPUs."""
    return ", CUDA " in start["hardware"]


def hardware(world: World) -> str:
    """The devices of all ranks, on rank 0; all ranks call this together."""
    devices = gather_arrays(np.frombuffer(device_name(world.device).encode(), np.uint8)) or []
    return ", ".join(dict.fromkeys(device.tobytes().decode() for device in devices))


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of this machine's processor."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    known = CPU_INFO.is_file() and re.search(r"model name\s*: (.+)", CPU_INFO.read_text(encoding="utf-8"))
    return known[1] if known else platform.machine()


def code_of(config: TrainConfig, root: Path = ROOT) -> dict[str, str]:
    """The SHA-256 of each file of the program below ``root``, of plugins and of a user's .cfg."""
    cfg = Path(config.model.cfg)
    own = {f"network {cfg.name}": hash_file(cfg)} if cfg.suffix else {}
    plugins = {f"plugin {name}": digest for name, digest in config.plugins_sha256.items()}
    return source_files(root, PROVED) | plugins | own


@cache
def packages() -> dict[str, str]:
    """The version of each installed package, of Python, CUDA, cuDNN and the GPU's driver."""
    driver = re.search(r"Module[^\d]*([\d.]+)", NVIDIA_DRIVER.read_text() if NVIDIA_DRIVER.is_file() else "")
    return {str(package.name): package.version for package in distributions()} | {
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        DRIVER: driver[1] if driver else "None",
    }


def initial_weights(config: TrainConfig) -> dict[str, str]:
    """Where the first weights are from, with the SHA-256 and the licence of their file."""
    if config.model.weights is None:
        return {"file": "none, random values", "sha256": "", "licence": "-"}
    published, path = config.model.published(), Path(config.model.weights)
    if published is not None:
        path = weights_folder() / published.file_name
    elif path.is_dir():
        path = find_checkpoint(path, "best")
    licence = " ".join(LICENCE.split()) if published is not None else UNKNOWN
    return {"file": config.model.weights, "sha256": hash_file(path), "licence": licence}


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
