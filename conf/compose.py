"""From Hydra to plain options: compose YAML and overrides, check them, make dataclasses."""

import operator
import os
import re
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import CONF_DIR, ConfigError, suggestions
from conf.options import Options, Words, at_home, choices_of, flat, is_path, kind_in_words
from conf.schema import CHOICES, SIZE, is_image_size, kinds_of, section_of
from data import DataConfig, errors, layouts
from data.recognise import recognise
from models.cfg import ModelError

Config = TypeVar("Config")
Complete = Callable[[Options, Words], Options]

LARGEST_NUMBER = {int: 2**53, float: 3.4e38}  # what float64 and float32 hold, so that torch and NumPy agree
NOT_COMPOSED = HydraException, OmegaConfBaseException, yaml.YAMLError  # the errors for explain()
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}  # names of msgspec and of operator
OF_1_3 = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # later ones warn of it
_COMPOSING = threading.Lock()  # Hydra's state is global, and several threads may compose


def compose(name: str, schema: type[Config], overrides: Words, complete: Complete | None = None) -> Config:
    """The options of ``python <name>.py <overrides>``. Raises ConfigError for wrong ones."""
    return to_plain(_composed(name, schema, overrides), schema, complete, overrides)


def defaults(name: str, schema: type, overrides: Words = ()) -> Options:
    """The values of ``conf/<name>.yaml`` with overrides, unresolved; missing ones are ``???``."""
    return to_dictionary(_composed(name, schema, overrides))


def values_of_choice(group: str, name: str) -> Options:
    """The values of ``conf/<group>/<name>.yaml``, and of the choices in its defaults list."""
    content = layouts.load_yaml(CONF_DIR / group / f"{name}.yaml")
    values: Options = {}
    for choice in content.pop("defaults", []):  # schemas have no file
        if (CONF_DIR / group / f"{choice}.yaml").is_file():
            values |= values_of_choice(group, choice)
    return values | content


def keys_of(overrides: Words) -> list[str]:
    """The keys and groups that overrides name, without Hydra's own keys and flags."""
    keys = []
    for word in overrides:
        key, equals, _ = word.lstrip("+~").partition("=")
        if (equals or word.startswith("~")) and not key.startswith(("hydra", "-")):
            keys.append(key)
    return keys


def to_plain(cfg: DictConfig, schema: type[Config], complete: Complete | None = None, overrides: Words = ()) -> Config:
    """Turn the tree composed of ``overrides`` into an instance of ``schema``.

    ``complete`` takes the composed options as nested dictionaries, and the keys and groups that the
    command line names; it returns all options (Program.complete). Raises ConfigError with the full
    key for a missing value, an unknown key or a value that its section refuses.
    """
    try:
        tree: Any = OmegaConf.to_container(cfg, resolve=True)
        options = _drop_missing(tree)
        if complete is not None:
            options = complete(options, keys_of(overrides))
        return from_dictionary(options, schema)
    except (ValueError, *NOT_COMPOSED) as error:  # ValueError: of a section's __post_init__
        raise explain(error, schema) from error


def _check_number(key: str, value: Any) -> None:
    for entry in value if isinstance(value, list) else ():
        _check_number(key, entry)
    if type(value) in LARGEST_NUMBER and not abs(value) <= LARGEST_NUMBER[type(value)]:
        raise ConfigError(f"{key}: {value} is not finite, or too large", "a number, or quotes around a text")


