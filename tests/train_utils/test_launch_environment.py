"""What launchers say, as dictionaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_utils.errors import DistributedError
from train_utils.launch_environment import (
    ALONE,
    agent_holds_store,
    allowed_restarts,
    describe_launch,
    expand_hostlist,
    expand_tasks_per_node,
    has_agent,
    job_folder_name,
    peek_rank,
    peek_world_size,
    read_launch,
    requeue_file,
    slurm_job_name,
    strip_local_rank,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
# As seen in a task of `srun` in a job of 2 nodes, SLURM 22.05.
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
# The shell of an sbatch script with --ntasks=3: SLURM_PROCID is there, the variables of a step are not.
SBATCH_SHELL = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "ENVIRONMENT")} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def test_nothing_launched() -> None:
    assert read_launch({}) == ALONE
    assert (peek_rank({}), peek_world_size({}), slurm_job_name({})) == (0, 1, None)


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert (launch.launcher, launch.node_rank, launch.address, launch.port) == ("torchrun", 1, "node1", 1234)
    assert (peek_rank(TORCHRUN), peek_world_size(TORCHRUN)) == (5, 8)


def test_torchrun_inside_srun_wins() -> None:
    assert read_launch(SRUN | TORCHRUN) == read_launch(TORCHRUN)
    assert (peek_rank(SRUN | TORCHRUN), peek_world_size(SRUN | TORCHRUN)) == (5, 8)


def test_launch_by_hand_may_leave_out_the_node_where_there_is_one() -> None:
    launch = read_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (launch.local_world_size, launch.node_rank, launch.address) == (2, 0, "localhost")
    with pytest.raises(DistributedError, match="LOCAL_WORLD_SIZE is missing"):
        read_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    second_node = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch(second_node).node_rank == 1


def test_srun_reads_the_step_not_the_job() -> None:
    launch = read_launch(SRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("srun", 2, 3)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank) == (0, 1, 1)
    assert (launch.address, launch.port) == ("gpu08", 20000 + 123456 % 10000)
    assert (peek_rank(SRUN), peek_world_size(SRUN)) == (2, 3)


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
    launch = read_launch(dict(zip(names, ("7", "2", "1", "1", "0", "localhost"), strict=True)))
    assert (launch.rank, launch.world_size, launch.local_world_size) == (1, 2, 2)
    assert (launch.address, launch.port) == ("localhost", 20007)


@pytest.mark.parametrize(
    "environment",
    [
        SBATCH_SHELL,
        {name: value for name, value in SBATCH_SHELL.items() if name != "SLURM_PROCID"},  # a shell of salloc
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
    ],
)
def test_a_plain_process_in_a_job_of_many_tasks_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(DistributedError, match=r"was not started by srun.*fix: srun python"):
        read_launch(environment)


def test_a_plain_process_in_a_job_of_one_task_is_alone() -> None:
    one = SBATCH_SHELL | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert read_launch(one) == ALONE
    assert read_launch({name: value for name, value in one.items() if name != "SLURM_NTASKS"}) == ALONE


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        (TORCHRUN | {"RANK": "five"}, "RANK is 'five', not a number"),
        (TORCHRUN | {"RANK": "8"}, "contradict"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "contradict"),
        (SRUN | {"SLURM_PROCID": "3"}, "contradict"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2*3"}, "tasks per node"),
        (SRUN | {"SLURM_STEP_NODELIST": "a[1-"}, "node list"),
        ({name: v for name, v in SRUN.items() if "NODELIST" not in name}, "SLURM_STEP_NODELIST"),
    ],
)
def test_incomplete_or_contradicting_variables(environment: dict[str, str], named: str) -> None:
    with pytest.raises(DistributedError, match=rf"{named}.*fix: "):
        read_launch(environment)


def test_peeking_never_fails() -> None:
    assert peek_rank({"RANK": "x"}) == 0
    assert peek_world_size({"WORLD_SIZE": "x"}) == 1
    assert peek_rank({"SLURM_PROCID": "-1", "SLURM_LOCALID": "0"}) == 0


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a[1-3,7],b", ["a1", "a2", "a3", "a7", "b"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("gpu[98-101].cluster", ["gpu98.cluster", "gpu99.cluster", "gpu100.cluster", "gpu101.cluster"]),
        ("r[1-2]n[01-02],x-y.z", ["r1n01", "r1n02", "r2n01", "r2n02", "x-y.z"]),
    ],
)
def test_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]


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
    assert agent_holds_store({"TORCHELASTIC_USE_AGENT_STORE": "True"}) and not agent_holds_store({})
    assert has_agent(elastic) and not has_agent(TORCHRUN), "variables set by hand"


def test_strip_local_rank() -> None:
    assert strip_local_rank(["a=1", "--local_rank", "3", "b=2"]) == (["a=1", "b=2"], 3)
    assert strip_local_rank(["--local-rank=0", "b=--local_rank"]) == (["b=--local_rank"], 0)
    assert strip_local_rank(["a"]) == (["a"], None)
    for broken in (["--local_rank"], ["--local-rank=x"]):
        with pytest.raises(DistributedError, match="needs a number"):
            strip_local_rank(broken)


def test_requeue_file_is_there_only_where_the_job_script_names_one() -> None:
    assert requeue_file(SRUN) is None and requeue_file(SRUN | {"REQUEUE_FILE": ""}) is None
    assert requeue_file(SRUN | {"REQUEUE_FILE": "/a b/x"}) == Path("/a b/x")


def test_launch_in_words_names_the_node_as_slurm_does() -> None:
    """Nodes of a simulated cluster share one host name."""
    assert describe_launch(ALONE, {}, "host") == "rank 0 of 1: local rank 0, node host"
    environment = SRUN | {"SLURMD_NODENAME": "gpu09"}
    assert describe_launch(read_launch(environment), environment, "host") == (
        "rank 2 of 3: local rank 0, node gpu09, meets at gpu08:23456 (srun)"
    )
