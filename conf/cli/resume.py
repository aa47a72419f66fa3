"""What a training takes from the run that it resumes, and which run that is."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf import ConfigError
from conf.cli import launch, run_files
from conf.compose import NOT_COMPOSED, explain, from_dictionary, plain, to_dictionary
from conf.options import MAY_CHANGE, OF_THE_MACHINE, Options, Words, changed_values, is_covered
from conf.schema import TrainConfig
from data import remote


def continue_run(options: Options, named: Words) -> Options:
    """The options of the run ``resume``, with what the command line names.

    ``resume=auto`` means the folder ``run_dir``, else that of this SLURM job or torchrun run with
    these options, else the newest run of this name; a run in ``run_mirror`` wins over one that is
    older, or not mirrored there. Without any, a new run starts. Raises ConfigError if the folder is
    not a run, or a run with a checkpoint would change options outside MAY_CHANGE, and FetchError.
    """
    if options["resume"] == "auto":
        run, mirror = _find_run(options), options["run_mirror"]
        is_ahead = mirror is not None and run_files.is_mirrored(mirror)
        if is_ahead and run is not None and run_files.read_config(run).get("run_mirror") == mirror:
            is_ahead = run_files.progress_of(run) < run_files.progress_of(mirror)
        if is_ahead:
            options = options | {"resume": mirror}
        elif run is None:
            return options | {"resume": None}
        else:
            options = options | {"resume": str(run), "run_dir": None}
        named = [key for key in named if key not in ("resume", "run_dir")]
    address = options["resume"]
    if remote.is_remote(address):  # continued in run_dir or a new folder, and mirrored there again
        remote.check_bucket(address, "resume")
        now = _with_changes(address, options, named, True)
        name = str(now.get("name"))
        if not Path("runs", name).resolve().is_relative_to(Path("runs").resolve()):
            raise ConfigError(f"{address}/config.yaml: its name={name} leaves runs/", "another run")
        mirror = options["run_mirror"] if "run_mirror" in named else address
        return now | {"run_dir": options["run_dir"], "run_mirror": mirror}
    if "run_dir" in named:
        return options  # the schema refuses resume with run_dir
    folder = given = Path(options["resume"])
    if given.parts[-2:] == (run_files.CHECKPOINTS, "last.pt"):
        folder = given.parents[1]
    if given.is_file() and (folder == given or not (folder / "config.yaml").exists()):
        fix = f"the folder of a run, copied as a whole, or a new run with model.weights={given}"
        raise ConfigError(f"resume={given}: a checkpoint without its run folder cannot be resumed", fix)
    return _with_changes(folder, options, named, run_files.has_checkpoint(folder))


def _find_run(options: Options) -> Path | None:
    """The folder that ``resume=auto`` means; None without any run."""
    if options["run_dir"] is not None:
        folder = Path(options["run_dir"]).resolve()
        return folder if (folder / "config.yaml").is_file() else None
    runs = [path.parent for path in Path("runs", options["name"]).resolve().glob("*/config.yaml")]
    job = launch.job_folder_name()
    if job is None:
        return run_files.newest(runs)
    for run in sorted(runs, key=lambda run: (len(run.name), run.name)):  # the first of this job
        if re.fullmatch(rf"{re.escape(job)}(-\d+)?", run.name):
            changed = changed_values(run_files.read_config(run), options)
            if all(is_covered(key, OF_THE_MACHINE) for key in changed):
                return run
    return None


def _with_changes(folder: remote.Place, options: Options, named: Words, has_checkpoint: bool) -> Options:
    before = run_files.read_config(folder)
    run_files.ask_for_plugins(before, f"resume={folder}", named)
    now, wanted = OmegaConf.create(before), OmegaConf.create(options)
    for key in options if "experiment" in named else named:  # an experiment sets options of all sections
        # A group replaces its section, since another choice may have other keys.
        OmegaConf.update(now, key, OmegaConf.select(wanted, key), merge=False, force_add=True)
    now.run_dir, now.resume = None, str(folder)
    now.data.index_dir = run_files.index_dir_of(options)
    now.run_mirror = options["run_mirror"] if "run_mirror" in named else before.get("run_mirror")
    changed = changed_values(before, plain(now)) if has_checkpoint else {}
    if refused := [f"{key}: {change}" for key, change in changed.items() if not is_covered(key, MAY_CHANGE)]:
        fix = f"leave these options as they were, or start a new run with model.weights={folder}"
        raise ConfigError(f"resume={folder}: the training would change ({'; '.join(refused)})", fix)
    return plain(now)


def resumed_options(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """The options of a checkpoint, without ``auto``, with those of ``config`` that may change."""
    source = f"the checkpoint of {config.resume}"
    options = OmegaConf.create(run_files.checked_config(saved["config"], source))
    now = OmegaConf.create(to_dictionary(config))
    try:
        for key in MAY_CHANGE:
            OmegaConf.update(options, key, OmegaConf.select(now, key), merge=False)
        return from_dictionary(plain(options), TrainConfig)
    except (ValueError, *NOT_COMPOSED) as error:
        raise ConfigError(f"{source} is damaged: {explain(error, TrainConfig).sentence}", "use another one") from error
