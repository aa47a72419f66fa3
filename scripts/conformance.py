"""Check that ranks train and evaluate exactly here: what to run before a cluster is trusted.

    torchrun --nproc-per-node=2 -m scripts.conformance
    srun python -m scripts.conformance
    torchrun --nproc-per-node=2 -m scripts.conformance kill
    python -m scripts.conformance out=report.json

It trains a small network on drawn shapes, on all ranks and in one process, prints a table, and
exits with 1 if a check failed. With ``kill`` the last rank kills itself after the table: the
launcher must end all others soon, with an exit code other than 0. The runs stay in
runs/conformance/<date_time>, which all nodes must see. ``out`` is a certificate for a bug report:
versions, ranks, nodes, backend, and the outcome and time of each check, also of the one that broke.
"""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from conf import REPOSITORY, ConfigError, errors
from conf.cli import help, launch, run_files
from conf.cli.command_line import print_error
from conf.cli.program import options_of
from conf.schema import TrainConfig
from data import Batch
from data.progress import counted
from hydra_yolov3_spp import evaluate, train
from models import Darknet, zoo_cfg
from train_utils import build, checkpoint, distributed, engine, run_folder, sync_batchnorm

PRECISIONS = ("float64", "auto")
EXACT = 1e-9  # largest relative difference in float64: the network multiplies rounding errors
CLOSE = 0.05  # largest relative difference of the losses in the training's precision
BYTES = 2**26  # size of the timed exchange: the gradient of 16 million weights
SECONDS = 120  # a rank waits this long for the others


