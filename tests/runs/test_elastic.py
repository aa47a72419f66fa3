"""Trainings under torchrun on one and two machines: killed workers and agents, and a cut link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data import ShapesConfig, ensure_shapes
from tests.runs.slurm_jobs import REPOSITORY, until
from tests.runs.two_machines import INTERFACE, cut, two_machines, why_not
from tests.train_utils.test_distributed import clean_environment
from train_utils.run.checkpoint import load_last

SHAPES = ShapesConfig(train_images=60, val_images=6, image_size=64, seed=0)
EPOCHS = 400  # more than a test waits for
TIME_OUT = 30  # for survivors to end, and for the rendezvous
MESSAGE = re.compile(r"^error: (.*)$", re.MULTILINE)
NOISE = re.compile(r"/train(_utils/\w+)?\.py\", line|terminate called")  # torchrun prints a traceback of its own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ALL_SLURM_TESTS" not in os.environ, reason="minutes: ALL_SLURM_TESTS=1"),
]


@dataclass
class Elastic:
    """Trainings in ``folder``: torchrun agents and the processes they start."""

    folder: Path
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, launcher: list[str], prefix: list[str] | None = None, **environment: str) -> None:
        """Start one more agent, with output in ``agent-<n>.txt``."""
        shapes = f"{{train_images: {SHAPES.train_images}, val_images: {SHAPES.val_images}, image_size: 64, seed: 0}}"
        command = [
            *(prefix or []), sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *launcher,
            str(REPOSITORY / "train.py"), "data=shapes", f"data.root={self.folder}/shapes", f"data.shapes={shapes}",
            "data.workers=1", "data.index_dir=index", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64",
            "train.batch_size=12", f"train.epochs={EPOCHS}", "train.device=cpu", "train.save_every_steps=3",
            f"train.timeout_seconds={TIME_OUT}", "evaluate.every=0", "logger.pictures=false",
        ]  # fmt: skip
        with (self.folder / f"agent-{len(self.agents)}.txt").open("w") as output:
            environment = clean_environment(**environment)
            agent = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=output, stderr=output)
        self.agents.append(agent)

    def output(self, agent: int) -> str:
        return (self.folder / f"agent-{agent}.txt").read_text(errors="replace")

    def outputs(self) -> str:
        return "\n".join(self.output(number) for number in range(len(self.agents)))

    def processes(self, agent: subprocess.Popen[bytes] | None = None) -> list[int]:
        """The living processes of the trainings, with workers, or the children of ``agent``."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (path / "cmdline").read_bytes()  # a zombie's is empty
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"torch.distributed.run" in arguments or f"data.root={self.folder}".encode() not in arguments:
                continue
            if agent is None or parent == agent.pid:
                found.append(int(path.name))
        return found

    def log(self) -> str:
        logs = list(self.folder.glob("runs/shapes/*/train.log"))
        assert len(logs) <= 1, "a restart made a folder of its own"
        return logs[0].read_text() if logs else ""

    def wait_until_it_trains(self, starts: int) -> None:
        """Wait until the ``starts``-th start has finished an epoch."""

        def it_trains() -> bool:
            assert all(agent.poll() is None for agent in self.agents), self.outputs()
            *before, last = self.log().split("process(es) on")
            return len(before) == starts and re.search(r"^\S+ \S+ +\d+/\d+ ", last, re.MULTILINE) is not None

        until(it_trains, self.outputs)


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    ensure_shapes(tmp_path / "shapes", SHAPES)
    started = Elastic(tmp_path)
    try:
        yield started
    finally:
        for agent in started.agents:
            agent.kill()
            agent.wait()
        for process in started.processes():
            os.kill(process, signal.SIGKILL)


def test_a_killed_worker_is_replaced_and_a_killed_agent_leaves_no_orphans(elastic: Elastic) -> None:
    elastic.start(["--max-restarts=3"])
    elastic.wait_until_it_trains(1)
    os.kill(elastic.processes(elastic.agents[0])[0], signal.SIGKILL)
    elastic.wait_until_it_trains(2)
    assert re.search(r"resumed \S+ after epoch \d+, step [1-9]", elastic.log()), "it began anew"
    errors = MESSAGE.findall(elastic.output(0))
    assert len(errors) == 1 and re.match(r"lost rank [01] \(node 0, \S+\)", errors[0]), errors
    assert not NOISE.search(elastic.output(0))

    (run,) = elastic.folder.glob("runs/shapes/torchrun-*")
    elastic.agents[0].kill()
    until(lambda: not elastic.processes(), lambda: f"left behind: {elastic.processes()}", 40)
    step = load_last(run)[0]["step"]
    assert f"stopped at step {step} by SIGTERM" in elastic.log()


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_two_machines_restart_together_and_both_end_when_the_link_between_them_is_cut(elastic: Elastic) -> None:
    with two_machines() as machines:
        meeting = ["--rdzv-backend=c10d", "--rdzv-id=two", f"--rdzv-endpoint={machines[0].address}:29400"]
        for machine in machines:
            # Both share a host name, by which torchrun would decide who hosts the rendezvous.
            own = [f"--local-addr={machine.address}", f"--rdzv-conf=is_host={int(machine is machines[0])}"]
            elastic.start(
                ["--nnodes=2", "--max-restarts=1", *meeting, *own],
                machine.command(),
                GLOO_SOCKET_IFNAME=INTERFACE,
            )
        elastic.wait_until_it_trains(1)
        os.kill(elastic.processes(elastic.agents[1])[0], signal.SIGKILL)
        elastic.wait_until_it_trains(2)
        assert [folder.name for folder in elastic.folder.glob("runs/shapes/*")] == ["torchrun-two"]
        before = [len(MESSAGE.findall(elastic.output(number))) for number in (0, 1)]
        assert sum(before) == 1, elastic.outputs()

        cut(machines[0])
        at = time.monotonic()
        survivors = elastic.processes()
        until(
            lambda: not set(survivors) & set(elastic.processes()),
            elastic.outputs,
            TIME_OUT,
        )
        print(f"all ended {time.monotonic() - at:.1f} s after the cut")
        for number in (0, 1):
            errors = MESSAGE.findall(elastic.output(number))[before[number] :]
            assert len(errors) == 1 and re.search(r"ranks \d, \d \(node [01], ", errors[0]), errors
            assert not NOISE.search(elastic.output(number))
