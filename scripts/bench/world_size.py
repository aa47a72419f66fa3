"""Train the same few steps on 1, 2 and 4 ranks and print by how much the weights differ.

    python -m scripts.bench.world_size [key=value ...]

Each training is `train.py` under torchrun: yolov3-spp at width 0.125 on drawn shapes, 20 steps of 8
mosaics of changing sizes. Precision is float64 or float32, with one pass or two accumulated passes
per step. The last images of the epoch fill no step. Options on the command line go to train.py
after those below; train.precision=float32 leaves out float64.

All start with the weights of 40 steps on one rank. Float32 uses train.deterministic=true: without
it, rounding depends on how the images are dealt, and a deep network amplifies that (docs/results/).

The difference of two tensors is max |a - b| / max |a|. Each figure is that of the tensor with the
largest difference.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before torch is imported
    print(__doc__)
    raise SystemExit

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from train_utils.run.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
PRECISIONS = {"float64": (), "float32": ("train.deterministic=true",)}
PASSES = (1, 2)  # per step
PROCESSES = (1, 2, 4)
BATCH_SIZE = 8
OPTIONS = (
    "data=shapes", "data.shapes={train_images: 165, val_images: 4, image_size: 128, seed: 0}", "data.workers=1",
    "model=yolov3-spp", "model.width=0.125", "train.epochs=1", f"train.batch_size={BATCH_SIZE}",
    "train.image_size=128", "train.multi_scale=[0.75,1.25]", "train.device=cpu",
    "optim.lr=0.001", "optim.burn_in_bias_lr=0.001", "evaluate.confidence=0.1", "logger.pictures=false",
)  # fmt: skip
START = ("train.epochs=2", "optim.ema_decay=0.8")
HEADER = ("precision", "passes", "processes", "parameters", "average", "batch norm", "momentum", "seconds")


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest max |a - b| / max |a| of tensors with equal names; 0 if both are 0."""
    assert some.keys() == others.keys()
    return max(
        float((one - others[name]).abs().max() / one.abs().max().clamp(min=1e-300))
        for name, one in ((name, tensor.double()) for name, tensor in some.items())
    )


def parts_of(state: dict[str, object]) -> dict[str, dict[str, Tensor]]:
    """The compared parts of a checkpoint: tensors by name, for each column of the table."""
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


def train(folder: Path, name: str, processes: int, options: Sequence[str]) -> tuple[Path, float]:
    """Train once in ``folder``; return the checkpoint and the seconds."""
    places = (f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", f"run_dir={folder / name}")
    # Rounding of a convolution depends on its threads, and a single rank would use all cores.
    launch = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run"]
    launch += ["--standalone", f"--nproc-per-node={processes}"]
    command = [*launch, str(REPOSITORY / "train.py"), *OPTIONS, *places, *options]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
    return folder / name / "checkpoints" / "last.pt", time.perf_counter() - started


def rows(folder: Path, options: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Train and yield the rows of the table one by one."""
    keys = [option.split("=", 1) for option in options]
    start, _ = train(folder, "start", 1, (*options, *START))
    for precision in [key[1] for key in keys if key[0] == "train.precision"] or PRECISIONS:
        for passes in PASSES:
            one: dict[str, dict[str, Tensor]] = {}
            for processes in PROCESSES:
                given = (
                    f"train.precision={precision}",
                    *PRECISIONS[precision],
                    f"train.micro_batch_size={BATCH_SIZE // passes}",
                    f"model.weights={start}",
                )
                name = f"{precision}_{passes}_{processes}"
                checkpoint, seconds = train(folder, name, processes, (*given, *options))
                parts = parts_of(load_checkpoint(checkpoint))
                one = one or parts
                differences = [f"{largest_difference(one[part], parts[part]):.1e}" for part in one]
                yield precision, str(passes), str(processes), *differences, f"{seconds:.0f}"


def main(options: Sequence[str]) -> None:
    """Print the table: the difference of each training from that on one rank."""
    if wrong := [option for option in options if "=" not in option]:
        sys.exit(f"{' '.join(wrong)}: options are key=value, those of train.py. {__doc__}")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), options):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
