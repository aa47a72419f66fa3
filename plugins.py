"""What a plugin adds parts to, and the import of plugins.

A plugin is a Python file of yours that fills these dictionaries, by name:

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
from conf.schema import CHOICES
from conf.train_options import OPTIMISERS
from data.config import FORMATS
from data.dataset import AUGMENTATIONS
from models.cfg import SECTION_KEYS, layer_keys
from models.config import AUTO, YoloLossConfig
from models.graph import BUILDERS as LAYERS
from models.layers import ACTIVATIONS
from models.losses import LOSSES
from train_utils.loggers import LOGGERS

__all__ = [
    "ACTIVATIONS", "AUGMENTATIONS", "FORMATS", "LAYERS", "LOGGERS", "LOSSES", "OPTIMISERS", "SECTION_KEYS",
    "import_plugins", "layer_keys",
]  # fmt: skip

KINDS: tuple[dict[str, Any], ...] = (
    ACTIVATIONS, AUGMENTATIONS, FORMATS, LAYERS, LOGGERS, LOSSES, OPTIMISERS, SECTION_KEYS,
)  # fmt: skip
_in_use: list[tuple[dict[str, Any], str]] = []


def import_plugins(files: Sequence[str]) -> None:
    """Import these files; parts of others that this process has imported are not in use any more.

    Raises ConfigError if there is no such file, or if its name is that of another module.
    """
    for kind, name in _in_use:
        kind.pop(name, None)
    _in_use.clear()
    for file in files:
        for kind, parts in zip(KINDS, _parts_of(Path(str(file)).expanduser().resolve()), strict=True):
            kind.update(parts)
            _in_use.extend((kind, name) for name in parts)
    # The options of a plugin's loss are those of loss=yolov3.
    CHOICES["loss"] = {name: CHOICES["loss"].get(name, YoloLossConfig) for name in (AUTO, *LOSSES)}


@cache
def _parts_of(path: Path) -> list[dict[str, Any]]:
    """What the file adds to each of KINDS."""
    if not path.is_file():
        raise ConfigError(f"plugins: there is no {path}. fix: plugins=[<its file>], as seen from the current folder")
    before = [set(kind) for kind in KINDS]
    sys.path.append(str(path.parent))  # loader workers that are spawned import it by its name
    spec = importlib.util.find_spec(path.stem)
    if spec is None or os.path.realpath(spec.origin or "") != str(path):
        raise ConfigError(f"plugins: {path} has the name of another module, {path.stem}. fix: rename the file")
    importlib.import_module(path.stem)
    return [{name: kind[name] for name in kind.keys() - known} for kind, known in zip(KINDS, before, strict=True)]
