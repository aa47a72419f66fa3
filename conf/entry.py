"""From Hydra to plain options: YAML and overrides are composed, checked and become dataclasses."""

import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from conf import CONF_DIR, ConfigError, messages
from conf.file_choices import register_file_choices
from conf.schema import CHOICES
from data.errors import DataError
from train_utils.options import flat

Config = TypeVar("Config")
Complete = Callable[[dict[str, Any], Sequence[str]], dict[str, Any]]

LARGEST = {int: 2**53, float: 3.4e38}  # what float64 and float32 hold, so that torch and NumPy agree
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COMPOSING = threading.Lock()  # Hydra composes in one place of the process, and threads may ask at once


def compose(name: str, schema: type[Config], overrides: Sequence[str], complete: Complete | None = None) -> Config:
    """The options of ``python <name>.py <overrides>``. Raises ConfigError for wrong ones."""
    if missing := next((word for word in overrides if word.endswith("=???")), None):
        raise ConfigError(f"{missing} is no value. fix: give one, or leave it out")
    try:
        cfg = _composed(name, schema, overrides)
    except messages.NOT_COMPOSED as error:
        raise ConfigError(messages.explain(error, schema)) from error
    except (ConfigError, DataError):
        raise
    except (TypeError, ValueError, RecursionError) as error:  # Hydra's, for no text, or for a file that is not
        chosen = " ".join(word for word in overrides if (CONF_DIR / word.partition("=")[0]).is_dir())
        raise ConfigError(f"{chosen}: {error}. fix: the name of a choice, or a file of YAML in UTF-8") from error
    except (AssertionError, AttributeError) as error:  # OmegaConf's, for a key below null
        typed = " ".join(word for word in overrides if "." in word.partition("=")[0])
        raise ConfigError(
            f"{typed}: a section is null here. fix: choose what has it, as data=shapes or model=yolov3-spp"
        ) from error
    return to_plain(cfg, schema, complete, keys_of(overrides))


def defaults(name: str, schema: type, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of ``conf/<name>.yaml`` with overrides.

    Interpolations are unresolved; missing values are ``???``.
    """
    return to_dictionary(_composed(name, schema, overrides))


def keys_of(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that overrides name."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def to_plain(
    cfg: DictConfig, schema: type[Config], complete: Complete | None = None, named: Sequence[str] = ()
) -> Config:
    """Turn the composed tree into an instance of ``schema`` without OmegaConf objects.

    ``complete`` takes what is composed, as nested dictionaries, and the keys and groups that the
    command line names. It returns the whole configuration, with values of a checkpoint or an
    earlier run. Raises ConfigError with the full key for a missing value, an unknown key or a value
    that its section refuses.
    """
    try:
        tree: Any = OmegaConf.to_container(cfg, resolve=True)
        options = _drop_missing(tree)
        plugins = options.get("plugins", [])
        if plugins or "plugins" in sys.modules:  # importing it takes torch
            from plugins import import_plugins

            import_plugins(plugins)
        completed = complete(options, named) if complete is not None else options
        if "plugins" in completed:  # a file is imported because a user names it, never because another file does
            completed = {**completed, "plugins": list(map(os.path.basename, plugins))}
        return from_dictionary(completed, schema)
    except messages.NOT_COMPOSED as error:
        raise ConfigError(messages.explain(error, schema)) from error
    except ValueError as error:  # of a section's __post_init__; it names the key
        raise ConfigError(str(error)) from error


def _check_number(key: str, value: Any) -> None:
    for entry in value if isinstance(value, list) else ():
        _check_number(key, entry)
    if type(value) in LARGEST and not abs(value) <= LARGEST[type(value)]:
        raise ConfigError(f"{key}: {value} is not finite, or too large. fix: a number, or quotes around a text")


def check_limits(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for a number beyond the limits that its type has, such as ``>= 1``."""
    for name, kind in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if is_dataclass(value):
            check_limits(value, f"{prefix}{name}.")
        _check_number(f"{prefix}{name}", value)  # also one that was a text
        for part in (kind, *get_args(kind)):
            limits = part.__metadata__[0] if get_origin(part) is Annotated else ""
            for sign, limit in re.findall(r"([<>]=?) ([\d.]+)", limits):
                if value is not None and not COMPARISONS[sign](value, float(limit)):
                    null = ", or null" if type(None) in get_args(kind) else ""
                    raise ConfigError(f"{prefix}{name} must be {limits}{null}, got {value}")


def from_dictionary(options: dict[str, Any], schema: type[Config]) -> Config:
    """The reverse of ``to_dictionary``; imports no plugins. Raises ConfigError as ``to_plain``."""
    for key, number in flat(options).items():
        _check_number(key, number)
    # In a fresh schema, a key that Hydra accepted as `+section.key=1` is an error.
    tree: DictConfig = OmegaConf.structured(schema)
    for section, choices in CHOICES.items():
        if section in options:
            name = options[section].get("name")
            if name not in tuple(choices):  # a list has no hash
                raise ConfigError(
                    f"{section}.name={name} is none of {', '.join(choices)}. fix: one of them, or plugins=[<its file>]"
                )
            tree[section] = OmegaConf.structured(choices[name])
    whole = OmegaConf.to_object(OmegaConf.merge(tree, options))
    assert isinstance(whole, schema)
    check_limits(whole)
    return whole


def to_yaml(config: Any) -> str:
    """Write plain options as YAML, which a later command line can read."""
    return str(OmegaConf.to_yaml(OmegaConf.structured(config)))


def to_dictionary(config: Any) -> dict[str, Any]:
    """Plain options as nested dictionaries of numbers and strings, as checkpoints keep them."""
    return plain(OmegaConf.structured(config))


def plain(tree: Any) -> dict[str, Any]:
    """An OmegaConf tree as nested dictionaries of numbers and strings; enums by name."""
    container: Any = OmegaConf.to_container(tree, enum_to_str=True)
    assert isinstance(container, dict)
    return container


@cache  # Hydra copies what it loads
def register(name: str, schema: type) -> None:
    """Register the dataclasses under the names that the YAML files use, and paths as choices."""
    register_file_choices()
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=_with_sections(schema))
    for section, choices in CHOICES.items():
        for choice, kind in choices.items():
            store.store(name=f"{choice}_{section}_schema", node=kind)


def _composed(name: str, schema: type, overrides: Sequence[str]) -> DictConfig:
    with _COMPOSING:
        register(name, schema)
        outer = GlobalHydra.instance().hydra  # of a multirun
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                return hydra.compose(name, list(overrides))
        finally:
            GlobalHydra.instance().hydra = outer


def _with_sections(schema: type) -> DictConfig:
    """The empty typed tree with all sections, also those that a checkpoint may fill."""
    tree: DictConfig = OmegaConf.structured(schema)
    for key, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and key not in CHOICES:
            assert isinstance(kind, type)
            tree[key] = _with_sections(kind)
    return tree


def _drop_missing(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree without missing values, and without the sections that this empties."""
    full: dict[str, Any] = {}
    for key, value in tree.items():
        content = _drop_missing(value) if isinstance(value, dict) else value
        if content != "???" and (content != {} or value == {}):
            full[key] = content
    return full
