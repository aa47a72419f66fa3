"""Pin every package of the environment in pyproject.toml, also what other packages need.

    python .ci/pins.py              # keep the versions, add what is new, drop what nothing needs
    python .ci/pins.py --upgrade    # the newest version of each

The pins serve each platform and Python that the project supports, and hold no index address.
"""

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
LIST = re.compile(r"(?<=\nconstraint-dependencies = \[\n).*?(?=^\])", re.DOTALL | re.MULTILINE)
COMMAND = "uv pip compile -q --universal --python-version 3.11 --all-extras --group dev --no-annotate --no-header"


def main() -> None:
    """Resolve the requirements under the pins that are there, or under none; write the result."""
    if sys.argv[1:] == ["--upgrade"]:
        PROJECT.write_text(LIST.sub("", PROJECT.read_text(), 1))
    compiled = subprocess.run([*COMMAND.split(), str(PROJECT)], stdout=subprocess.PIPE, text=True, check=True).stdout
    pins = "".join(f'    "{line}",\n' for line in compiled.splitlines())
    PROJECT.write_text(LIST.sub(lambda _: pins, PROJECT.read_text(), 1))


if __name__ == "__main__":
    main()
