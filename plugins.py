"""The dictionaries that plugins extend, and the import of plugins.

A plugin is a Python file of yours that adds to these dictionaries by name:

    from plugins import LOSSES

    LOSSES["mine"] = MyLoss

``plugins=[my_loss.py]`` imports it; docs/develop/extending.md says what each dictionary holds.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conf import ConfigError
from conf.schema import CHOICES, OPTIMISERS
from data.config import FORMATS
from data.dataset import AUGMENTATIONS
from models.cfg import SECTION_KEYS, layer_keys
from models.config import AUTO, YoloLossConfig
from models.darknet_loss import LOSSES
from models.graph import BUILDERS as LAYERS
from models.layers import ACTIVATIONS
from train_utils.report.loggers import LOGGERS, in_short

__all__ = [
    "ACTIVATIONS", "AUGMENTATIONS", "FORMATS", "LAYERS", "LOGGERS", "LOSSES", "OPTIMISERS", "SECTION_KEYS",
    "import_plugins", "layer_keys",
]  # fmt: skip

DICTIONARIES: tuple[dict[str, Any], ...] = (
    ACTIVATIONS, AUGMENTATIONS, FORMATS, LAYERS, LOGGERS, LOSSES, OPTIMISERS, SECTION_KEYS,
)  # fmt: skip
_in_use: list[tuple[dict[str, Any], str]] = []  # dictionaries and the names that plugins added to them


def import_plugins(files: Sequence[str]) -> None:
    """Use what these files add, and nothing that others added here; ConfigError for a bad path."""
    for dictionary, name in _in_use:
        dictionary.pop(name, None)
    _in_use.clear()
    for file in files:
        additions = _additions_of(Path(str(file)).expanduser().resolve())
        for dictionary, added in zip(DICTIONARIES, additions, strict=True):
            dictionary.update(added)
            _in_use.extend((dictionary, name) for name in added)
    # A plugin's loss has the options of loss=yolov3.
    CHOICES["loss"] = {name: CHOICES["loss"].get(name, YoloLossConfig) for name in (AUTO, *LOSSES)}


@cache
def _additions_of(path: Path) -> list[dict[str, Any]]:
    """Import a file; return what it adds to each of DICTIONARIES."""
    before = [set(dictionary) for dictionary in DICTIONARIES]
    sys.path.append(str(path.parent))  # spawned loader workers import it by its name
    spec = importlib.util.find_spec(path.stem)
    if spec is None or os.path.realpath(spec.origin or "") != str(path):
        raise ConfigError(f"plugins: import {path.stem} does not find {path}", "rename the file to <another name>.py")
    try:
        importlib.import_module(path.stem)
    except Exception as error:  # of somebody else's code: of any kind
        raise ConfigError(
            f"plugins: {path} failed ({in_short(error)})", "mend the file; debug=true shows the traceback"
        ) from error
    pairs = zip(DICTIONARIES, before, strict=True)
    return [{name: dictionary[name] for name in dictionary.keys() - known} for dictionary, known in pairs]
