"""Install plugins: check their options, and put their parts into the registries."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.extensions.choices import offer
from conf.extensions.loading import load, load_all, told
from conf.extensions.parts import Part, Plugin
from conf.failures import USER_ERRORS, ConfigError
from models.cfg.keys import REFUSED_SECTIONS, SECTION_ALIASES, layer_keys

# Where each kind is looked up by name. Plugins' parts are there while their options are in use.
REGISTRIES = {
    "layer": "models.network.sections:BUILDERS",
    "activation": "models.network.activations:ACTIVATIONS",
    "loss": "conf.build.loss:LOSSES",
    "assigner": "models.loss.yolo:ASSIGNERS",
    "data_format": "data.config:FORMATS",
    "optimiser": "train_utils.config:OPTIMISERS",
    "augmentation": "data.batches.changed:AUGMENTATIONS",
    "logger": "train_utils.loggers.loggers:LOGGERS",
}
MADE_ONCE = ("loss", "optimiser")  # errors of the others are reported by their callers
KEYS = ("plugins", "plugins_sha256", "plugin")
_in_place: list[tuple[dict[str, Any], str]] = []


@dataclass(frozen=True)
class Bound:
    """A part with its options. Unpickling one in another process loads the plugin first."""

    plugin: Plugin
    part: Part
    options: Any

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the registered class or function. Raises ConfigError if it makes no object."""
        named = named if self.options is None else {**named, "options": self.options}
        if self.part.kind not in MADE_ONCE:
            return self.part.make(*arguments, **named)
        try:
            return self.part.make(*arguments, **named)
        except USER_ERRORS:
            raise
        except Exception as error:
            file = self.plugin.given
            failed = told(error, Path(file))
            raise ConfigError(f"plugin {file}: {self.part.kind} {self.part.name} {failed}. fix: correct it") from error

    @property
    def identity(self) -> str:
        """What the result of a call depends on, apart from its arguments."""
        return f"{self.plugin.sha256} {self.options}"

    def __reduce__(self) -> tuple[Callable[..., Bound], tuple[Any, ...]]:
        return _revived, (self.plugin.given, self.plugin.sha256, self.part.name, pickle.dumps(self.options))


def _revived(given: str, sha256: str, name: str, options: bytes) -> Bound:
    plugin = load(given)
    if plugin.sha256 != sha256:
        raise ConfigError(f"plugin {given} has changed since this program started. fix: start it anew")
    return Bound(plugin, next(part for part in plugin.parts if part.name == name), pickle.loads(options))


def with_plugins(given: dict[str, Any]) -> dict[str, Any]:
    """Install the plugins of ``given``; return it with their absolute paths, digests and options.

    Raises ConfigError if a plugin is missing or does not match ``plugins_sha256``, or if one of its
    options is unknown or wrong.
    """
    if "plugins" not in given:
        return given
    plugins, tree = plugins_with_options(given)
    _put_in_place([(plugin, part, _options(part, tree)) for plugin in plugins for part in plugin.parts])
    return given | {
        "plugins": [plugin.given for plugin in plugins],
        "plugins_sha256": {plugin.name: plugin.sha256 for plugin in plugins},
        "plugin": OmegaConf.to_container(tree, enum_to_str=True),
    }


def plugins_with_options(given: dict[str, Any]) -> tuple[list[Plugin], DictConfig]:
    """The plugins of ``given`` and their options by name; values may be missing.

    Raises ConfigError as ``with_plugins`` does, and OmegaConfBaseException for a wrong type or key.
    """
    plugins, forced = _expected_ones(given), bool(given.get("resume_force"))
    offer(plugins)
    typed = {part.name: part.options for plugin in plugins for part in plugin.parts if _has_options(part)}
    unknown = given["plugin"].keys() - typed.keys()
    if unknown and not forced:  # with resume_force they belong to a plugin that is left out now
        known = f"there are {', '.join(typed)}" if typed else "plugins= registers none"
        raise ConfigError(f"no option plugin.{min(unknown)}: {known}. fix: plugins=[<the file that registers it>]")
    chosen = {name: given["plugin"][name] for name in given["plugin"] if name not in unknown}
    if wrong := [name for name, value in chosen.items() if not isinstance(value, dict)]:
        raise ConfigError(f"plugin.{wrong[0]} holds options. fix: plugin.{wrong[0]}.<option>=...")
    empty = {name: OmegaConf.structured(options) for name, options in typed.items()}
    tree = OmegaConf.merge(OmegaConf.create({"plugin": empty}), {"plugin": chosen})
    return plugins, tree.plugin


