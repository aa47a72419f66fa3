"""Train, evaluate and use YOLO detectors: ``from hydra_yolov3_spp import Detector, train``.

The wheel keeps the modules of the repository in ``project/``, because conf, data and models are
names that other code has, too. They can be imported once one of ``__all__`` was asked for.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
PROJECT = _HERE / "project" if (_HERE / "project").is_dir() else _HERE.parent  # the latter in a clone
_MODULES = ("conf", "data", "models", "train_utils", "scripts", "train", "eval", "predict", "export", "plugins")
_OFFERED = {"Detector": "predict", "train": "train", "evaluate": "eval", "predict": "predict", "export": "export"}
__all__ = list(_OFFERED)


def add_project() -> None:
    """Put the project's modules first on ``sys.path``.

    Raises ImportError if another module with the name of one of them was imported before.
    """
    for name in _MODULES:
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), name)
        if module is not None and not Path(place).resolve().is_relative_to(PROJECT):
            raise ImportError(
                f"hydra_yolov3_spp has its own module {name}, but {place} was imported by this name before. "
                "fix: run it in a process of its own, by the command hydra-yolov3-spp or from another script"
            )
    if sys.path[:1] != [str(PROJECT)]:
        sys.path.insert(0, str(PROJECT))


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    add_project()
    return getattr(import_module(_OFFERED[name]), name)
