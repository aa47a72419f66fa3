"""Launchers' variables, given as dictionaries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf import ConfigError, DistributedError
from conf.cli.launch import (
    Launch,
    allowed_restarts,
    check_credentials,
    job_folder_name,
    keep_compiled,
    leave_out_current_folder,
    read_launch,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
RESTARTED = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}
RANK_5 = Launch("torchrun", 5, 8, 1, "env://", store=("node1", 1234))
# Recorded in an `srun` task of a job on 2 nodes, SLURM 22.05.
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-10,12],cpu1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
# The shell of an sbatch script has SLURM_PROCID but no step, that of salloc has neither.
SALLOC = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST")}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("none", 0, 1, 0, "env://")),
        (TORCHRUN, RANK_5),
        (SRUN | TORCHRUN, RANK_5),
        (TORCHRUN | {"RANK": "0"}, RANK_5._replace(rank=0, store=None)),  # by hand
        (TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, RANK_5._replace(rank=0)),
        (RESTARTED | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, RANK_5._replace(attempt=2)),
        (RESTARTED, RANK_5),  # the ranks of another node may count another number
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"},  # one process a pod
            Launch("torchrun", 1, 2, 0, "env://", store=("a", 9)),
        ),
        (SRUN, Launch("srun", 2, 3, 0, "tcp://gpu08:23456", store=("gpu08", 23456))),
        (SRUN | {"SLURM_PROCID": "0"}, read_launch(SRUN)._replace(rank=0, store=None)),
        (SRUN | {"WORLD_SIZE": "3"}, read_launch(SRUN)),
        (
            SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"},
            read_launch(SRUN)._replace(url="tcp://10.0.0.1:99", store=("10.0.0.1", 99)),
        ),
        (SBATCH | {"SLURM_NTASKS": "1"}, Launch("none")),
        ({"SLURM_JOB_ID": "7"}, Launch("none")),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": ""}, Launch("none")),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], launch: Launch) -> None:
    assert read_launch(environment) == launch


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK")}, "WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "'x'"),
        ({name: value for name, value in SRUN.items() if "NODELIST" not in name}, "SLURM_STEP_NODELIST"),
        (SBATCH, "was not started by srun"),
        (SALLOC, "was not started by srun"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": ""}, "not numbers"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4"),
    ],
)
def test_a_process_that_cannot_find_its_place(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(DistributedError, match=rf"{problem}.*fix: "):
        read_launch(environment)


def test_variables_of_a_bucket_are_sent_or_refused_by_name() -> None:
    paths = {"AWS_CONFIG_FILE": "/home/ü/config", "HOME": "/home/ü"}
    environment = {"AWS_SECRET_ACCESS_KEY": "secret\n", "AWS_ENDPOINT_URL": "http://a:1 ", **paths}
    check_credentials(environment)
    assert environment == {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "http://a:1", **paths}
    for name, value in (("AWS_ENDPOINT_URL", "a:1"), ("AWS_SESSION_TOKEN", "Ä"), ("AZURE_STORAGE_ACCOUNT_KEY", "a\nb")):
        with pytest.raises(ConfigError, match=f"{name} holds .* fix: ") as caught:
            check_credentials({name: value})
        assert value not in str(caught.value)


def test_a_folder_for_compiled_code_that_is_there_stays(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("os.environ", dict(os.environ))
    for folder in ("a", "b"):
        keep_compiled(tmp_path / folder)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "a")


def test_python_processes_below_import_the_project_and_nothing_of_the_current_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "shlex.py").write_text("raise SystemExit('it was imported')")
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")
    leave_out_current_folder()
    subprocess.run([sys.executable, "-c", "import conf, shlex"], cwd=tmp_path, check=True)


def test_srun_steps_side_by_side_meet_at_different_ports() -> None:
    numbers = [(str(1000 + job), str(step)) for job in range(9) for step in range(9)]
    urls = {read_launch(SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).url for job, step in numbers}
    assert len(urls) == len(numbers)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node1", "node1"), ("a7,b[1-3]", "a7"), ("gpu[98-101].cluster", "gpu98.cluster"), ("r[1-2]n[01-02],x", "r1n01")],
)
def test_ranks_meet_at_the_first_host_of_the_node_list(nodes: str, host: str) -> None:
    assert read_launch(SRUN | {"SLURM_STEP_NODELIST": nodes}).url.startswith(f"tcp://{host}:")


def test_a_run_that_is_started_again_keeps_its_folder() -> None:
    elastic = TORCHRUN | {"TORCHELASTIC_RUN_ID": "a/b 1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert job_folder_name(elastic) == "torchrun-a_b_1"
    assert job_folder_name(elastic | {"TORCHELASTIC_RESTART_COUNT": "2"}) == "torchrun-a_b_1"
    assert job_folder_name(elastic | {"SLURM_JOB_ID": "9"}) == "slurm-9"
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_folder_name(array) == "slurm-10_2"
    assert job_folder_name(elastic | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None, "it is not started again"
    assert job_folder_name(elastic | {"TORCHELASTIC_RUN_ID": "none"}) is None, "torchrun's word for no id"
    assert (allowed_restarts(elastic), allowed_restarts(TORCHRUN), allowed_restarts({})) == (3, 0, 0)
