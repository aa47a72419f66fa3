"""Find and import plugins: Python files, or installed packages by their entry point."""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.extensions.parts import COLLECTED, Part, Plugin
from conf.failures import ConfigError

GROUP = "hydra_yolov3_spp.plugins"  # of entry points
INIT = "__init__.py"  # of a package
OURS = ("conf", "data", "eval", "export", "models", "plugins", "predict", "scripts", "train", "train_utils")
_loaded: dict[str, Plugin] = {}  # by name; the last file of that name


def load(given: str, needed: str = "") -> Plugin:
    """Import the plugin ``given``, a file or an entry point, unless it is loaded and unchanged.

    Raises ConfigError if it does not exist, fails, or registers nothing. The message puts
    ``needed`` behind the name of a missing file.
    """
    path, name = Path(given).expanduser().absolute(), given
    if given.endswith(".py") or "/" in given:
        given, name = str(path), re.sub(r"\W", "_", path.stem, flags=re.ASCII)  # a key of plugins_sha256
        module = f"plugin_{name}"
        if path.name == INIT or (path / INIT).is_file():
            raise ConfigError(f"plugins: {path} is a package. fix: one .py file, or an entry point of {GROUP}")
    else:
        module, path = _origin(given)
    if not path.is_file():
        raise ConfigError(
            f"plugins: there is no {path}{needed}. fix: plugins=[<its file>], as seen from the current folder"
        )
    files, known = _files(path, module), _loaded.get(name)
    sha256 = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if known is None or (known.given, known.sha256) != (given, sha256):
        paths = list(map(str, files)) if known else []
        for inner in [inner for inner, of in sys.modules.items() if getattr(of, "__file__", None) in paths]:
            del sys.modules[inner]  # else old modules stay, and those of a package do not register again
        _loaded[name] = Plugin(name, given, sha256, _registered(module, path))
    return _loaded[name]


def load_all(given: Sequence[str], needed: str = "") -> list[Plugin]:
    """Load each plugin. Raises ConfigError if two plugins or two parts have the same name."""
    plugins = [load(one, needed) for one in given]
    for names in ([plugin.name for plugin in plugins], [part.name for plugin in plugins for part in plugin.parts]):
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"plugins={list(given)} has {min(twice)} twice. fix: give each another name")
    return plugins


def _origin(name: str) -> tuple[str, Path]:
    """The module that an entry point names, and its file."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        installed = f", there are {', '.join(sorted(found))}" if found else ""
        raise ConfigError(
            f"plugins: no installed package has the entry point {name} of {GROUP}{installed}. fix: install it, or "
            f"plugins=[{name}.py] for a file"
        )
    spec = None
    with suppress(ModuleNotFoundError):  # the package of the module
        spec = find_spec(found[name].module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"plugins: the entry point {name} names {found[name].module}, which is missing. fix: install")
    return found[name].module, Path(spec.origin)


def _files(path: Path, module: str) -> list[Path]:
    """A plugin's file and those beside it that it imports, or all of the package that it is in."""
    if depth := module.count(".") + (path.name == INIT):
        return sorted(path.parents[depth - 1].rglob("*.py"))
    finder = ModuleFinder([str(path.parent)], excludes=OURS)  # reads the code without running it
    with suppress(SyntaxError, ValueError, ImportError):  # told when the plugin is imported
        finder.run_script(str(path))
    found = {Path(file) for each in finder.modules.values() if (file := getattr(each, "__file__", None))}
    return [path, *sorted(found - {path})]


def _registered(module_name: str, path: Path) -> tuple[Part, ...]:
    """Run the file as a module of this name and return what it registers."""
    packages = [str(path.parent)] if path.name == INIT else None
    spec = spec_from_file_location(module_name, path, submodule_search_locations=packages)
    assert spec is not None
    sys.modules[module_name] = module = module_from_spec(spec)
    COLLECTED.clear()
    try:
        with redirect_stdout(sys.stderr):  # pages and completions have stdout to themselves
            exec(compile(path.read_bytes(), path, "exec"), vars(module))  # not a .pyc: it may be of older text
        for part in COLLECTED:
            OmegaConf.structured(part.options or {})  # refuses types that no option can have
    except OmegaConfBaseException as error:
        raise ConfigError(f"plugin {path}: {str(error).splitlines()[0]}. fix: plain types for options") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugin {path} {told(error, path)}. fix: correct it") from error
    if not COLLECTED:
        raise ConfigError(
            f"plugin {path} registers nothing. fix: use a decorator of `plugins`, see docs/develop/extending.md"
        )
    return tuple(COLLECTED)


def told(error: BaseException, path: Path) -> str:
    """``failed in line 12 (ValueError: ...)``, with the last line that ``path`` has in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    said = " ".join(str(error).split())
    return f"failed{f' in line {lines[-1]}' if lines else ''} ({type(error).__name__}: {said})"
