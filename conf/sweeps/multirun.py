"""The jobs of a multirun (`-m`): a folder for each, a line as each starts, a table at the end.

A launcher may run jobs in other processes or on other machines, so each leaves its result in a file
of its own in the folder of the multirun, where the process that started them finds it.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.failures import ConfigError
from conf.sweeps.table import write_table
from train_utils.launch.environment import job_folder_name, read_job
from train_utils.shell import option

OPTIONS, RESULTS = "multirun.yaml", ".jobs"  # in a multirun's folder: Hydra's file, and a file for each job
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
LONGEST_NAME = 100  # characters of a job's folder


def register_folders() -> None:
    """Register the resolvers by which conf/train.yaml names the folders."""
    OmegaConf.register_new_resolver("multirun_folder", multirun_folder, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


def multirun_folder(base: str, overrides: Sequence[str]) -> str:
    """The folder of a new multirun below ``base``, or that of the one that SLURM restarted.

    It is ``slurm-<job id>`` in a SLURM job, else ``<date_time>``, with a number if that exists.
    """
    name, job = job_folder_name() or time.strftime("%Y-%m-%d_%H-%M-%S"), read_job()
    folder, number = Path(base, name), 1
    while folder.exists() and not ((job.restarts or job.run_restarts) and _given(folder) == list(overrides)):
        number += 1
        folder = Path(base, f"{name}-{number}")
    return str(folder)


def job_folder(number: int, overrides: Sequence[str], folder: str) -> str:
    """The name of a job's folder, such as ``3_lr-0.01_seed-2``: its number and what was swept."""
    pairs = [override.partition("=") for override in setting(overrides, Path(folder))]
    words = "_".join([str(number), *(f"{key.rpartition('.')[2]}-{value}" for key, _, value in pairs)])
    return re.sub(r"[^\w.+-]+", "-", words, flags=re.ASCII)[:LONGEST_NAME]


def setting(overrides: Sequence[str], folder: Path) -> list[str]:
    """Those options of a job that are not the same in every job of the multirun in ``folder``."""
    given = OverridesParser.create().parse_overrides(_given(folder))
    fixed = {override.get_key_element() for override in given if not override.is_sweep_override()}
    return [override for override in overrides if override.partition("=")[0] not in fixed]


def take_folder(cfg: DictConfig) -> None:
    """Let the run of a job be in the folder that Hydra gives the job; an own ``run_dir`` wins."""
    if "run_dir" in cfg and cfg.run_dir is None and cfg.resume in (None, "auto"):
        cfg.run_dir = HydraConfig.get().runtime.output_dir


def objective(result: Any) -> Any:
    """What Hydra's sweepers maximise: the AP of a program's figures; else ``result`` itself."""
    return result.get("AP") if isinstance(result, Mapping) else result


def refuse_folders(arguments: Sequence[str], schema: type) -> None:
    """Raise ConfigError for options that name a folder where this program would not write."""
    keys = [key for key in ("run_dir", "out") if key in schema.__annotations__]
    multirun = {"-m", "--multirun"} & set(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "hydra.run.dir":
            fix = f"fix: {option(keys[0], value)}" if keys else "fix: leave it out"
            raise ConfigError(f"hydra.run.dir={value} moves nothing, as Hydra writes no files here. {fix}")
        if key == "run_dir" and multirun and "," not in value and "(" not in value and value != "null":
            raise ConfigError(
                f"run_dir={value} is one folder, and each job of a multirun (-m) needs its own. "
                f"fix: {option('hydra.sweep.dir', value)}, below which each job makes one"
            )


class Multirun(Callback):
    """What Hydra calls in a multirun: in the starting process, and in that of each job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Before any job, in the starting process only."""
        folder = Path(config.hydra.sweep.dir).absolute()
        for old in (folder / RESULTS).glob("*.json"):  # of a multirun that goes on here
            old.unlink()
        here.folder = folder
        for number in SIGNALS:
            known = getattr(signal, number, None)
            if known is not None and signal.getsignal(known) in (signal.SIG_DFL, signal.default_int_handler):
                here.handlers[known] = signal.signal(known, _end_all)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """In the process of a job: tell what starts."""
        if config.hydra.mode is RunMode.MULTIRUN:
            row = _row(config)
            place = f" -> {row['folder']}" if row["folder"] else ""
            print(f"job {row['job']}: {row['setting']}{place}", flush=True)
            _save(config, row | {"result": "stopped"})  # unless on_job_end knows better

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """In the process of a job: leave its result."""
        if config.hydra.mode is RunMode.MULTIRUN:
            result = job_return._return_value
            failed = isinstance(result, BaseException)
            _save(config, _row(config) | {"result": "failed" if failed else result})


class StartedHere:
    """The multirun that this process started, if any."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.handlers: dict[signal.Signals, Any] = {}

    def close(self, stopped: bool) -> None:
        """Show the table of the jobs and give the signals back; nothing without a multirun."""
        folder, self.folder = self.folder, None
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers.clear()
        if folder is None or not (folder / RESULTS).is_dir():
            return
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / RESULTS).glob("*.json")]
        write_table(folder / "results.csv", sorted(rows, key=lambda row: int(row["job"])))
        if stopped:
            words = f"{option('hydra.sweep.dir', folder)} resume=auto"
            print(f"the same command with {words} goes on from here", flush=True)


here = StartedHere()


def _end_all(number: int, _: FrameType | None) -> None:
    """End the multirun: a training has saved its checkpoint and passes the signal on."""
    raise KeyboardInterrupt(signal.Signals(number))


def _row(config: DictConfig) -> dict[str, Any]:
    hydra = config.hydra
    run_dir = config.get("run_dir", "") or hydra.runtime.output_dir if "run_dir" in config else ""
    words = " ".join(setting(hydra.overrides.task, Path(hydra.sweep.dir)))
    return {"job": hydra.job.num, "setting": words, "folder": run_dir}


def _save(config: DictConfig, row: Mapping[str, Any]) -> None:
    folder = Path(config.hydra.sweep.dir, RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row['job']}.json").write_text(json.dumps(row, default=str), encoding="utf-8")


def _given(folder: Path) -> list[str]:
    """The options of the multirun in ``folder`` as they were typed; [] if Hydra left no record."""
    try:
        saved = yaml.safe_load((folder / OPTIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # of a sweeper other than Hydra's basic one
        return []
    return list(saved["hydra"]["overrides"]["task"])
