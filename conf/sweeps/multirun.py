"""The jobs of a multirun (`-m`): a folder for each, a line as each starts, a table at the end.

A launcher may run jobs in other processes or on other machines. So each job writes its result to
its own file in the folder of the multirun, where the process that started the jobs finds it.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.entry import keys_of
from conf.failures import ConfigError
from conf.sweeps.gpus import bound_jobs, choose_gpu
from train_utils.launch.environment import job_folder_name, read_job
from train_utils.shell import option

OPTIONS, RESULTS = "multirun.yaml", ".jobs"  # in a multirun's folder: Hydra's file, and a file for each job
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
LONGEST_NAME = 100  # characters of a job's folder

_started: list[Path] = []  # the folder of the multirun if this process started one


def register_folders() -> None:
    """Register the resolvers with which YAML files name the folders."""
    OmegaConf.register_new_resolver("multirun_folder", multirun_folder, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


def multirun_folder(base: str, overrides: Sequence[str], named_by: str = "") -> str:
    """The folder of a new multirun below ``base``, or that of the one that SLURM restarted.

    It is ``slurm-<job id>`` in a SLURM job, else ``<date_time>``, plus a number if that exists. If
    the sweep is over the group ``named_by``, ``base`` is called after all of its choices.
    """
    for key, _, value in (override.partition("=") for override in overrides):
        if key == named_by and "," in value and "name" not in keys_of(overrides):
            base = str(Path(base).with_name(_folder_name(value.strip("/."))))
    name, job = job_folder_name() or time.strftime("%Y-%m-%d_%H-%M-%S"), read_job()
    folder, number = Path(base, name), 1
    while folder.exists() and not ((job.restarts or job.run_restarts) and _given(folder) == list(overrides)):
        number += 1
        folder = Path(base, f"{name}-{number}")
    return str(folder)


def job_folder(number: int, setting: str) -> str:
    """The name of a job's folder, such as ``1_optim.lr-0.01_train.seed-2``; jobs count from 1."""
    return _folder_name(f"{number + 1}_{setting}")


def _folder_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII)[:LONGEST_NAME]


def prepare_job(cfg: DictConfig, key: str | None) -> None:
    """Let a job write where Hydra puts it, unless the option ``key`` names another folder.

    Each job that joblib runs side by side gets its own GPU. Raises ConfigError for too few.
    """
    hydra = HydraConfig.get()
    choose_gpu(cfg, hydra, Path(hydra.sweep.dir, RESULTS))
    if key is not None and cfg[key] is None and cfg.get("resume") in (None, "auto"):
        cfg[key] = hydra.runtime.output_dir


def refuse_folders(arguments: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for options that name a folder where the program would not write.

    ``folder`` is the option that does name the program's folder, if there is one.
    """
    multirun = {"-m", "--multirun"} & set(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "hydra.run.dir":
            fix = option(folder, value) if folder else "leave it out"
            raise ConfigError(f"hydra.run.dir={value} moves nothing, as Hydra writes no files here. fix: {fix}")
        if key == folder and multirun and "," not in value and "(" not in value and value != "null":
            raise ConfigError(
                f"{argument} is one folder, and each job of a multirun (-m) needs its own. "
                f"fix: {option('hydra.sweep.dir', value)}, below which each job makes one"
            )


class Multirun(Callback):
    """Hydra's callback for a multirun; launchers pickle it, with its state, for each job."""

    jobs: int | None = None  # the total, if it is known beforehand

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Before any job, in the starting process only."""
        _started.append(Path(config.hydra.sweep.dir).absolute())
        bound_jobs(config)
        for old in (_started[-1] / RESULTS).glob("*.json"):  # of a multirun that goes on here
            old.unlink()
        for name in SIGNALS:  # a training that is stopped saves its checkpoint and calls these
            if signal.getsignal(known := signal.Signals[name]) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(known, _end_all)
        hydra = config.hydra
        given = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(
            [*(f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()), *hydra.overrides.task]
        )
        fixed = ",".join(override.key_or_group for override in given if not override.is_sweep_override())
        hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]")
        if hydra.sweeper._target_.endswith(".BasicSweeper"):
            sweeps = (override for override in given if override.is_sweep_override())
            self.jobs = math.prod(len(list(sweep.sweep_iterator())) for sweep in sweeps)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """In the process of a job: print what starts."""
        if config.hydra.mode is RunMode.MULTIRUN:
            row = _save(config, "stopped")  # unless on_job_end knows better
            of = f" of {self.jobs}" if self.jobs else ""
            print(f"job {row['job']}{of}: {row['setting']} -> {row['folder']}", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """In the process of a job: write its result."""
        if config.hydra.mode is RunMode.MULTIRUN:
            result = job_return._return_value
            _save(config, "failed" if isinstance(result, BaseException) else result)


def objective(result: Any) -> Any:
    """What Hydra's sweepers maximise: the AP of a program's figures; else ``result`` itself."""
    return result.get("AP") if isinstance(result, Mapping) else result


def show_results() -> None:
    """Print the table of the multirun that this process started; nothing if it started none."""
    while _started:
        folder = _started.pop()
        from conf.sweeps.table import write_table  # imports rich, which --help and completion do without

        if found := [json.loads(path.read_text(encoding="utf-8")) for path in (folder / RESULTS).glob("*.json")]:
            write_table(folder / "results.csv", sorted(found, key=lambda row: int(row["job"])))


def _end_all(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number))


def _save(config: DictConfig, result: Any) -> dict[str, Any]:
    """Write the row of a job in the table to a file, and return it."""
    hydra = config.hydra
    task, fixed = hydra.overrides.task, hydra.job.config.override_dirname.exclude_keys
    row = {
        "job": hydra.job.num + 1,
        "setting": " ".join(word for word, key in zip(task, keys_of(task), strict=True) if key not in fixed),
        "AP": result,
        "folder": os.path.relpath(config.get("run_dir") or config.get("out") or hydra.runtime.output_dir),
    }
    folder = Path(hydra.sweep.dir, RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row['job']}.json").write_text(json.dumps(row, default=str), encoding="utf-8")
    return row


def _given(folder: Path) -> list[str]:
    """The options of the multirun in ``folder`` as they were typed; [] if Hydra left no record."""
    try:
        saved = yaml.safe_load((folder / OPTIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # of a sweeper other than Hydra's basic one
        return []
    return list(saved["hydra"]["overrides"]["task"])
