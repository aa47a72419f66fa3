"""Kill trainings at random moments, resume them, and compare with an undisturbed one bit by bit.

    python -m tests.runs.kill_resume [kills=20] [processes=1,2,3] [seed=0] [folder=<for the runs>]

Every step writes a checkpoint. Kills come in turn at a random time, while one is written, and while
an epoch is evaluated. All processes compute with one thread.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf import CheckpointError
from conf.cli.from_checkpoint import complete_training
from conf.cli.launch import shutdown
from conf.compose import compose
from conf.schema import TrainConfig
from tests.runs.process_group import fork_context, free_port, take_place, write_to
from train import train
from train_utils.checkpoint import load_last

EPOCHS, STEPS = 12, 5  # steps of an epoch
MOMENTS = ("at a random time", "in a write", "in an evaluation")
PATIENCE = 120.0  # seconds for a training to begin, or for survivors to give up
OPTIONS = (
    "data=shapes", "data.shapes={train_images: 60, val_images: 6, image_size: 64}", "data.workers=1",
    "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.multi_scale=[0.5,1.5]",
    "train.batch_size=12", f"train.epochs={EPOCHS}", "device=cpu", "train.save_every_steps=1",
    "train.timeout_seconds=34", "evaluate.every=4", "logger.pictures=false", "resume=auto",
)  # fmt: skip


def train_rank(place: tuple[int, int, int], output: str, environment: dict[str, str], options: list[str]) -> None:
    write_to(output)
    os.environ |= environment
    take_place(*place)
    train(compose("train", TrainConfig, options, complete_training))
    shutdown()


def start(run: Path, world_size: int, *more: str) -> list[Any]:
    """Start a training in ``run``, forked from a server that has imported everything."""
    context = fork_context()
    places = [f"data.root={run.parent / 'shapes'}", f"data.index_dir={run.parent / 'index'}", f"run_dir={run}"]
    port, output = free_port(), f"{run}.txt"
    processes = [
        context.Process(
            target=train_rank, args=((rank, world_size, port), output, {**os.environ}, [*OPTIONS, *places, *more])
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any], seconds: float) -> bool:
    """Wait for all to end, then kill the rest; return whether all ended well."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, until - time.monotonic()))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    return all(process.exitcode == 0 for process in processes)


def train_well(run: Path, world_size: int, *more: str, seconds: float = PATIENCE) -> None:
    assert finish(start(run, world_size, *more), seconds), Path(f"{run}.txt").read_text()[-3000:]


def begun(run: Path) -> int:
    log = run / "train.log"
    return log.read_text().count(" on cpu (") if log.exists() else 0


def start_and_wait(run: Path, world_size: int, *more: str) -> list[Any]:
    before = begun(run)
    processes = start(run, world_size, *more)
    until = time.monotonic() + PATIENCE
    while begun(run) == before and time.monotonic() < until and all(p.is_alive() for p in processes):
        time.sleep(0.005)
    return processes


def stamp(path: Path) -> int:
    """Identify the file at ``path``: a replacement changes the value."""
    with contextlib.suppress(FileNotFoundError):  # between two renames
        return path.stat().st_mtime_ns
    return 0


def is_evaluated(run: Path, options: Sequence[str]) -> bool:
    """Whether the newest checkpoint is of the last step of an epoch that is evaluated."""
    every = int([option for option in options if option.startswith("evaluate.every=")][-1].partition("=")[2])
    with contextlib.suppress(CheckpointError):
        step: int = load_last(run)[0]["step"]
        return step % (STEPS * every) == 0
    return False


