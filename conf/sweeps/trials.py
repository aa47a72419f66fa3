"""What scripts/tune.py asks of Hydra: whether train.py would take the options of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.entry import compose
from conf.failures import ConfigError
from conf.messages import explain
from conf.schema import TrainConfig
from conf.sweeps.space import Dimension, arguments

OWN = ("run_dir", "resume", "dry_run")  # what a trial gets from the study


def check_trials(options: Sequence[str], space: Mapping[str, Dimension]) -> None:
    """Raise ConfigError if train.py refuses ``options``, or an end of a dimension with them."""
    if not space:
        raise ConfigError("space is empty. fix: space.optim.lr=log:1e-3:1e-1, or space=sgd")
    fixed, keys = _with_search_path(options), set(space)
    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        for given in OverridesParser.create().parse_overrides(fixed):
            if given.key_or_group in OWN or given.is_sweep_override():
                raise ConfigError(f"{given.input_line} does not fit trials. fix: leave it out behind --")
            if given.key_or_group in keys:
                raise ConfigError(f"{given.key_or_group} is in space and behind --. fix: leave one out")
        for number in range(max(len(dimension.ends) for dimension in space.values())):
            values = {key: dimension.ends[number % len(dimension.ends)] for key, dimension in space.items()}
            compose("train", TrainConfig, [*fixed, *arguments(values)])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the options of the trials: {explain(error, TrainConfig)}") from error
    finally:
        GlobalHydra.instance().hydra = running


def _with_search_path(options: Sequence[str]) -> list[str]:
    """The options with ``--config-dir FOLDER`` as Hydra's key for it."""
    words = [part for word in options for part in (word.split("=", 1) if word.startswith("--config-dir=") else [word])]
    if "--config-dir" not in words:
        return words
    at = words.index("--config-dir")
    folder = Path(*words[at + 1 : at + 2]).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir={folder} is no folder. fix: the folder of your own YAML files")
    return [*words[:at], *words[at + 2 :], f"hydra.searchpath=['file://{folder}']"]
