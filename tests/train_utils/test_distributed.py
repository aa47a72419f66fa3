"""Groups of real processes under every kind of launcher; worker.py is what they run."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import DistributedError
from conf.cli import launch
from conf.cli.launch import claim_error, is_lost_peer
from tests.runs.process_group import environment_of_one, fork_context, free_port
from tests.train_utils.worker import run_in
from train_utils import distributed
from train_utils.distributed import World, choose_device, init_distributed_mode

SECONDS = 120


def run_together(scenario: str, folder: Path, environments: Sequence[dict[str, str]]) -> dict[int, dict[str, Any]]:
    """Run a worker in each environment and return the reports by rank; killed ones have none.

    Workers are forked from a server that has imported torch, which saves seconds for each.
    """
    workers = [
        fork_context().Process(
            target=run_in, args=(environment_of_one() | {"OMP_NUM_THREADS": "1"} | environment, str(folder), scenario)
        )
        for environment in environments
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(SECONDS)
    finally:
        for worker in workers:
            worker.kill()
    return read_reports(folder)


def read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def check_exchange(reports: dict[int, dict[str, Any]]) -> None:
    size = len(reports)
    for rank, report in reports.items():
        assert report["rank"] == rank and report["device"] == "cpu"
        assert report["main"] == [rank == 0, report["place"][1] == 0]
        began, finished = report["built"]
        assert rank == 0 or began >= finished
        assert report["module"] == pytest.approx([1] * 5 + [0.9 * rank]), "a forward pass exchanges no statistics"
        assert report["sum"] == [size, size * (size - 1) / 2]
        assert report["agreed"] == (["float32", "off"] if size > 1 else ["bfloat16", "default"])
        assert report["text"] == ["", "\u00e9", "x" * 100_000]
    assert [report["gathered"] for report in list(reports.values())[1:]] == [[None] * 3] * (size - 1)
    rows, detections, empty = reports[0]["gathered"]
    assert rows == [[[rank + 0.1] * 2] * rank for rank in range(size)]
    assert detections == [[[rank, number] for number in range(rank)] for rank in range(size)]
    assert empty == [[]] * size
    check_failure({rank: report["failure"] for rank, report in reports.items()})
    assert [report["reports"] for report in reports.values()] == [True] + [False] * (size - 1)


def check_failure(failures: dict[int, list[Any]]) -> None:
    sentence = "data.root=/x is missing. fix: set data.root"
    assert failures.pop(0) == ["ValueError", sentence]
    others = ["DistributedError", f"{sentence} (ValueError on rank 0)"]
    assert list(failures.values()) == [others] * len(failures)


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    report = run_together("exchange", tmp_path, [{}])[0]
    assert (report["launcher"], report["place"]) == ("none", [1, 0, 1, 1])
    check_exchange({0: report})


@pytest.mark.release
def test_three_tasks_of_slurm_on_two_nodes_exchange(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    job["SLURM_STEP_NODELIST"] = "localhost"
    tasks = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local)} for task, local in enumerate((0, 0, 1))]
    reports = run_together("exchange", tmp_path, [job | task for task in tasks])
    assert list(reports) == [0, 1, 2]
    check_exchange(reports)
    assert all(report["launcher"] == "srun" for report in reports.values())
    assert [report["place"] for report in reports.values()] == [[3, local, 2, 2] for local in (0, 0, 1)]
    begun, finished = [report["built"][0] for report in reports.values()], reports[0]["built"][1]
    assert begun[0] < finished <= begun[1] <= begun[2]


@pytest.mark.release
def test_a_killed_builder_ends_all_at_once_with_one_sentence(tmp_path: Path) -> None:
    group = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
    reports = run_together("killed_builder", tmp_path, [group | rank for rank in ranks])
    assert list(reports) == [1, 2]
    for report in reports.values():
        assert report["error"].startswith("lost another rank (") and "resume=" in report["error"]
    # More than one where rank 0, which holds the store here, was the first to end.
    assert any(report["reports"] for report in reports.values())


def test_cuda_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DistributedError, match=r"a CUDA device was asked for.*fix: device=auto"):
        init_distributed_mode("cuda", 10)
    world = init_distributed_mode("auto", 10)
    cpu = torch.device("cpu")
    assert world == World(0, 0, 1, 1, num_nodes=1, device=cpu, launcher="none")
    assert claim_error()


def test_two_groups_that_one_shell_starts_each_say_their_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setenv("RANK", "0")
    claim_error.cache_clear()
    for port, is_first in ((1, True), (1, False), (2, True), (1, True)):
        monkeypatch.setenv("MASTER_PORT", str(port))
        rank = os.fork()
        if rank == 0:
            os._exit(claim_error())
        assert os.waitpid(rank, 0)[1] == is_first * 256
        if port == 2:  # the next group starts after the first one has failed
            monkeypatch.setattr(launch, "STARTED", time.time() + 1)


def test_a_gpu_that_torch_cannot_use_is_no_silent_run_on_the_cpu(tmp_path, monkeypatch) -> None:
    def fails(reason: str) -> Any:
        def init() -> None:
            raise RuntimeError(reason)

        return init

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(distributed, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(torch.cuda, "init", fails("The NVIDIA driver on your system is too old (found version 11020)"))
    with pytest.raises(DistributedError, match=r"too old.*fix: .*device=cpu"):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "init", fails("No CUDA GPUs are available"))  # CUDA_VISIBLE_DEVICES is empty
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        torch.distributed.DistNetworkError("Connection reset by peer"),
    ],
)
def test_what_a_lost_rank_leaves_its_peers(error: Exception) -> None:
    assert is_lost_peer(error) and not is_lost_peer(RuntimeError("size mismatch"))
