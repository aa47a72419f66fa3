"""The options of a resumed run: which run it is, and what the command line changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.entry import layered, plain
from conf.failures import ConfigError
from conf.file_choices import check_values
from conf.schema import CHOICES
from conf.sources.checkpoints import ask_for_plugins, config_of_checkpoint
from data.errors import DataError
from data.formats.set_files import load_yaml
from models.weights.published import BACKBONE, COCO
from train_utils.launch.environment import allowed_restarts, job_folder_name, read_job
from train_utils.run.checkpoint_files import FOLDER
from train_utils.run.same_training import changed_values, is_covered, with_earlier

# Options that may differ when a job is requeued, for example to another node.
OF_THE_MACHINE = (
    "debug", "devices", "data.root", "data.index_dir", "data.workers", "data.cache", "logger",
    "train.device", "train.timeout_seconds",
)  # fmt: skip
# Options that only earlier versions had: a checkpoint with them is of another training.
REMOVED = {"optim": ("ema_ramp_steps", "ema_max_fraction"), "loss": ("pooled",)}


def complete_training(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of train.py: with ``resume`` those of that run.

    Folders and files become absolute, so that the saved options hold in another working folder.
    """
    whole = continue_run(given, named)
    places: dict[str, dict[str, str]] = {"data": {}, "model": {}}
    for section, key in (("data", "root"), ("data", "index_dir"), ("model", "cfg"), ("model", "weights")):
        place = whole.get(section, {}).get(key)
        known = {"weights": place in (COCO, BACKBONE), "cfg": not {"/", "."} & set(place or "")}  # names, no files
        if place is not None and not known.get(key):
            places[section][key] = str(Path(place).absolute())
    return layered(whole, places)


def continue_run(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """With ``resume`` the options of that run, except what the command line names; else ``given``.

    ``resume=auto`` means the folder ``run_dir``, or that of this SLURM job or torchrun run with
    these options, or the newest run of this name. If there is none, a new run starts. Raises
    ConfigError if the folder holds no run.
    """
    if given.get("extend") is not None and (given.get("resume") == "auto" or "train.epochs" in named):
        raise ConfigError(
            f"extend={given['extend']} adds epochs to the finished run that resume names. fix: resume=<its folder> "
            "without train.epochs, and not resume=auto"
        )
    given = _with_restarts(given, named)
    if given.get("resume") == "auto":
        from train_utils.run.run_folder import find_run  # imports torch

        found = find_run(given["name"], given["run_dir"], lambda folder: _has_options(folder, given))
        given = given | {"resume": str(found) if found else None, "run_dir": None if found else given["run_dir"]}
        named = [key for key in named if key not in ("resume", "run_dir")]
        if found is None:
            return given
    if given.get("resume") is None or "experiment" in named or "run_dir" in named:
        return given  # the schema refuses resume with run_dir
    options = with_missing(read_config(Path(given["resume"])), given)
    ask_for_plugins(options, f"resume={given['resume']}", named)
    saved = OmegaConf.create(options)
    for key in named:
        # A group replaces its section: another choice may have other keys.
        OmegaConf.update(saved, key, OmegaConf.select(OmegaConf.create(given), key), merge=False, force_add=True)
    saved.run_dir, saved.resume = None, given["resume"]
    return plain(saved)


def with_missing(saved: dict[str, Any], today: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an earlier run, with today's values of what it lacked, without REMOVED."""
    saved, known = without_removed(saved), {}
    for key, value in today.items():
        before = saved.get(key)
        if key not in CHOICES or before is None or before.get("name", value["name"]) == value["name"]:
            known[key] = value  # else another choice was made in this section
    return layered(known, saved)


def without_removed(saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of the options of an earlier run without those that today's version lacks."""
    kept = {
        section: {key: value for key, value in saved[section].items() if key not in keys}
        for section, keys in REMOVED.items()
        if section in saved
    }
    return saved | kept


def read_config(folder: Path) -> dict[str, Any]:
    """The options of a run folder, with what earlier versions did that lacked some.

    Raises ConfigError if the folder has none, or if the file is damaged.
    """
    return with_earlier(_saved_options(folder))


def _saved_options(folder: Path) -> dict[str, Any]:
    """The options of a run folder; without a config.yaml, those of its checkpoint."""
    path = folder / "config.yaml"
    if not path.exists():
        checkpoints = [folder / FOLDER / f"{name}.pt" for name in ("last", "last.previous", "best")]
        there = next((checkpoint for checkpoint in checkpoints if checkpoint.is_file()), None)
        if there is None:
            raise ConfigError(f"resume={folder} holds no config.yaml. fix: name the folder of a run")
        return config_of_checkpoint(str(there))
    try:
        if "train" in (saved := load_yaml(path)):
            check_values(saved, str(path))
            return saved
        problem = f"{path} is cut"
    except (DataError, OSError) as error:
        problem = str(error).partition(". fix: ")[0]
    raise ConfigError(f"{problem}. fix: delete it, and the run's options are those of its last checkpoint")


def _has_options(folder: Path, given: Mapping[str, Any]) -> bool:
    """Whether the run in ``folder`` has these options, as far as it knew them.

    Those of the machine may differ.
    """
    changed = changed_values(without_removed(_saved_options(folder)), plain(OmegaConf.create(dict(given))))
    return all(is_covered(key, OF_THE_MACHINE) for key in changed)


def _with_restarts(given: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Add ``resume=auto`` if SLURM requeued the job or torchrun may restart the run.

    What the user says about ``resume`` wins. Torchrun's count of restarts is not used: on nodes
    without the failure it may still be 0. The run's id names its folder, so no other run can be
    resumed. Raises ConfigError if torchrun has no id.
    """
    restarts = allowed_restarts()
    if "resume" in named or given.get("resume") is not None or (restarts == 0 and read_job().restarts == 0):
        return given
    if given.get("run_dir") is None and job_folder_name() is None:
        raise ConfigError(
            f"torchrun may restart this training {restarts} times and would not find its folder again. "
            "fix: torchrun --rdzv-id=<a name for this run>, run_dir=<folder>, or --max-restarts=0"
        )
    return given | {"resume": "auto"}