def kill_once(
    run: Path, world_size: int, generator: random.Random, longest: float, moment: str, more: Sequence[str]
) -> str:
    """Start or resume, kill a rank some checkpoints and a moment later, and tell what happened."""
    processes = start_and_wait(run, world_size, *more)
    steps, last = generator.randrange(4), run / "checkpoints" / "last.pt"
    for _ in range(steps):
        before = stamp(last)
        while stamp(last) == before and all(p.is_alive() for p in processes):
            time.sleep(0.002)
    victim, delay = generator.randrange(world_size), generator.uniform(0, longest)
    while all(p.is_alive() for p in processes):
        if moment == "in a write" and any((run / "checkpoints").glob("*.tmp")):
            break
        if moment == "in an evaluation" and is_evaluated(run, (*OPTIONS, *more)):
            break
        if moment == "at a random time":
            time.sleep(delay)
            break
    if not processes[victim].is_alive():
        return "over" if finish(processes, PATIENCE) else "failed"
    os.kill(processes[victim].pid, signal.SIGKILL)
    finish(processes, 1)
    step = load_last(run)[0]["step"] if any((run / "checkpoints").glob("*.pt")) else 0
    return f"rank {victim}, {moment}, {steps} checkpoints after the start: last step {step}"


def differences(one: Any, other: Any, key: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for name in one for line in differences(one[name], other[name], f"{key}.{name}")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [
            line for i, (a, b) in enumerate(zip(one, other, strict=True)) for line in differences(a, b, f"{key}[{i}]")
        ]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [key]


def differing_parts(one: Path, other: Path) -> list[str]:
    """What differs between two runs in last.pt, but for the options, and in metrics.csv."""
    expected, found = load_last(one)[0], load_last(other)[0]
    wrong = [line for key in expected if key != "config" for line in differences(expected[key], found[key], key)]
    same = (one / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    return wrong if same else [*wrong, "metrics.csv"]


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest max |a - b| / max |a| of tensors with equal names; 0 if both are 0."""
    assert some.keys() == others.keys()
    return max(
        float((one - others[name]).abs().max() / one.abs().max().clamp(min=1e-300))
        for name, one in ((name, tensor.double()) for name, tensor in some.items())
    )


def parts_of(state: dict[str, object]) -> dict[str, dict[str, Tensor]]:
    """Tensors by name, for each part of a checkpoint that training changes."""
    model, average, optimizer = state["model"], state["ema"], state["optimizer"]
    assert isinstance(model, dict) and isinstance(average, dict) and isinstance(optimizer, dict)
    return {
        "parameters": {name: tensor for name, tensor in model.items() if "running" not in name},
        "average": average,
        "batch norm": {name: tensor for name, tensor in model.items() if "running" in name},
        "momentum": {
            f"{key}.{name}": tensor for key, kept in optimizer["state"].items() for name, tensor in kept.items()
        },
    }


def compare(
    folder: Path, world_size: int, kills: int, seed: int, longest: float, *more: str
) -> tuple[list[str], list[str]]:
    """What happened at each kill, and the final differences from an undisturbed training."""
    generator = random.Random(seed)
    whole, killed = folder / f"whole_{world_size}", folder / f"killed_{world_size}"
    train_well(whole, world_size, *more, seconds=10 * PATIENCE)
    events: list[str] = []
    while len(events) < kills:
        moment = MOMENTS[len(events) % len(MOMENTS)]
        events.append(kill_once(killed, world_size, generator, longest, moment, more))
        if events[-1] in ("over", "failed"):
            break
    train_well(killed, world_size, *more, seconds=10 * PATIENCE)
    return events, differing_parts(whole, killed)


def main(arguments: list[str]) -> None:
    values = {"kills": "20", "processes": "1,2,3", "seed": "0"} | dict(a.split("=", 1) for a in arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(values.get("folder", temporary))
        folder.mkdir(parents=True, exist_ok=True)
        for world_size in map(int, values["processes"].split(",")):
            events, wrong = compare(folder, world_size, int(values["kills"]), int(values["seed"]), 0.3)
            print(f"{world_size} ranks, {len(events)} kills:", *events, sep="\n  ")
            print("  no difference" if not wrong else f"  different: {', '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
