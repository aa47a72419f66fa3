"""The options there are, and how a command line becomes the options of a program.

The import refuses Windows: the rest of the project needs POSIX signals.
"""

import sys
from pathlib import Path

PROGRAMS_DIR = Path(__file__).parent / "programs"  # the options of each program
GROUPS_DIR = Path(__file__).parent / "groups"  # the choices of data=, model=, loss= and more
REPOSITORY = Path(__file__).parent.parent

if sys.platform == "win32":
    print(
        "error: this program runs on Linux and macOS, not on Windows. fix: run it in WSL 2 (wsl --install) or in a "
        "Linux container",
        file=sys.stderr,
    )
    sys.exit(2)
