"""The options there are, and how a command line becomes the options of a program.

The import refuses Windows: the rest of the project needs POSIX signals.
"""

import sys
from pathlib import Path

CONF_DIR = Path(__file__).parent  # a YAML file for each program, a folder for each group (data=, model=, loss=, ...)
REPOSITORY = CONF_DIR.parent

if sys.platform == "win32":
    print(
        "error: this program runs on Linux and macOS, not on Windows. fix: run it in WSL 2 (wsl --install) or in a "
        "Linux container",
        file=sys.stderr,
    )
    sys.exit(2)


class ConfigError(ValueError):
    """The command line or a YAML file asks for something that does not exist or does not fit."""
