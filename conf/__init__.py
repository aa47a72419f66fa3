"""The options there are, how a command line becomes those of a program, and errors of one sentence.

The import refuses Windows, where the signals and locks that the project needs do not exist.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

from data.errors import UserError

CONF_DIR = Path(__file__).parent  # a YAML file for each program, a folder for each group (data=, ...)
REPOSITORY = CONF_DIR.parent


class ConfigError(UserError, ValueError):
    """The command line or a YAML file asks for something that does not exist or does not fit."""


class TrainError(UserError, RuntimeError):
    """The training cannot start or continue with these options."""


class DistributedError(UserError, RuntimeError):
    """Ranks did not find each other, lost one, or must end because one failed."""


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be written, or a file is not an intact checkpoint of ours."""


def install_command(*packages: str) -> str:
    """The command that adds packages to this environment and keeps what is there."""
    by_uv = ["uv", "pip", "install", "--python", sys.executable]
    by_pip = [sys.executable, "-m", "pip", "install"]
    return shlex.join([*(by_uv if shutil.which("uv") else by_pip), *packages])


def first_line(error: BaseException) -> str:
    """The first sentence of ``error``, without torch's source position and stack."""
    cause = error.__context__
    if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause.strerror:
        return cause.strerror  # torch tells its own positions in a file instead
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". ")[0].rstrip(". ")


if sys.platform == "win32":
    _sentence = "this project runs on Linux and macOS, not on Windows"
    _fix = "WSL 2 (wsl --install), or a Linux container"
    _main = Path(getattr(sys.modules["__main__"], "__file__", None) or "-").absolute()
    _is_ours = _main.parent in (REPOSITORY, REPOSITORY / "scripts") or _main.parent.name == "hydra_yolov3_spp"
    if not _is_ours and "hydra_yolov3_spp.__main__" not in sys.modules:
        raise ImportError(f"{_sentence}. fix: {_fix}")
    print(f"error: {_sentence}.\nfix: {_fix}", file=sys.stderr)  # of ours: no traceback
    sys.exit(2)
