"""What a training takes from the run that it resumes, and which run that is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from conf import ConfigError
from conf.cli import launch, run_files
from conf.cli.from_checkpoint import ask_for_plugins, checked_config, index_dir_of, read_config, with_full_names
from conf.compose import NOT_COMPOSED, explain, from_dictionary, plain, to_dictionary
from conf.options import MAY_CHANGE, OF_THE_MACHINE, changed_values, is_covered
from conf.schema import TrainConfig
from data import remote
from data.remote import Place
from models.published import ALIASES


def complete_training(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of train.py; with ``resume`` those of that run.

    Paths become absolute, so that the saved options hold in another working folder.
    """
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    options = with_full_names(options, once=launch.job_folder_name() is None and not in_sweep)
    places: dict[str, dict[str, str]] = {"data": {}, "model": {}}
    for section, key in (("data", "root"), ("data", "index_dir"), ("model", "cfg"), ("model", "weights")):
        place = options.get(section, {}).get(key)
        is_name = {"weights": place in ALIASES, "cfg": not {"/", "."} & set(place or "")}.get(key, False)
        if place is not None and not is_name:
            places[section][key] = str(Path(place).absolute())
    return continue_run(plain(OmegaConf.merge(options, places)), named)


def continue_run(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``options``, or with ``resume`` those of that run with what the command line names.

    ``resume=auto`` means the folder ``run_dir``, else that of this SLURM job or torchrun run with
    these options, else the newest run of this name; a run in ``run_mirror`` wins over one that is
    not mirrored there. Without any, a new run starts. Raises ConfigError if the folder is not a
    run, or if a run with a checkpoint would change options outside MAY_CHANGE, and FetchError.
    """
    options = _with_restarts(options, named)
    places = {key: options.get(key) for key in ("resume", "run_mirror")}
    options = options | {key: at.rstrip("/") for key, at in places.items() if at is not None and remote.is_remote(at)}
    if options.get("resume") == "auto":

        def is_same(folder: Path) -> bool:
            changed = changed_values(read_config(folder), plain(OmegaConf.create(options)))
            return all(is_covered(key, OF_THE_MACHINE) for key in changed)

        run, mirror = run_files.find_run(options["name"], options["run_dir"], is_same), options.get("run_mirror")
        is_here = run is not None and read_config(run).get("run_mirror") == mirror
        if mirror is not None and not is_here and run_files.is_mirrored(mirror):
            options = options | {"resume": mirror}
        elif run is None:
            return options | {"resume": None}
        else:
            options = options | {"resume": str(run), "run_dir": None}
        named = [key for key in named if key not in ("resume", "run_dir")]
    if remote.is_remote(options.get("resume") or ""):
        return _continue_mirrored(options, named)
    if options.get("resume") is None or "run_dir" in named:
        return options  # the schema refuses resume with run_dir
    folder = given = Path(options["resume"])
    if given.parts[-2:] == (run_files.CHECKPOINTS, "last.pt"):
        folder = given.parents[1]
    if given.is_file() and (folder == given or not (folder / "config.yaml").exists()):
        fix = f"fix: the folder of a run, copied as a whole, or a new run with model.weights={given}"
        raise ConfigError(f"resume={given}: a checkpoint without its run folder cannot be resumed. {fix}")
    return _with_changes(read_config(folder), options, named, folder, run_files.has_checkpoint(folder))


def _continue_mirrored(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``continue_run`` of an address: in ``run_dir`` or a new folder, and mirrored there again."""
    address = options["resume"]
    remote.check_bucket(address, "resume")
    before = read_config(address)
    name = str(before.get("name"))
    if not Path("runs", name).resolve().is_relative_to(Path("runs").resolve()):
        raise ConfigError(f"{address}/config.yaml: its name={name} leaves runs/. fix: another run")
    mirror = options["run_mirror"] if "run_mirror" in named else address
    now = _with_changes(before, options, named, address, True)
    return now | {"run_dir": options["run_dir"], "run_mirror": mirror}


def _with_changes(
    before: dict[str, Any], options: dict[str, Any], named: Sequence[str], folder: Place, has_checkpoint: bool
) -> dict[str, Any]:
    """The options ``before`` of a run, with those that the command line names."""
    ask_for_plugins(before, f"resume={folder}", named)
    now, wanted = OmegaConf.create(before), OmegaConf.create(options)
    for key in options if "experiment" in named else named:  # an experiment sets options of all sections
        # A group replaces its section, since another choice may have other keys.
        OmegaConf.update(now, key, OmegaConf.select(wanted, key), merge=False, force_add=True)
    now.run_dir, now.resume, now.data.index_dir = None, str(folder), index_dir_of(options)
    now.run_mirror = options["run_mirror"] if "run_mirror" in named else before.get("run_mirror")
    changed = changed_values(before, plain(now)) if has_checkpoint else {}
    if refused := [f"{key}: {change}" for key, change in changed.items() if not is_covered(key, MAY_CHANGE)]:
        fix = f"fix: leave these options as they were, or start a new run with model.weights={folder}"
        raise ConfigError(f"resume={folder}: the training would change ({'; '.join(refused)}). {fix}")
    return plain(now)


def resumed_options(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """The options of a checkpoint, without ``auto``, with those of ``config`` that may change."""
    source = f"the checkpoint of {config.resume}"
    options, now = OmegaConf.create(checked_config(saved["config"], source)), OmegaConf.create(to_dictionary(config))
    try:
        for key in MAY_CHANGE:
            OmegaConf.update(options, key, OmegaConf.select(now, key), merge=False)
        return from_dictionary(plain(options), TrainConfig)
    except (ValueError, *NOT_COMPOSED) as error:
        raise ConfigError(f"{source} is damaged: {explain(error, TrainConfig)}. fix: use another one") from error


def _with_restarts(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Add ``resume=auto`` if SLURM requeued the job or torchrun may restart the run.

    What the user says about ``resume`` wins. Torchrun's count of restarts is useless here: it may
    still be 0 on nodes that did not fail. The run's id names its folder, so no other run can be
    resumed. Raises ConfigError if torchrun has no id.
    """
    restarts = launch.allowed_restarts()
    if "resume" in named or options.get("resume") is not None or (restarts == 0 and launch.requeues() == 0):
        return options
    if options.get("run_dir") is None and launch.job_folder_name() is None:
        fix = "fix: torchrun --rdzv-id=<a name for this run>, run_dir=<folder>, or --max-restarts=0"
        raise ConfigError(f"torchrun may restart this training {restarts} times and not find its folder again. {fix}")
    return options | {"resume": "auto"}
