"""Train, evaluate and use YOLO detectors: ``from hydra_yolov3_spp import Detector, train``.

The project calls its modules conf, data, models and so on, and others have such names, too. So an
application gets them as ``hydra_yolov3_spp.project.data``, and *their* ``import data`` means this
one. The application's ``import data`` means its own, or ours if it has none. In the folder of a
clone and in the project's own programs nothing of this happens: there is no other ``data``.
"""

import builtins
import sys
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
PROJECT = _HERE / "project" if (_HERE / "project").is_dir() else _HERE.parent  # the latter in a clone
_INSIDE = f"{__name__}.project."
_MODULES = "conf data models train_utils scripts train eval predict export plugins".split()
_OFFERED = {"Detector": "predict", "train": "train", "evaluate": "eval", "predict": "predict", "export": "export"}
__all__ = list(_OFFERED)


def add_project() -> None:
    """Make this process a program of the project: its modules come first on ``sys.path``.

    They replace the folder of the script, which with ``python -m`` is the current one.
    """
    sys.path[: not sys.flags.safe_path] = [str(PROJECT)]
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)


def _import(name: str, *about: Any) -> Any:
    """What ``import`` does in the project's modules; ``about`` as in ``builtins.__import__``."""
    names, level = about[2:]  # of ``from name import names``, and the number of its dots
    top = name.partition(".")[0]
    if top not in _MODULES or level > 0:
        return builtins.__import__(name, *about)
    module = builtins.__import__(_INSIDE + name, *about)
    return module if names else sys.modules[_INSIDE + top]


class _Loader(SourceFileLoader):
    """Loads a module of the project; that of a short name is the same one."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.startswith(_INSIDE):
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
            super().exec_module(module)
        else:
            sys.modules[module.__name__] = import_module(_INSIDE + module.__name__)


class _Finder(PathFinder):
    """Finds the project's modules, by a short name if there is no other of this name."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.removeprefix(_INSIDE).partition(".")[0]
        if top not in _MODULES:
            return None
        spec = super().find_spec(name, path) or super().find_spec(name, path or project.__path__)
        if spec is not None and str(spec.origin).startswith((f"{PROJECT}/{top}.py", f"{PROJECT}/{top}/")):
            spec.loader = _Loader(name, str(spec.origin))
        return spec


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module((_INSIDE if _Finder in sys.meta_path else "") + _OFFERED[name]), name)


project = ModuleType(_INSIDE[:-1])
project.__path__ = [str(PROJECT)]
sys.modules[project.__name__] = project
_conf = str(getattr(sys.modules.get("conf"), "__file__", ""))  # imported by our own program
if Path(*sys.path[:1]).resolve() != PROJECT and not _conf.startswith(f"{PROJECT}/"):  # not in a clone
    sys.meta_path.insert(0, _Finder)
