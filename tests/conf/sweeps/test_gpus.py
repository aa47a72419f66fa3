"""GPUs are shared out among processes by locks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf.failures import ConfigError
from conf.sweeps import gpus
from conf.sweeps.gpus import bound_jobs, choose_gpus

EVERYTHING = "5,7,MIG-GPU-8f/1/0,9"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
HYDRA = OmegaConf.create({"launcher": {"_target_": JOBLIB}})


def chosen(folder: Path, devices: Sequence[object], others: Any) -> list[str]:
    """What a process sees in each of its jobs, or the error; all take their first one at a time."""
    gpus._all.clear(), gpus._claimed.clear()  # as in a new process
    os.environ["CUDA_VISIBLE_DEVICES"] = EVERYTHING
    seen = []
    for each in devices:
        config = OmegaConf.create({"device": "cpu"} if each == "cpu" else {"device": "auto", "devices": each})
        try:
            choose_gpus(config, HYDRA, folder)
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        except ConfigError as error:
            seen.append(str(error))
        others.wait(60)
    return seen


def test_each_process_keeps_the_gpus_that_it_has_and_takes_only_free_ones(tmp_path: Path) -> None:
    context = get_context("spawn")
    refused = "4 GPUs are too few for the jobs side by side"
    cases = [  # devices= of the jobs of two processes, and how many GPUs each job sees
        ([None, None], [1, None], [1, 1], [1, 1]),
        ([2, 2], [2, 1], [2, 2], [2, 1]),
        ([1, 3], [1, 1], [1, 3], [1, 1]),
        ([2], [3], refused, None),
        (["auto"], [1], refused, None),
    ]
    left_alone = [([[0, 1]], [[1, 2]]), ([5], ["cpu"])]  # devices=5 is refused where the ranks start
    with context.Manager() as manager, ProcessPoolExecutor(2, context) as pool:

        def together(*both: list[object]) -> list[list[str]]:
            folder, others = tmp_path / str(both), manager.Barrier(2)
            folder.mkdir()
            running = [pool.submit(chosen, folder, devices, others) for devices in both]
            return [future.result(90) for future in running]

        for first, second, *expected in cases:
            seen = together(first, second)
            if expected[0] == refused:
                assert sum(refused in each for (each,) in seen) == 1, seen
                continue
            assert [[len(each.split(",")) for each in jobs] for jobs in seen] == expected, seen
            for one, other in zip(*seen, strict=True):
                assert not set(one.split(",")) & set(other.split(",")), seen
        for first, second in left_alone:
            assert together(first, second) == [[EVERYTHING]] * 2


@pytest.mark.parametrize(
    ("given", "config", "jobs"),
    [
        (-1, {"device": "auto"}, 4),
        (-1, {"train": {"device": "cuda"}, "devices": 2}, 2),
        (-1, {"device": "auto", "devices": 3}, 1),
        (-1, {"device": "auto", "devices": "auto"}, 1),
        (-1, {"device": "cpu"}, -1),
        (-1, {"out": "a program without a device"}, -1),
        (7, {"device": "auto"}, 7),
    ],
)
def test_joblib_starts_as_many_jobs_as_there_are_gpus_for(
    given: int, config: dict[str, object], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EVERYTHING)
    whole = OmegaConf.create({**config, "hydra": {"launcher": {"_target_": JOBLIB, "n_jobs": given}}})
    bound_jobs(whole)
    assert whole.hydra.launcher.n_jobs == jobs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    whole.hydra.launcher.n_jobs = given
    bound_jobs(whole)
    assert whole.hydra.launcher.n_jobs == given, "without GPUs"