class Conformance:
    """The checks of one process group; all ranks call each check together."""

    def __init__(self, world: distributed.World, folder: Path) -> None:
        self.world, self.folder, self.checks = world, folder, list[tuple[str, bool, str, float]]()
        self.last = time.perf_counter()
        ranks = world.world_size
        # An epoch has three steps and one image left over; an evaluation ends with a batch of one.
        drawn = f"{{train_images: {12 * ranks + 1}, val_images: {4 * ranks + 1}, image_size: 64}}"
        self.data = [
            "data=shapes", f"data.root={folder}/shapes", f"data.index_dir={folder}/index", f"data.shapes={drawn}",
            "data.workers=0",
        ]  # fmt: skip
        self.options = [
            *self.data, "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "logger.pictures=false",
            f"train.batch_size={4 * ranks}", f"train.timeout_seconds={SECONDS}", "train.epochs=2", "evaluate.every=0",
            "logger.every_steps=1", "train.compile='off'", f"device={world.device.type}",
        ]  # fmt: skip
        ckpt = f"ckpt={folder}/ranks_auto/checkpoints/last.pt"
        self.scored = [ckpt, *self.data, "evaluate.batch_size=2", f"device={world.device.type}"]

    def record(self, name: str, passed: bool, detail: str) -> None:
        """Add a row, with the seconds since the last one."""
        started, self.last = self.last, time.perf_counter()
        self.checks.append((name, passed, detail, round(self.last - started, 2)))

    def run(self) -> None:
        """Make all checks in silence; the one that broke is recorded, too."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                for check in (self.weights, self.rank_without_boxes, self.evaluation, self.resume, self.exchange):
                    check()
        except Exception as error:
            self.record(check.__name__, False, f"{type(error).__name__}: {errors.first_line(error)}")
            raise

    def write(self, out: Path) -> None:
        """Write the certificate whole or not at all."""
        world, on_gpu = self.world, self.world.device.type == "cuda"
        content = {
            "certificate": "ranks train and evaluate exactly",
            "passed": all(passed for _, passed, *_ in self.checks),
            "versions": help.version_page().splitlines(),
            "launcher": world.launcher,
            "ranks": world.world_size,
            "nodes": world.num_nodes,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "backend": "none" if world.world_size == 1 else "nccl" if on_gpu else "gloo",
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "checks": [dict(zip(("check", "passed", "detail", "seconds"), row, strict=True)) for row in self.checks],
        }
        with run_files.whole_file(out) as file:
            file.write(json.dumps(content, indent=1) + "\n")

    def train(self, name: str, *more: str) -> Path:
        """Train on all ranks; return the run folder."""
        run = self.folder / name
        train([*self.options, f"run_dir={run}", *more])
        return run

    def alone(self) -> None:
        """Do the same in one process that rank 0 starts. Raises CalledProcessError if it fails."""
        trainings = [[*self.options, f"train.precision={p}", f"run_dir={self.folder}/one_{p}"] for p in PRECISIONS]
        scored = [*self.scored, f"out={self.folder}/one_evaluation"]
        program = "from hydra_yolov3_spp import evaluate, train\n"
        program += f"for options in {trainings}: train(options)\nevaluate({scored})"
        with distributed.torch_distributed_zero_first(self.world):
            if self.world.is_main:
                subprocess.run(
                    [sys.executable, "-c", program],
                    env=launch.environment_of_one(), cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL,
                )  # fmt: skip

    def weights(self) -> None:
        """Compare with the weights of one process, in float64 and in the training's precision."""
        for precision in PRECISIONS:
            self.train(f"ranks_{precision}", f"train.precision={precision}")
        self.alone()
        for precision in PRECISIONS if self.world.is_main else ():
            together, one = (self.folder / f"{name}_{precision}" for name in ("ranks", "one"))
            states = [checkpoint.load_checkpoint(run, "last") for run in (together, one)]
            if precision == "float64":
                worst = largest_difference(*(state["model"] for state in states))
                self.record("weights of one process, float64", worst <= EXACT, f"differ by {worst:.1e}")
            else:
                tables = [csv.DictReader((run / "metrics.csv").open()) for run in (together, one)]
                losses = [[float(row["loss"]) for row in table] for table in tables]
                worst = max(abs(ours / theirs - 1) for ours, theirs in zip(*losses, strict=True))
                self.record("losses of one process, train.precision=auto", worst <= CLOSE, f"differ by {worst:.1e}")

    def rank_without_boxes(self) -> None:
        """Compare gradients with all boxes on one rank and with the whole batch on each rank."""
        world, config = self.world, options_of("train", self.options)
        images = torch.rand(2 * world.world_size, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()
        targets = torch.tensor([[0, 1, 20, 20, 10, 12], [1, 0, 40, 12, 33, 20.0]])
        own = images[2 * world.rank :][:2], targets if world.is_main else targets[:0]
        gradients = []
        for pictures, boxes in (own, (images, targets)):
            torch.manual_seed(0)
            model = Darknet(zoo_cfg("yolov3-tiny"), 3, 0.125).to(world.device, torch.float64).train()
            sync_batchnorm.convert_sync_batchnorm(model, world)
            loss = build.build_loss(model.heads, config.loss)
            forward = engine.ForwardPass(distributed.wrap_ddp(model, world), loss, Batch.network_input, None, world)
            per_image = forward.positives_per_image([boxes], len(pictures) * world.world_size)
            parts, _ = forward(pictures.to(world.device), boxes.to(world.device), per_image, 1.0)
            (parts.total / len(pictures)).backward()
            gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        worst = largest_difference(*gradients)
        self.record("gradients with ranks without boxes", worst <= EXACT, f"differ by {worst:.1e}")

    def evaluation(self) -> None:
        """Compare the metrics with those of one process, to the last bit."""
        ours = dict(evaluate(self.scored))
        if self.world.is_main:
            theirs = json.loads((self.folder / "one_evaluation" / "metrics.json").read_text())
            del theirs["about"]  # what was scored, and how
            self.record("metrics of one process, to the bit", ours == theirs, f"AP {ours['AP']:.6f}")

    def resume(self) -> None:
        """Compare a run that a signal stopped, and that was resumed, with an undisturbed one."""
        steps = self.folder / "stopped" / "steps.csv"

        def stop() -> None:
            while not steps.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)

        if self.world.is_main:
            threading.Thread(target=stop, daemon=True).start()
        stopped = self.train("stopped", "train.precision=auto")
        train([f"resume={stopped}"])
        if self.world.is_main:
            states = [checkpoint.load_checkpoint(run, "last") for run in (self.folder / "ranks_auto", stopped)]
            worst = largest_difference(*(state["model"] for state in states))
            at = "stopped at" in (stopped / "train.log").read_text()
            self.record("resume after a signal, to the bit", worst == 0 and at, f"differ by {worst:.1e}")

    def exchange(self) -> None:
        """Time the sum of a large gradient over all ranks."""
        gradient = torch.ones(BYTES // 4, device=self.world.device)
        for _ in range(3):  # the last round counts
            distributed.barrier()
            started = time.perf_counter()
            total = float(distributed.sum_over_ranks(gradient)[0])
            seconds = time.perf_counter() - started
        speed = f"{BYTES / 2**20:.0f} MB in {1000 * seconds:.0f} ms"
        self.record("exchange of a gradient", total == self.world.world_size, speed)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a value, relative to the largest value of its tensor."""
    worst = 0.0
    for name, their in theirs.items():
        scale = float(their.double().abs().max().nan_to_num(1.0).clamp(min=1e-12))
        difference = (ours[name].double() - their.double()).abs().max().nan_to_num(float("inf"))
        worst = max(worst, float(difference) / scale)
    return worst


def main(*arguments: str) -> None:
    """Run all checks; exit with 1 if one failed."""
    outs = [Path(word.removeprefix("out=")).absolute() for word in arguments if word.startswith("out=")]
    if unknown := [word for word in arguments if word != "kill" and not word.startswith("out=")]:
        raise ConfigError(f"{unknown[0]} is not a word of scripts.conformance. fix: out=<a new file>, or kill")
    world = distributed.init_distributed_mode("auto", SECONDS)
    for out in outs:
        run_folder.on_main(world, partial(run_files.refuse_existing, out, "out"))
        run_folder.on_main(world, partial(run_folder.make_writable, out.parent, "out"))
    folder = Path(distributed.broadcast_text(f"runs/conformance/{time.strftime('%Y-%m-%d_%H-%M-%S')}")).resolve()
    conformance = Conformance(world, folder)
    try:
        conformance.run()
    finally:
        for out in outs if world.is_main else ():
            conformance.write(out)
    if world.is_main:
        where = f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes, 'node')}, {world.device.type}"
        print(f"{where}, torch {torch.__version__}")
        for name, passed, detail, _ in conformance.checks:
            print(f"{'pass' if passed else 'FAIL'}  {name:45s} {detail}", flush=True)
    distributed.barrier()
    if "kill" in arguments and world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "kill" in arguments:
        distributed.barrier()  # waits forever: the launcher has to end this rank
    failed = distributed.any_rank(not all(passed for _, passed, *_ in conformance.checks))
    launch.shutdown()
    sys.stdout.flush()
    os._exit(int(failed))  # an exiting interpreter is sometimes aborted by torch's threads


if __name__ == "__main__":
    try:
        print(help.docstring_of("scripts.conformance")) if "--help" in sys.argv else main(*sys.argv[1:])
    except Exception as error:
        sys.exit(print_error(error, TrainConfig))
