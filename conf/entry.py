"""The border between a command line and the program: Hydra composes, the result becomes plain
dataclasses here.

Every user error leaves as one sentence on one process with exit code 2; anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.failures import ConfigError, JobError, is_job_of_multirun, job_failure, tell, tell_failed_jobs, tell_interrupt
from conf.messages import explain, foreign_flag_message, is_foreign_flag
from conf.schema import CHOICES
from train_utils.launch.environment import peek_world_size, strip_local_rank
from train_utils.processes.ending import name_lost_peers, shutdown

Config = TypeVar("Config")
Complete = Callable[[dict[str, Any], Sequence[str]], dict[str, Any]]

CONF_DIR = Path(__file__).parent


def run(
    name: str,
    schema: type[Config],
    program: Callable[[Config], Any],
    complete: Complete | None = None,
) -> None:
    """Compose ``conf/<name>.yaml`` with the command line, check it against ``schema`` and call
    ``program`` with it.

    ``complete`` gets what is composed as nested dictionaries, and the keys and groups that the
    command line names; it returns the whole configuration, with values from a checkpoint or an
    earlier run. Ends the process: code 0, 2 after a user error, 1 after a bug.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions out of Hydra: they are reported here
    debug = "debug=true" in sys.argv
    try:
        _prepare_command_line()
        _register(name, schema)

        failures: list[BaseException] = []  # of this process, which a launcher's jobs may have left

        @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)
        def main(cfg: DictConfig) -> Any:
            try:
                return program(to_plain(cfg, schema, complete, keys_of(HydraConfig.get().overrides.task)))
            except (Exception, SystemExit) as error:
                failures.append(name_lost_peers(error))
                if not is_job_of_multirun():
                    return None  # told below: Hydra would add a line of its own
                failures[-1] = job_failure(failures[-1], schema, debug)
                raise failures[-1] from None
            finally:
                if is_job_of_multirun():
                    shutdown()  # the next job may run in this process

        main()
        if failures:
            raise failures[0]
    except KeyboardInterrupt:
        sys.exit(tell_interrupt())
    except JobError as error:
        sys.exit(tell_failed_jobs([known for known in failures if isinstance(known, JobError)] or [error]))
    except Exception as error:
        sys.exit(tell(error, schema, debug))
    shutdown()


def compose(name: str, schema: type[Config], overrides: list[str], complete: Complete | None = None) -> Config:
    """The configuration that ``python <name>.py <overrides>`` would get, for tests, notebooks and
    other programs.
    """
    _register(name, schema)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_plain(hydra.compose(name, overrides), schema, complete, keys_of(overrides))


def defaults(name: str, schema: type) -> dict[str, Any]:
    """The values of ``conf/<name>.yaml`` alone, interpolations as written and ``???`` where nobody
    gives one.
    """
    _register(name, schema)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dictionary(hydra.compose(name))


def keys_of(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that overrides of a command line name."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def to_plain(
    cfg: DictConfig,
    schema: type[Config],
    complete: Complete | None = None,
    named: Sequence[str] = (),
) -> Config:
    """The composed tree as an instance of ``schema``, with no OmegaConf object left in it.

    Raises ConfigError naming the full key for a missing value, a stray key or a value its section
    refuses.
    """
    try:
        _check_choices(cfg)
        given = _drop_missing(OmegaConf.to_container(cfg, resolve=True))
        completed = complete(given, named) if complete is not None else given
        # Merged into a fresh schema, a key that Hydra let in by `+section.key=1` is an error
        # instead of an attribute that nobody reads.
        whole = OmegaConf.to_object(OmegaConf.merge(_structured(schema, completed), completed))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error
    except ValueError as error:  # raised by the __post_init__ of a section, whose message names its key
        raise ConfigError(str(error)) from error
    assert isinstance(whole, schema)
    return whole


def layered(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with the values of ``above``, and of ``below`` where it has none."""
    return plain(OmegaConf.merge(below, above))


def to_yaml(config: Any) -> str:
    """A plain configuration as YAML text, which a later command line can read back."""
    return str(OmegaConf.to_yaml(OmegaConf.structured(config)))


def to_dictionary(config: Any) -> dict[str, Any]:
    """A plain configuration as nested dictionaries of numbers and strings (enums by name), as
    checkpoints keep it.
    """
    return plain(OmegaConf.structured(config))


def plain(tree: Any) -> dict[str, Any]:
    """An OmegaConf tree as nested dictionaries of numbers and strings (enums by name)."""
    container = OmegaConf.to_container(tree, enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _register(name: str, schema: type) -> None:
    """Make the types known to Hydra under the names by which the YAML files ask for them."""
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=_with_sections(schema))
    for section, choices in CHOICES.items():
        for choice, kind in choices.items():
            store.store(name=f"{choice}_{section}_schema", node=kind)


def _with_sections(schema: type) -> DictConfig:
    """The empty typed tree with all its sections, so that a key can be given where its section is a
    checkpoint's.
    """
    tree: DictConfig = OmegaConf.structured(schema)
    for key, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and key not in CHOICES:
            assert isinstance(kind, type)
            tree[key] = _with_sections(kind)
    return tree


def _check_choices(cfg: DictConfig) -> None:
    """Raise ConfigError where the command line changed the name of a section's choice instead of
    the choice.
    """
    for section, choices in CHOICES.items():
        kind = OmegaConf.get_type(cfg, section) if section in cfg else None
        if kind in choices.values() and choices.get(cfg[section].name) is not kind:
            raise ConfigError(f"{section}.name follows from the choice. fix: {section}={cfg[section].name}")


def _structured(schema: type, given: dict[str, Any]) -> DictConfig:
    """The empty typed tree of ``schema``, with the class of the choice that ``given`` makes in each
    of CHOICES.
    """
    tree: DictConfig = OmegaConf.structured(schema)
    for section, choices in CHOICES.items():
        if section in given:
            name = given[section].get("name")
            if name not in choices:
                raise ConfigError(
                    f"{section}.name={name} is none of {', '.join(choices)}. fix: {section}=<one of them>"
                )
            tree[section] = OmegaConf.structured(choices[name])
    return tree


def _prepare_command_line() -> None:
    """Take out what launchers add, refuse what cannot work, before Hydra sees the arguments."""
    sys.argv[1:] = strip_local_rank(sys.argv[1:])
    for argument in sys.argv[1:]:
        flag = argument.split("=")[0]
        if is_foreign_flag(flag):
            raise ConfigError(foreign_flag_message(flag))
        if flag in ("-m", "--multirun") and peek_world_size() > 1:
            raise ConfigError(
                "-m (multirun) cannot run under a launcher of several processes. fix: start each setting by itself"
            )


def _drop_missing(tree: Any) -> Any:
    """The tree without the values that nobody gave, and without the sections that held nothing
    else.
    """
    if isinstance(tree, dict):
        kept = {key: _drop_missing(value) for key, value in tree.items() if value != "???"}
        return {key: value for key, value in kept.items() if value != {} or tree[key] == {}}
    return tree
