"""Processes get GPUs of their own by locks."""

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
from conf.sweeps.gpus import bound_jobs, choose_gpu

SOME = "5,MIG-GPU-8f/1/0"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
HYDRA = OmegaConf.create({"launcher": {"_target_": JOBLIB}})


def chosen(folder: Path, devices: Sequence[str], others: Any) -> list[str]:
    """What a process sees in each of its jobs, or the error; all take their first one at a time."""
    gpus._locked.clear()  # as in a new process
    os.environ["CUDA_VISIBLE_DEVICES"] = SOME
    seen = []
    for each in devices:
        try:
            choose_gpu(OmegaConf.create({"device": each}), HYDRA, folder)
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        except ConfigError as error:
            seen.append(str(error))
        others.wait(60)
    return seen


def test_each_process_keeps_its_gpu_and_takes_only_a_free_one(tmp_path: Path) -> None:
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(3, context) as pool:

        def together(*jobs: list[str]) -> list[list[str]]:
            folder, others = tmp_path / str(jobs), manager.Barrier(len(jobs))
            folder.mkdir()
            running = [pool.submit(chosen, folder, devices, others) for devices in jobs]
            return [future.result(90) for future in running]

        one, other = together(["auto", "auto"], ["cuda", "cuda"])
        assert len(set(one)) == len(set(other)) == 1 and {*one, *other} == set(SOME.split(","))
        assert sorted(together(["auto"], ["cpu"])) == sorted([[SOME.split(",", maxsplit=1)[0]], [SOME]])
        found = sorted(seen for (seen,) in together(["auto"], ["auto"], ["auto"]))
        assert found[0].startswith("2 GPUs are too few for the jobs side by side. fix: hydra.launcher.n_jobs=2")
        assert set(found[1:]) == set(SOME.split(","))


@pytest.mark.parametrize(
    ("given", "config", "jobs"),
    [
        (-1, {"device": "auto"}, 2),
        (-1, {"train": {"device": "cuda"}}, 2),
        (-1, {"device": "cpu"}, -1),
        (-1, {"out": "a program without a device"}, -1),
        (7, {"device": "auto"}, 7),
    ],
)
def test_joblib_starts_as_many_jobs_as_there_are_gpus_for(
    given: int, config: dict[str, object], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SOME)
    whole = OmegaConf.create({**config, "hydra": {"launcher": {"_target_": JOBLIB, "n_jobs": given}}})
    bound_jobs(whole)
    assert whole.hydra.launcher.n_jobs == jobs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    whole.hydra.launcher.n_jobs = given
    bound_jobs(whole)
    assert whole.hydra.launcher.n_jobs == given, "without GPUs"
