"""The options there are, and how a command line becomes the options of a program.

The import refuses Windows, where the signals and locks that the project needs do not exist.
"""

import sys
from pathlib import Path

CONF_DIR = Path(__file__).parent  # a YAML file for each program, a folder for each group (data=, model=, loss=, ...)
REPOSITORY = CONF_DIR.parent


class ConfigError(ValueError):
    """The command line or a YAML file asks for something that does not exist or does not fit."""


if sys.platform == "win32":
    _sentence = "this project runs on Linux and macOS, not on Windows. fix: WSL 2 (wsl --install), or a Linux container"
    _main = Path(getattr(sys.modules["__main__"], "__file__", None) or "-").absolute()
    _is_ours = _main.parent in (REPOSITORY, REPOSITORY / "scripts") or _main.parent.name == "hydra_yolov3_spp"
    if not _is_ours and "hydra_yolov3_spp.__main__" not in sys.modules:
        raise ImportError(_sentence)
    print(f"error: {_sentence}".replace(" fix: ", "\nfix: "), file=sys.stderr)  # a program of ours: no traceback
    sys.exit(2)