def check_limits(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for a number outside the limits in its type, or for a wrong image size."""
    for name, kind in get_type_hints(type(section), include_extras=True).items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if is_dataclass(value):
            check_limits(value, f"{key}.")
        _check_number(key, value)  # again: OmegaConf makes numbers of texts
        for part in (kind, *get_args(kind)):
            for meta in getattr(part, "__metadata__", ()):
                _check_limit(key, value, meta, ", or null" if type(None) in get_args(kind) else "")


def _check_limit(key: str, value: Any, meta: Meta, or_null: str) -> None:
    if meta.title is not None and not is_image_size(value) and (value is not None or meta.title == SIZE):
        raise ConfigError(f"{key} must be {meta.title}, got {value}")
    if value is not None:
        wanted, fits = [], True
        for side, sign in LIMITS.items():
            limit = getattr(meta, side)
            if limit is not None:
                wanted.append(f"{sign} {limit}")
                fits = fits and getattr(operator, side)(value, limit)
        if not fits:
            raise ConfigError(f"{key} must be {' and '.join(wanted)}{or_null}, got {value}")


def from_dictionary(options: Options, schema: type[Config]) -> Config:
    """The reverse of ``to_dictionary``. Raises ConfigError as ``to_plain`` does."""
    for key, number in flat(options).items():
        _check_number(key, number)
    # A fresh schema refuses keys that Hydra accepted as `+section.key=1`.
    tree = OmegaConf.structured(schema)
    for section, choices in CHOICES.items():
        if section in options:
            name = options[section].get("name")
            if name not in tuple(choices):  # not in the dictionary: a list has no hash
                choose = f"one of {', '.join(choices)}, or plugins=[<its file>]"
                raise ConfigError(f"{section}.name={name} is not known", choose)
            tree[section] = OmegaConf.structured(choices[name])
    whole = OmegaConf.to_object(OmegaConf.merge(tree, options))
    assert isinstance(whole, schema)
    check_limits(whole)
    return whole


def to_yaml(config: Any) -> str:
    """Plain options as YAML for a later command line. OmegaConf 2.4 would write UTF-8 only."""
    return str(yaml.safe_dump(to_dictionary(config), sort_keys=False, allow_unicode=True))


def to_dictionary(config: Any) -> Options:
    """Plain options as nested dictionaries of numbers and strings, as checkpoints keep them."""
    return plain(OmegaConf.structured(config))


def plain(tree: Any) -> Options:
    """An OmegaConf tree as nested dictionaries of numbers and strings; enums by name."""
    return cast("Options", OmegaConf.to_container(tree, enum_to_str=True))


@cache  # once is enough: Hydra copies what it loads
def register(name: str, schema: type) -> None:
    """Register the dataclasses under the names that the YAML files use, and files as choices."""
    for plugin in _FileChoices, _FilesFirst:
        Plugins.instance().register(plugin)
    store = ConfigStore.instance()
    if f"{name}_schema.yaml" not in store.repo:  # of the process that launched this job
        store.store(f"{name}_schema", _with_sections(schema))
    for section, choices in CHOICES.items():
        for choice, kind in choices.items():
            if f"{choice}_{section}_schema.yaml" not in store.repo:  # of another program
                store.store(f"{choice}_{section}_schema", kind)


def _composed(name: str, schema: type, overrides: Words) -> DictConfig:
    with _COMPOSING:
        register(name, schema)
        outer = GlobalHydra.instance().hydra  # that of a multirun
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(CONF_DIR), **OF_1_3):
                return hydra.compose(name, list(overrides))
        except Exception as error:
            raise explained(error, schema, overrides) from error
        finally:
            GlobalHydra.instance().hydra = outer


def explained(error: Exception, schema: type, overrides: Words) -> Exception:
    """What Hydra raised while it composed ``overrides`` as a ConfigError, or the error itself."""
    if refused := suggestions.refusal(overrides, schema):
        return refused
    # OmegaConf's errors for a key below null: of 2.3, and of 2.4 by way of Hydra.
    if isinstance(error, AssertionError | AttributeError) or "' is None" in str(error.__cause__):
        typed = " ".join(word for word in overrides if "." in word.partition("=")[0])
        fix = "a choice that has it, as data=shapes"
        if "resume" in keys_of(overrides):  # of the run, which is not read yet
            fix = "leave out what would change the training, such as its data"
        return ConfigError(f"{typed}: a section is null here", fix)
    if isinstance(error, NOT_COMPOSED):
        return explain(error, schema)
    if isinstance(error, ConfigError | errors.DataError):
        return error
    if isinstance(error, TypeError | ValueError | RecursionError):  # for a list, or one without end
        chosen = " ".join(word for word in overrides if (CONF_DIR / word.partition("=")[0]).is_dir())
        fix = "the name of a choice, or a file of YAML in UTF-8" if chosen else "one of them"
        return ConfigError(f"{chosen}: {error}".strip(":. "), fix)
    return error


def explain(error: Exception, schema: Any) -> ConfigError:
    """A ConfigError for an error of Hydra, of OmegaConf, or of a section's ``__post_init__``."""
    if isinstance(error, errors.UserError | ModelError):
        return ConfigError(error.sentence, error.fix)
    text = str(error)
    details = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full_key, first_line = getattr(details, "full_key", None), str(details).partition("\n")[0]
    if isinstance(error, OverrideParseException):
        key = (error.override or "").partition("=")[0] or "key"
        fix = f"quote signs, brackets and letters, as '{key}=\"é (1)\"'"
        return ConfigError(f"cannot read the option {error.override}", fix)
    if unknown := re.search(r"(?ms)\A(In '[^']+': )?.*?(?:Could not override '|^Key '(?=[^']+' not in))([^']+)", text):
        key = str(full_key or unknown[2])
        if key in (kinds := kinds_of(schema)):  # that of another choice
            if unknown[1]:
                return ConfigError(f"{unknown[1]}{key} has a dot", "the section, and the key nested below it")
            group = key.partition(".")[0]
            return ConfigError(f"{key} is not an option of the {group}= that is chosen", "leave it out")
        return suggestions.answer([(f"{unknown[1] or ''}{key}=", key, "")], kinds)
    if choice := re.search(r"Could not (?:find|load) '((?:hydra/)?[^/]+)/(.+)'\.?$", text, re.MULTILINE):
        group, name = choice.groups()
        if group in ("data", "experiment") and is_path(name):
            known = layouts.SET_KINDS if group == "data" else "a YAML file"
            return ConfigError(f"{group}={name}: there is no {name}", f"a name, or the path of {known}")
        listed = re.findall(r"^\t(?!base$)(\S+)$", text, re.MULTILINE)  # not if the choice is one of several
        choices = listed or choices_of(group)
        near = get_close_matches(name.lower(), choices, n=1) if len(name) > 3 else []
        near = [f"{name}/"] if group == "data" and os.path.isdir(name) else near
        hint = f"did you mean {group}={near[0]}? " if near else ""
        there_are = f"there are: {', '.join(choices)}, and those of --config-dir"
        return ConfigError(f"no choice {group}={name}; {hint}{there_are}")
    if not full_key:
        return ConfigError(" ".join(text.split()))
    if "missing mandatory value" in first_line.lower():
        fix = f"{full_key}=<value> on the command line or in a YAML file"
        fix += ", which may begin with defaults: [base]" if "." in full_key else ""
        return ConfigError(f"{full_key} has no value", fix)
    kind = kind_in_words(kinds_of(schema).get(full_key, Any))
    wanted = f"[{getattr(details, 'value', '')}]" if "ListConfig" in first_line else f"<{kind}>"
    return ConfigError(f"{full_key}: {first_line.rstrip('.')}", f"{full_key}={wanted}")


def _with_sections(schema: type) -> DictConfig:
    """The empty typed tree with all sections, also those that a checkpoint fills in."""
    tree: DictConfig = OmegaConf.structured(schema)
    for key, kind in get_type_hints(schema).items():
        part = section_of(kind)
        if part is not None and key not in CHOICES:
            tree[key] = _with_sections(part)
    return tree


def _drop_missing(tree: Options) -> Options:
    """The tree without missing values and the sections without others; ``~`` is the home folder."""
    full = {}
    for key, value in tree.items():
        content = at_home(value) if isinstance(value, str) and value[:2] in ("~", "~/") else value
        content = _drop_missing(content) if isinstance(content, dict) else content
        if content != "???" and (content != {} or value == {}):
            full[key] = content
    return full


class _FileChoices(ConfigSource):
    """Paths as choices of ``data`` and ``experiment``; Hydra asks this source first.

    An experiment is the user's own file and may do all that Hydra can. A data set often comes from
    others: its file sets ``data.*`` only and refers to nothing.
    """

    @staticmethod
    def scheme() -> str:
        return "choice"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, word = config_path.partition("/")
        path, package = Path(word), group
        if group == "data":
            content = _data_options(path)
        else:
            content = layouts.load_yaml(path)
            package = self._get_header_dict(path.read_text("utf-8"))["package"] or "_global_"
        # Hydra would look for plain names beside the file, but they mean choices of the group.
        content["defaults"] = [
            f"/{group}/{name}@_here_" if isinstance(name, str) and name[:1] != "/" and name != "_self_" else name
            for name in content.get("defaults", [])
        ]
        for entry in content["defaults"]:
            if isinstance(entry, dict):  # Hydra 1.4 reads a path as groups, but not in a list
                entry |= {key: [word] for key, word in entry.items() if isinstance(word, str) and "/" in word}
        return ConfigResult(self.provider, config_path, OmegaConf.create(content), {"package": package})

    def is_config(self, config_path: str) -> bool:
        group, _, word = config_path.partition("/")
        path = Path(word)
        if group == "experiment":
            return path.suffix.lower() in layouts.YAML_SUFFIXES and path.is_file()
        return group == "data" and is_path(word) and path.exists()

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        return []  # any file is a choice: too many to propose


class _FilesFirst(SearchPathPlugin):
    def manipulate_search_path(self, search_path: Any) -> None:
        search_path.prepend("paths", "choice://")


def _data_options(path: Path) -> Options:
    """The options ``data.*`` of the data set at ``path``. Raises DataError for other options."""
    is_yaml = path.is_file() and path.suffix.lower() in layouts.YAML_SUFFIXES
    content = layouts.load_yaml(path) if is_yaml else {}
    if {"defaults", "format"} & content.keys():  # ours: data.yaml files of other programs have neither
        keys = {"defaults", *(field.name for field in fields(DataConfig))}
        chosen = content.get("defaults", [])
        if other := next((key for key in content if key not in keys), None):
            raise errors.DataError(f"{path} has the key {other}, which is not an option of data", "leave it out")
        if "index_dir" in content:  # files are written there
            raise errors.DataError(f"{path}: only a command line names index_dir", "data.index_dir=<its folder>")
        if not isinstance(chosen, list) or not all(re.fullmatch(r"[\w-]+", str(one)) for one in chosen):
            raise errors.DataError(f"{path}: its defaults must be names of data sets", "defaults: [coco], or none")
    else:
        recognised = recognise(path)
        content = {**values_of_choice("data", recognised["format"]), **recognised}
    check_values(content, str(path))
    return content


def check_values(values: Any, source: str, depth: int = 100) -> None:
    """Raise ConfigError for a value that is not plain YAML, such as ``${oc.env:HOME}``."""
    if isinstance(values, dict | list) and depth > 0:
        for value in [*values, *values.values()] if isinstance(values, dict) else values:
            check_values(value, source, depth - 1)
    elif type(values) not in (str, int, float, bool, type(None)) or (type(values) is str and "${" in values):
        rule = "only a command line may refer to values"
        raise ConfigError(f"{source} holds {errors.shown(values)}, and {rule}", "the value itself")
