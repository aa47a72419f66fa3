"""The options of a resumed run: which run it is, and what may be changed in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf import ConfigError
from conf.checkpoints import ask_for_plugins
from conf.entry import from_dictionary, layered, plain, to_dictionary
from conf.file_choices import check_values
from conf.schema import TrainConfig
from data.errors import DataError
from data.set_files import load_yaml
from models.published import BACKBONE, COCO
from train_utils.files import has_checkpoint
from train_utils.launch import allowed_restarts, job_folder_name, requeues
from train_utils.options import MAY_CHANGE, OF_THE_MACHINE, changed_values, is_covered


def complete_training(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of train.py: with ``resume`` those of that run.

    Folders and files become absolute, so that the saved options hold in another working folder.
    """
    places: dict[str, dict[str, str]] = {"data": {}, "model": {}}
    for section, key in (("data", "root"), ("data", "index_dir"), ("model", "cfg"), ("model", "weights")):
        place = options.get(section, {}).get(key)
        is_name = {"weights": place in (COCO, BACKBONE), "cfg": not {"/", "."} & set(place or "")}.get(key, False)
        if place is not None and not is_name:
            places[section][key] = str(Path(place).absolute())
    return continue_run(layered(options, places), named)


def continue_run(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``options``, or with ``resume`` those of that run, except what the command line names.

    ``resume=auto`` means the folder ``run_dir``, or that of this SLURM job or torchrun run with
    these options, or the newest run of this name. If there is none, a new run starts. Raises
    ConfigError if the folder holds no run, or one with a checkpoint would change options that are
    not of MAY_CHANGE.
    """
    options = _with_restarts(options, named)
    if options.get("resume") == "auto":
        from train_utils.run_folder import find_run  # imports torch

        def is_same(folder: Path) -> bool:
            changed = changed_values(read_config(folder), plain(OmegaConf.create(options)))
            return all(is_covered(key, OF_THE_MACHINE) for key in changed)

        run = find_run(options["name"], options["run_dir"], is_same)
        if run is None:
            return options | {"resume": None}
        options = options | {"resume": str(run), "run_dir": None}
        named = [key for key in named if key not in ("resume", "run_dir")]
    if options.get("resume") is None or "run_dir" in named:
        return options  # the schema refuses resume with run_dir
    folder = Path(options["resume"])
    before = read_config(folder)
    ask_for_plugins(before, f"resume={folder}", named)
    now, wanted = OmegaConf.create(before), OmegaConf.create(options)
    # An experiment sets options of all sections.
    for key in options if "experiment" in named else named:
        # A group replaces its section: another choice may have other keys.
        OmegaConf.update(now, key, OmegaConf.select(wanted, key), merge=False, force_add=True)
    now.run_dir, now.resume = None, options["resume"]
    changed = changed_values(before, plain(now)) if has_checkpoint(folder) else {}
    if refused := [f"{key}: {change}" for key, change in changed.items() if not is_covered(key, MAY_CHANGE)]:
        raise ConfigError(
            f"resume={folder}: the training would change ({'; '.join(refused)}). fix: leave these options as they "
            f"were, or start a new run with model.weights={folder}"
        )
    return plain(now)


def resumed_options(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """The options of a checkpoint, without ``auto``, with those of ``config`` that may change."""
    check_values(saved["config"], f"the checkpoint of {config.resume}")
    options, now = OmegaConf.create(saved["config"]), OmegaConf.create(to_dictionary(config))
    for key in MAY_CHANGE:
        OmegaConf.update(options, key, OmegaConf.select(now, key), merge=False)
    return from_dictionary(plain(options), TrainConfig)


def read_config(folder: Path) -> dict[str, Any]:
    """The options in a run folder's config.yaml. Raises ConfigError if there are none."""
    path = folder / "config.yaml"
    try:
        saved = load_yaml(path)
    except (DataError, OSError) as error:
        problem = str(error).partition(". fix: ")[0]
        raise ConfigError(f"resume={folder}: {problem}. fix: the folder of a run with its config.yaml") from error
    if "train" not in saved:
        raise ConfigError(f"{path} is cut. fix: a copy of it, or a new run")
    check_values(saved, str(path))
    return saved


def _with_restarts(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Add ``resume=auto`` if SLURM requeued the job or torchrun may restart the run.

    What the user says about ``resume`` wins. Torchrun's count of restarts is not used: on nodes
    without the failure it may still be 0. The run's id names its folder, so no other run can be
    resumed. Raises ConfigError if torchrun has no id.
    """
    restarts = allowed_restarts()
    if "resume" in named or options.get("resume") is not None or (restarts == 0 and requeues() == 0):
        return options
    if options.get("run_dir") is None and job_folder_name() is None:
        raise ConfigError(
            f"torchrun may restart this training {restarts} times and would not find its folder again. "
            "fix: torchrun --rdzv-id=<a name for this run>, run_dir=<folder>, or --max-restarts=0"
        )
    return options | {"resume": "auto"}
