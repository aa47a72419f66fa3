"""What ``python scripts/<name>.py`` finds in place of the package ``conf``: where to start it."""

import shlex
import sys
from pathlib import Path

_command = shlex.join(["python", "-m", f"scripts.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
print(f"error: {sys.argv[0]} is started as a module, in the folder above.\nfix: {_command}", file=sys.stderr)
raise SystemExit(2)
