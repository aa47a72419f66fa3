"""One rank of a group that test_distributed.py starts.

Writes what it saw to ``<folder>/<rank>.json``; the test compares the files of all ranks.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf import DistributedError
from conf.cli import launch
from conf.cli.launch import claim_error, explain_lost_peer, read_launch, shutdown
from conf.cli.program import options_of
from train_utils import auto, distributed, numerics
from train_utils.results import make_detections


def exchange(world: distributed.World, folder: Path) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "place": [world.world_size, world.local_rank, world.local_world_size, world.num_nodes],
        "main": [world.is_main, world.is_local_main],
        "launcher": world.launcher,
        "device": str(world.device),
        "built": zero_first(world, folder),
        "sum": distributed.sum_over_ranks(torch.tensor([1.0, world.rank])).tolist(),
        "text": [distributed.broadcast_text(text if world.is_main else None) for text in ("", "\u00e9", "x" * 100_000)],
        "gathered": gather(world),
        "module": module(world),
        "failure": failure(world),
        "agreed": agreed(world),
    }


def agreed(world: distributed.World) -> list[str]:
    """What ``auto`` becomes where only rank 0 has bfloat16 and a compiler."""
    numerics.has_native_bfloat16 = auto.can_generate_code = lambda: world.is_main
    options = options_of("train", ["data=shapes"]).train
    on_gpus = replace(world, device=torch.device("cuda", 0))
    return [numerics.common_precision(world.device).value, auto.choose_mode(options, on_gpus)]


def zero_first(world: distributed.World, folder: Path) -> list[float]:
    """When the body began and what it found: the leader builds slowly, peers read."""
    with distributed.torch_distributed_zero_first(world):
        began, file = time.time(), folder / "built"
        if world.is_main:
            time.sleep(0.5)
            file.write_text(str(time.time()))
        return [began, float(file.read_text())]


def gather(world: distributed.World) -> list[Any]:
    """Each rank passes ``rank`` rows of numbers, of detections, and none at all."""
    rows = np.full((world.rank, 2), world.rank + 0.1)
    detections = make_detections(world.rank, np.arange(world.rank), rows[:, 0], np.zeros((world.rank, 4)))
    numbers, tables, empty = map(distributed.gather_arrays, (rows, detections, rows[:0]))
    if numbers is None or tables is None or empty is None:
        return [numbers, tables, empty]
    pairs = [list(zip(table["image_id"].tolist(), table["class"].tolist(), strict=True)) for table in tables]
    return [[array.tolist() for array in numbers], pairs, [array.tolist() for array in empty]]


def module(world: distributed.World) -> list[float]:
    """The values of rank 0's module, and the mean that a forward pass makes of this rank's own."""
    norm = torch.nn.BatchNorm2d(1)
    values = norm.state_dict().values()
    for value in values:
        value.fill_(world.rank + 1)
    distributed.broadcast_module(norm)
    found, wrapped = list(map(float, values)), distributed.wrap_ddp(norm, world)
    norm.running_mean.fill_(world.rank)
    wrapped(torch.zeros(2, 1, 1, 1))
    return [*found, float(norm.running_mean)]


def failure(world: distributed.World) -> list[Any]:
    try:
        with distributed.torch_distributed_zero_first(world):
            raise ValueError("data.root=/x is missing. fix: set data.root")
    except (ValueError, DistributedError) as error:
        return [type(error).__name__, str(error)]


def killed_builder(world: distributed.World, folder: Path) -> dict[str, Any]:
    with distributed.torch_distributed_zero_first(world):
        if world.rank == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    return {}


SCENARIOS: dict[str, Callable[[distributed.World, Path], dict[str, Any]]] = {
    function.__name__: function for function in (exchange, killed_builder)
}


def run_in(environment: dict[str, str], folder: str, scenario: str) -> None:
    """Join, run the scenario and write the report, in a forked process with this environment."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    launch.LAUNCHER_SECONDS = 0.5  # nothing ends a rank that waits for its launcher here
    try:
        world = distributed.init_distributed_mode("cpu", 60.0)
        report = SCENARIOS[scenario](world, Path(folder))
    except (DistributedError, RuntimeError) as error:
        report = {"error": str(explain_lost_peer(error))}
    shutdown()
    Path(folder, f"{read_launch().rank}.json").write_text(json.dumps(report | {"reports": claim_error()}))
