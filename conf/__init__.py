"""Configuration: the YAML tree, its types (schema.py) and the border where it becomes plain objects
(entry.py).
"""

import sys

if sys.platform == "win32":  # before anything else of this project, which needs POSIX signals, is imported
    print(
        "error: this program runs on Linux and macOS, not on Windows. fix: run it in WSL 2 (wsl --install) or in a "
        "Linux container",
        file=sys.stderr,
    )
    sys.exit(2)