def of_checkpoint(given: dict[str, Any], saved: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``given`` with the plugins of a checkpoint's options ``saved``, except the keys ``named``."""
    kept = OmegaConf.create({key: saved[key] for key in KEYS if key in saved and key in given})
    for key in named if kept else ():
        if key.partition(".")[0] in KEYS:
            OmegaConf.update(kept, key, OmegaConf.select(OmegaConf.create(given), key))
    plain: Any = OmegaConf.to_container(kept)
    return {**given, **plain}


def _expected_ones(given: dict[str, Any]) -> list[Plugin]:
    """Load the plugins. Raises ConfigError if an expected one is missing or has changed."""
    needed = next((f"{key}={given[key]}" for key in ("resume", "ckpt") if given.get(key)), None)
    expected = given["plugins_sha256"] if not given.get("resume_force") else {}
    plugins = load_all(given["plugins"], f", which {needed} needs" if needed else "")
    found = {plugin.name: plugin for plugin in plugins}
    for name, before in expected.items():
        if name not in found:
            raise ConfigError(
                f"{needed or 'plugins_sha256'} needs the plugin {name} (SHA-256 {before[:12]}...), too. "
                "fix: plugins=[<the files of all>]"
            )
        plugin = found[name]
        if plugin.sha256 != before:
            fix = "resume_force=true" if given.get("resume") else f"plugins_sha256.{name}={plugin.sha256}"
            raise ConfigError(
                f"plugin {plugin.given} has changed: its SHA-256 was {before[:12]}..., it is {plugin.sha256[:12]}.... "
                f"fix: the file as it was, or {fix} to accept this one"
            )
    return plugins


def _has_options(part: Part) -> bool:
    return part.options is not None and part.kind != "layer"  # those of a layer are in the .cfg


def _options(part: Part, tree: DictConfig) -> Any:
    if not _has_options(part):
        return None
    try:
        return OmegaConf.to_object(tree[part.name])
    except ValueError as error:  # of its __post_init__
        raise ConfigError(f"plugin.{part.name}: {error}") from error


def _put_in_place(parts: Sequence[tuple[Plugin, Part, Any]]) -> None:
    """Register these parts by name and remove those of earlier options."""
    for registry, name in _in_place:
        del registry[name]
    _in_place.clear()
    for plugin, part, options in parts:
        added: dict[str, Any] = {REGISTRIES[part.kind]: Bound(plugin, part, options)}
        if part.kind == "layer":
            keys = [field.name for field in fields(part.options)] if part.options is not None else []
            added = {REGISTRIES["layer"]: _builder(part), "models.cfg.keys:SECTION_KEYS": layer_keys(" ".join(keys))}
        taken = (*SECTION_ALIASES, *REFUSED_SECTIONS) if part.kind == "layer" else ()
        for place, value in added.items():
            registry = resolve_name(place)
            if part.name in (*registry, *taken):
                raise ConfigError(
                    f"plugin {plugin.given}: the {part.kind} {part.name} exists already. fix: another name"
                )
            registry[part.name] = value
            _in_place.append((registry, part.name))


def _builder(part: Part) -> Callable[..., Any]:
    """The builder of a layer, which reads the layer's options from the .cfg section."""
    from models.network.section_options import read_fields

    return lambda graph, section: part.make(
        graph, section, **({} if part.options is None else {"options": read_fields(section, part.options)})
    )
