"""Offer what plugins register as choices to Hydra, before it composes the options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep

from conf.extensions.loading import load_all
from conf.extensions.parts import IN_USE, Plugin
from conf.failures import ConfigError
from conf.schema import CHOICES
from data.formats.set_files import load_yaml
from models.config import LossSection

_offered: list[tuple[str, str]] = []  # group and choice


def offer_choices(words: Sequence[str]) -> None:
    """Load the plugins that a command line names, or else those that its experiments name.

    ``loss=`` and ``optim=`` then accept their names.
    """
    for group, name in _offered:
        ConfigStore.instance().repo[group].pop(f"{name}.yaml", None)
    _offered.clear()
    offer([])
    given = _typed(words, "plugins")[-1:]
    if not all(isinstance(value, list) for value in given):
        raise ConfigError("plugins= takes one list. fix: plugins=[mine.py]")
    if not given:
        named = [load_yaml(file).get("plugins") for file in _experiments(words)]
        given = [value for value in named if isinstance(value, list)]  # other types are refused later
    offer(load_all(list(dict.fromkeys(str(one) for value in given for one in value))))


def _typed(words: Sequence[str], key: str) -> list[Any]:
    """The values of ``key=value``, in order; a sweep is a Sweep."""
    found = [word for word in words if word.lstrip("+").startswith(f"{key}=")]
    return [override.value() for override in OverridesParser.create().parse_overrides(found)]


def _experiments(words: Sequence[str]) -> Iterator[Path]:
    """The YAML files of ``experiment=``: by their path, or by their name in ``--config-dir``."""
    folders = [Path(folder) for flag, folder in pairwise(words) if flag in ("--config-dir", "-cd")]
    folders += [Path(str(one).removeprefix("file://")) for value in _typed(words, "hydra.searchpath") for one in value]
    for value in _typed(words, "experiment"):
        for name in value.list if isinstance(value, ChoiceSweep) else [value]:
            files = [Path(str(name)), *(folder / "experiment" / f"{name}.yaml" for folder in folders)]
            yield from (file for each in files if (file := each.expanduser()).suffix and file.is_file())


def offer(plugins: Sequence[Plugin]) -> None:
    """Make ``loss=`` and ``optim=`` accept what these plugins register."""
    IN_USE[:] = plugins
    for name in [name for name, kind in CHOICES["loss"].items() if kind is LossSection]:
        del CHOICES["loss"][name]
    store = ConfigStore.instance()  # holds plain values only, which launchers pickle, and those of other jobs
    for part in (part for plugin in plugins for part in plugin.parts):
        group = {"loss": "loss", "optimiser": "optim"}.get(part.kind, "")
        if not group or part.name in CHOICES.get(group, {}):  # with_plugins refuses a name in use
            continue
        usual = {"defaults": ["sgd"], **part.more} if group == "optim" else {}
        store.store(group=group, name=part.name, node={"name": part.name, **usual})
        _offered.append((group, part.name))
        if group == "loss":
            CHOICES[group][part.name] = LossSection
