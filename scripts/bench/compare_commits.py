"""Compare this working tree with an earlier commit, bit by bit.

    python -m scripts.bench.compare_commits a88967a [part ...]

Both sides run the same things on this machine, each in processes of its own: eight trainings of
20 steps (losses, weights, momentum, averages), two evaluations of published weights, the raw maps
of four networks and two .weights round trips. A row is "equal", or gives the largest difference as
a share of the largest value. The exit code is 1 if a row differs.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent.parent.parent
SHARED = HERE.parent / "shared"
SMALL = [
    "data=shapes", "data.shapes.train_images=40", "data.shapes.val_images=8", "data.shapes.image_size=96",
    "data.root=shapes", "data.index_dir=index", "data.workers=0", "model=yolov3-tiny", "model.width=0.25",
    "train.epochs=4", "train.image_size=96", "train.batch_size=8", "train.device=cpu", "train.precision=float32",
    "train.sync_bn=false", "evaluate.every=0", "logger.every_steps=1", "logger.pictures=false",
]  # fmt: skip
EXACT = ["train.sync_bn=true", "train.precision=float64"]  # batch norm over all ranks may add in another order
TRAININGS = {
    "sgd": EXACT,
    "two ranks": EXACT,
    "adamw": ["optim=adamw"],
    "loss=darknet": ["loss=darknet"],
    "positives by cost": ["loss.positives_by=cost", "loss.positives=10", "model.scale_x_y=2"],
    "rect, sizes, nine": ["train.rect=true", "train.multi_scale=[0.67,1.34]", "augment.mosaic_nine=0.5"],
    "accumulation": ["train.micro_batch_size=2"],
    "resumed": ["train.save_every_steps=3", "train.epochs=1", "data.shapes.train_images=160"],
}
MICRO, FORMER = "train.micro_batch_size=", "train.device_batch_size="  # the latter in earlier commits, on one rank


def options_here(options: list[str]) -> list[str]:
    """The options in the words of the checkout that this process runs in."""
    values = next(Path("conf").rglob("train.yaml")).read_text()  # in another folder of earlier commits
    if "micro_batch_size" not in values:
        return [option.replace(MICRO, FORMER) for option in options]
    return options


def start(options: list[str], folder: Path, ranks: int = 1) -> subprocess.Popen[str]:
    """Start train.py of this checkout."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, str(Path("train.py").absolute()), *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def training(name: str, folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Losses of each step, and what the checkpoint after the last one holds."""
    run, last = folder / "run", folder / "run/checkpoints/last.pt"
    options = [*SMALL, *TRAININGS[name], f"run_dir={run}"]
    process = start(options_here(options), folder, ranks=2 if name == "two ranks" else 1)
    if name == "resumed":
        while not last.exists() and process.poll() is None:
            time.sleep(0.01)
        process.terminate()
        process.wait()
        assert torch.load(last, weights_only=True)["state"]["step"] < 20, "stopped too late"
        process = start([f"resume={run}"], folder)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    state = torch.load(last, weights_only=True)["state"]
    assert state["step"] == 20
    table = np.genfromtxt(run / "steps.csv", delimiter=",", names=True)
    yield "losses", np.stack([table[column] for column in table.dtype.names or () if column.startswith("loss")])
    yield "weights", joined(state["model"].values())
    yield "average", joined(state["ema"].values())
    yield "momentum", joined(value for entry in state["optimizer"]["state"].values() for value in entry.values())


def joined(tensors: Iterable[torch.Tensor]) -> np.ndarray:  # in float64, which holds each number exactly
    return np.concatenate([np.asarray(tensor, dtype=np.float64).reshape(-1) for tensor in tensors])


def evaluations(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The twelve figures of published weights under two protocols."""
    from eval import evaluate

    network = SHARED / "darknet/yolo-fastest-1.1/yolo-fastest-1.1"
    words = ["data=coco", f"data.root={SHARED}/data/coco128", "data.val.images=images/val2017", "device=cpu"]
    words += ["model=yolov3-tiny", f"model.cfg={network}.cfg", f"model.weights={network}.weights"]
    for protocol in ("coco", "darknet"):
        figures = evaluate([*words, f"data.index_dir={folder}", f"evaluate={protocol}", "evaluate.image_size=320"])
        yield protocol, np.array(list(figures.values()))


def networks(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Raw maps of new networks, and Darknet's files written, read and written again."""
    from models import Darknet, load_darknet_weights, save_darknet_weights, zoo_cfg

    for name in ("yolov3-tiny", "yolov7-tiny", "yolov3-spp", "yolov4-tiny"):
        torch.manual_seed(0)
        model = Darknet(zoo_cfg(name)).eval()
        with torch.no_grad():
            yield name, joined(model(torch.rand(2, 3, 96, 64)))
        if name in ("yolov3-tiny", "yolov7-tiny"):
            save_darknet_weights(model, folder / "first")
            load_darknet_weights(again := Darknet(zoo_cfg(name)), folder / "first")
            save_darknet_weights(again, folder / "second")
            assert (folder / "first").read_bytes() == (folder / "second").read_bytes()
            yield f"{name}.weights", np.fromfile(folder / "first", dtype=np.uint8).astype(np.float64)


OTHERS = {"evaluations": evaluations, "networks": networks}


def collect(part: str, out: str) -> int:
    """Run one part in the current checkout and write its arrays."""
    sys.path.insert(0, str(Path.cwd()))
    with tempfile.TemporaryDirectory() as folder:
        rows = training(part, Path(folder)) if part in TRAININGS else OTHERS[part](Path(folder))
        np.savez(out, allow_pickle=False, **dict(rows))
    return 0


def main(commit: str, *parts: str) -> int:
    """Run ``parts``, or all, on both sides; print a row for each array, count those that differ."""
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        before, out = f"{scratch}/before", f"{scratch}/arrays.npz"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, commit], cwd=HERE, check=True)
        for part in parts or (*TRAININGS, *OTHERS):
            sides = []
            for checkout in (before, HERE):
                command = [sys.executable, __file__, "--collect", part, out]
                subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
                sides.append(dict(np.load(out)))
            for row in sides[0]:
                a, b = (side[row] for side in sides)
                differing += not np.array_equal(a, b)
                change = "equal" if np.array_equal(a, b) else f"{np.abs(a - b).max() / np.abs(a).max():.1e}"
                print(f"{part:20s} {row:20s} {change}", flush=True)
    subprocess.run(["git", "worktree", "prune"], cwd=HERE, check=True)
    return differing


if __name__ == "__main__":
    sys.exit(collect(*sys.argv[2:]) if sys.argv[1] == "--collect" else main(*sys.argv[1:]) > 0)
