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

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf import REPOSITORY, ConfigError, first_line
from conf.cli import help, launch, run_files
from conf.cli.command_line import print_error
from conf.cli.program import options_of
from conf.schema import TrainConfig
from data import Batch
from data.progress import counted, log
from hydra_yolov3_spp import evaluate, train
from models import Darknet, zoo_cfg
from train_utils import build, checkpoint, distributed, engine, run_folder, sync_batchnorm

PRECISIONS = ("float64", "auto")
EXACT = 1e-9  # largest relative difference in float64: the network multiplies rounding errors
CLOSE = 0.05  # largest relative difference of the losses in the training's precision
BYTES = 2**26  # size of the timed exchange: the gradient of 16 million weights
SECONDS = 120  # a rank waits this long for the others
OPTIONS = f"""model=yolov3-tiny model.width=0.125 train.image_size=64 train.epochs=2 train.compile='off'
train.timeout_seconds={SECONDS} evaluate.every=0 logger.every_steps=1 logger.pictures=false"""


class Conformance:
    """The checks of one process group; all ranks call each check together."""

    def __init__(self, world: distributed.World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.checks: list[dict[str, Any]] = []
        self.last = time.perf_counter()
        ranks = world.world_size
        # An epoch has three steps and one image left over; an evaluation ends with a batch of one.
        drawn = f"{{train_images: {12 * ranks + 1}, val_images: {4 * ranks + 1}, image_size: 64}}"
        places = [f"data.root={folder}/shapes", f"data.index_dir={folder}/index"]
        self.data = ["data=shapes", *places, f"data.shapes={drawn}", "data.workers=0", f"device={world.device.type}"]
        self.options = [*self.data, *OPTIONS.split(), f"train.batch_size={4 * ranks}"]
        self.scored = [*self.data, f"ckpt={folder}/ranks_auto/checkpoints/last.pt", "evaluate.batch_size=2"]

    def record(self, name: str, passed: bool, detail: str) -> None:
        """Add a row, with the seconds since the last one."""
        started, self.last = self.last, time.perf_counter()
        seconds = round(self.last - started, 2)
        self.checks.append({"check": name, "passed": passed, "detail": detail, "seconds": seconds})

    @property
    def passed(self) -> bool:
        """Whether no check has failed on this rank."""
        return all(check["passed"] for check in self.checks)

    def run(self) -> None:
        """Make all checks in silence; the one that broke is recorded, too."""
        try:
            log.setLevel("WARNING")
            for check in (self.weights, self.rank_without_boxes, self.evaluation, self.resume, self.exchange):
                check()
        except Exception as error:
            self.record(check.__name__, False, f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            log.setLevel("INFO")

    def write(self, out: Path) -> None:
        """Write the certificate whole or not at all."""
        world = self.world
        device, backend = ("cpu", "gloo") if world.device.type == "cpu" else (torch.cuda.get_device_name(), "nccl")
        content = {
            "certificate": "ranks train and evaluate exactly",
            "passed": self.passed,
            "versions": launch.versions(),
            "launcher": world.launcher,
            "ranks": world.world_size,
            "nodes": world.num_nodes,
            "device": device,
            "backend": backend if world.world_size > 1 else "none",
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "checks": self.checks,
        }
        with run_files.whole_file(out) as file:
            file.write(json.dumps(content, indent=1) + "\n")

    def training(self, name: str, precision: str) -> list[str]:
        """The options of a run."""
        return [*self.options, f"train.precision={precision}", f"run_dir={self.folder / name}"]

    def alone(self) -> None:
        """Do the same in one process that rank 0 starts. Raises CalledProcessError if it fails."""
        trainings = [self.training(f"one_{precision}", precision) for precision in PRECISIONS]
        scored = [*self.scored, f"out={self.folder}/one_evaluation"]
        program = "from hydra_yolov3_spp import evaluate, train\n"
        program += f"for options in {trainings}: train(options)\nevaluate({scored})"
        command, environment = [sys.executable, "-c", program], launch.environment_of_one()
        with distributed.torch_distributed_zero_first(self.world):
            if self.world.is_main:
                subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)

    def weights(self) -> None:
        """Compare with the weights of one process, in float64 and in the training's precision."""
        for precision in PRECISIONS:
            train(self.training(f"ranks_{precision}", precision))
        self.alone()
        if self.world.is_main:
            worst = self.difference("ranks_float64", "one_float64")
            self.record("weights of one process, float64", worst <= EXACT, f"differ by {worst:.1e}")
            tables = [self.folder / name / "metrics.csv" for name in ("ranks_auto", "one_auto")]
            ours, theirs = (np.genfromtxt(table, delimiter=",", names=True)["loss"] for table in tables)
            worst = float(np.abs(ours / theirs - 1).max())
            self.record("losses of one process, train.precision=auto", worst <= CLOSE, f"differ by {worst:.1e}")

    def rank_without_boxes(self) -> None:
        """Compare gradients with all boxes on one rank and with the whole batch on each rank."""
        world, config = self.world, options_of("train", self.options)
        torch.manual_seed(0)
        images = torch.rand(2 * world.world_size, 3, 64, 64, dtype=torch.float64)
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
            gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
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
        run = self.folder / "stopped"

        def stop() -> None:
            while not (run / "steps.csv").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)

        if self.world.is_main:
            threading.Thread(target=stop, daemon=True).start()
        train(self.training("stopped", "auto"))
        train([f"resume={run}"])
        if self.world.is_main:
            worst = self.difference("stopped", "ranks_auto")
            passed = worst == 0 and "stopped at" in (run / "train.log").read_text()
            self.record("resume after a signal, to the bit", passed, f"differ by {worst:.1e}")

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

    def difference(self, run: str, other: str) -> float:
        """The largest difference of the last weights of two runs."""
        states = [checkpoint.load_checkpoint(self.folder / name, "last")["model"] for name in (run, other)]
        return largest_difference(*states)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a value, relative to the largest value of its tensor; or NaN."""
    differences = []
    for name, their in theirs.items():
        scale = their.double().abs().max().clamp(min=1e-12)
        differences.append((ours[name].double() - their.double()).abs().max() / scale)
    return float(torch.stack(differences).max())


def main(*arguments: str) -> None:
    """Run all checks; exit with 1 if one failed."""
    out = None
    for word in arguments:
        if word.startswith("out="):
            out = Path(word.removeprefix("out=")).absolute()
        elif word != "kill":
            raise ConfigError(f"{word} is not a word of scripts.conformance. fix: out=<a new file>, or kill")
    world = distributed.init_distributed_mode("auto", SECONDS)
    if out is not None:
        run_folder.on_main(world, partial(run_files.refuse_existing, out, "out"))
        run_folder.on_main(world, partial(run_folder.make_writable, out.parent, "out"))
    folder = distributed.broadcast_text(f"runs/conformance/{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    conformance = Conformance(world, Path(folder).resolve())
    try:
        conformance.run()
    finally:
        if out is not None and world.is_main:
            conformance.write(out)
    if world.is_main:
        where = f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes, 'node')}, {world.device.type}"
        print(f"{where}, torch {torch.__version__}")
        for check in conformance.checks:
            print(f"{'pass' if check['passed'] else 'FAIL'}  {check['check']:45s} {check['detail']}", flush=True)
    distributed.barrier()
    if "kill" in arguments:
        if world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()  # waits forever: the launcher has to end this rank
    failed = distributed.any_rank(not conformance.passed)
    launch.shutdown()
    sys.stdout.flush()
    os._exit(int(failed))  # an exiting interpreter is sometimes aborted by torch's threads


if __name__ == "__main__":
    try:
        print(help.docstring_of("scripts.conformance")) if "--help" in sys.argv else main(*sys.argv[1:])
    except Exception as error:
        sys.exit(print_error(error, TrainConfig))
