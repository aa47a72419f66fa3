"""Launchers' variables, given as dictionaries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from train_utils.errors import DistributedError
from train_utils.launch import (
    Launch,
    allowed_restarts,
    first_host,
    job_folder_name,
    prefer_expandable_segments,
    read_launch,
    requeue_file,
    slurm_job_name,
    strip_local_rank,
    tasks_on_node,
)

ALONE = Launch("none", rank=0, world_size=1, local_rank=0, local_world_size=1, address="", port=0)
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
# Recorded in an `srun` task of a job on 2 nodes, SLURM 22.05.
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-10,12],cpu1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1,4(x2)",
    "ENVIRONMENT": "BATCH",
}
# The shell of an sbatch script with --ntasks=3 has SLURM_PROCID but no step variables.
SBATCH_SHELL = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "ENVIRONMENT")} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def test_nothing_launched() -> None:
    assert read_launch({}) == ALONE and slurm_job_name({}) is None


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert (launch.launcher, launch.address, launch.port) == ("torchrun", "node1", 1234)


def test_torchrun_inside_srun_wins() -> None:
    assert read_launch(SRUN | TORCHRUN) == read_launch(TORCHRUN)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(DistributedError, match=rf"{name} is missing .*fix: "):
        read_launch({key: value for key, value in TORCHRUN.items() if key != name})
    with pytest.raises(DistributedError, match=rf"{name} is 'x', not a number.*fix: "):
        read_launch(TORCHRUN | {name: "x"})


def test_srun_reads_the_step_not_the_job() -> None:
    launch = read_launch(SRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("srun", 2, 3)
    assert (launch.local_rank, launch.local_world_size) == (0, 1)
    assert (launch.address, launch.port) == ("gpu08", 20000 + 123456 % 10000)


def test_srun_given_address_and_port_win() -> None:
    launch = read_launch(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"})
    assert (launch.address, launch.port) == ("10.0.0.1", 99)


def test_srun_steps_side_by_side_meet_at_different_ports() -> None:
    neighbours = [
        SRUN | {"SLURM_JOB_ID": str(1000 + job), "SLURM_STEP_ID": str(s)} for job in range(9) for s in range(9)
    ]
    ports = {read_launch(environment).port for environment in neighbours}
    assert len(ports) == len(neighbours)
    assert all(20000 <= port < 30000 for port in ports)


def test_srun_with_a_world_size_exported_by_the_script() -> None:
    assert read_launch(SRUN | {"WORLD_SIZE": "3"}).launcher == "srun"


def test_minimal_slurm_variables() -> None:
    names = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NODELIST")
    given = dict(zip(names, ("7", "2", "1", "1", "0", "localhost"), strict=True))
    launch = read_launch(given | {"SLURM_TASKS_PER_NODE": "2"})
    assert (launch.rank, launch.world_size, launch.local_world_size) == (1, 2, 2)
    assert (launch.address, launch.port) == ("localhost", 20007)


@pytest.mark.parametrize(
    "environment",
    [
        SBATCH_SHELL,
        {name: value for name, value in SBATCH_SHELL.items() if name != "SLURM_PROCID"},  # a shell of salloc
    ],
)
def test_a_plain_process_in_a_job_of_many_tasks_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(DistributedError, match=r"was not started by srun.*fix: srun python"):
        read_launch(environment)


def test_a_plain_process_in_a_job_of_one_task_is_alone() -> None:
    one = SBATCH_SHELL | {"SLURM_NTASKS": "1"}
    assert read_launch(one) == ALONE
    assert read_launch({name: value for name, value in one.items() if name != "SLURM_NTASKS"}) == ALONE


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (SRUN | {"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1', not a number"),
        (SRUN | {"SLURM_STEP_NODELIST": "a[1-"}, "node list"),
        ({name: v for name, v in SRUN.items() if "NODELIST" not in name}, "node list"),
    ],
)
def test_incomplete_variables_of_slurm(environment: dict[str, str], named: str) -> None:
    with pytest.raises(DistributedError, match=rf"{named}.*fix: "):
        read_launch(environment)


@pytest.mark.parametrize(
    ("tasks", "expected"), [("2,1", [2, 1]), ("4(x2),1", [4, 4, 1]), ("3", [3]), ("2(x3)", [2] * 3)]
)
def test_tasks_on_each_node(tasks: str, expected: list[int]) -> None:
    assert [tasks_on_node(tasks, node) for node in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a[1-3,7],b", "a1"),
        ("a7,b[1-3]", "a7"),
        ("gpu[008-011]", "gpu008"),
        ("gpu[98-101].cluster", "gpu98.cluster"),
        ("r[1-2]n[01-02],x-y.z", "r1n01"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "a[1-", "a[x-y]", ",b"])
def test_a_node_list_without_a_first_host(nodes: str) -> None:
    with pytest.raises(DistributedError, match=r"node list.*fix: "):
        first_host(nodes)


def test_job_name() -> None:
    assert slurm_job_name({"SLURM_JOB_ID": "9"}) == "9"
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm_job_name(array) == "10_2"


def test_a_run_that_is_started_again_keeps_its_folder() -> None:
    elastic = TORCHRUN | {"TORCHELASTIC_RUN_ID": "a/b 1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert job_folder_name(elastic) == "torchrun-a_b_1"
    assert job_folder_name(elastic | {"TORCHELASTIC_RESTART_COUNT": "2"}) == "torchrun-a_b_1"
    assert job_folder_name(elastic | {"SLURM_JOB_ID": "9"}) == "slurm-9"
    assert job_folder_name(elastic | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None, "it is not started again"
    assert job_folder_name(elastic | {"TORCHELASTIC_RUN_ID": "none"}) is None, "torchrun's word for no id"
    assert (allowed_restarts(elastic), allowed_restarts(TORCHRUN), allowed_restarts({})) == (3, 0, 0)


def test_strip_local_rank() -> None:
    assert strip_local_rank(["a=1", "--local_rank", "3", "b=2"]) == ["a=1", "b=2"]
    assert strip_local_rank(["--local-rank=0", "b=--local_rank"]) == ["b=--local_rank"]
    assert strip_local_rank(["a"]) == ["a"]
    for broken in (["--local_rank"], ["--local-rank=x"]):
        with pytest.raises(DistributedError, match="needs a number"):
            strip_local_rank(broken)


def test_requeue_file_is_there_only_where_the_job_script_names_one() -> None:
    assert requeue_file(SRUN) is None and requeue_file(SRUN | {"REQUEUE_FILE": ""}) is None
    assert requeue_file(SRUN | {"REQUEUE_FILE": "/a b/x"}) == Path("/a b/x")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_segments_grow_unless_the_user_says_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(each, "")  # so that it is restored
        monkeypatch.delenv(each)
    prefer_expandable_segments()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    prefer_expandable_segments()
    assert {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key} == {name: "max_split_size_mb:64"}
