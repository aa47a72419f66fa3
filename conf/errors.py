"""Errors that end a run with one sentence: what is wrong, and how to fix it."""

import re
import shlex
import shutil
import sys


class TrainError(RuntimeError):
    """The training cannot start or continue with these options."""


class DistributedError(RuntimeError):
    """Ranks did not find each other, lost one, or must end because one failed."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or a file is not an intact checkpoint of ours."""


def install_command(*packages: str) -> str:
    """The command that adds packages to this environment.

    Unlike ``uv sync --extra``, it keeps what is there: torch's CPU wheels, other extras.
    """
    by_uv, by_pip = ["uv", "pip", "install", "--python", sys.executable], [sys.executable, "-m", "pip", "install"]
    return shlex.join([*(by_uv if shutil.which("uv") else by_pip), *packages])


def first_line(error: BaseException) -> str:
    """The first sentence of ``error``, without torch's source position and stack."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". ")[0].rstrip(". ")
