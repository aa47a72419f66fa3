"""Errors for users: one sentence that names the fault, and its fix."""

import re
import reprlib
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

# After ://, an @ before any of / ? #, or a colon without a port. A password may contain what should
# be quoted, so the login ends at the last @ before a query, else at the last one.
_LOGIN = re.compile(r"://(?=[^/?#\s]*@|[^/?#\s:]*:(?!\d*([/?#\s]|$)))([^?#\s]*@|\S*@)")
JOINERS = "\u200c\u200d"
# As `python train.py`, `torchrun --nproc-per-node=2 train.py`, `python -m scripts.tune`.
_COMMAND = re.compile(r"(?:python|(torchrun [^\n]*?))(?: -m)? ((?:train|eval|predict|export)\.py|scripts\.\w+)\b")
_PACKAGE, _WORD = "hydra_yolov3_spp", "hydra-yolov3-spp"
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


class UserError(Exception):
    """A ``sentence`` that names a fault, and its ``fix``: what to type or to do, or ""."""

    def __init__(self, sentence: str, fix: str = "") -> None:
        # Of a loader's process, torch makes an error of several lines.
        self.sentence = "\n".join(map(printable, without_login(sentence).split("\n")))
        self.fix = printable(without_login(fix))
        super().__init__(f"{self.sentence}. fix: {self.fix}" if fix else self.sentence)


class DataError(UserError, ValueError):
    """A data set, or an option that must fit it, cannot be used."""


def of_killed_loader(error: BaseException) -> DataError | None:
    """The error for torch's of a dead worker, raised wherever a program is; else None."""
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in str(error):
        return None
    cause = f"({str(error).splitlines()[0]}), as by the kernel when memory runs out"
    fix = "fewer data.workers, a smaller batch or more memory, then resume="
    return DataError(f"a process that loads images was killed {cause}", fix)


def printable(text: str) -> str:
    """Escape what has no sign or is not Unicode: it could forge lines, or steer a terminal.

    Spaces and the joiners of Persian and Indian scripts stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in JOINERS or unicodedata.category(char) == "Zs" else ascii(char)[1:-1]
        for char in text
    )


def without_login(text: str) -> str:
    """Replace user names and passwords in addresses by ``***``."""
    return _LOGIN.sub("://***@", text)


def reason(error: BaseException) -> str:
    """Why the system refused: an OSError that a library raises may have no ``strerror``."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def shown(value: object) -> str:
    """Shorten a value from a file, however long or deep, for a message."""
    return _shortened.repr(value)


def from_here(path: Path | str) -> str:
    """``path`` from the current folder, where it is below it."""
    with suppress(OSError, ValueError):  # it may be gone, and then the whole path is right
        return str(Path(path).relative_to(Path.cwd()))
    return str(path)


def word_of(program: str) -> str:
    """What ``hydra-yolov3-spp`` calls ``train.py`` or ``scripts.check_data``."""
    return program.removeprefix("scripts.").removesuffix(".py").replace("_", "-")


def as_started(text: str) -> str:
    """``text`` with commands such as ``python train.py`` in the way this process was started."""
    started = Path(sys.argv[0])
    as_module = started.parts[-2:] == (_PACKAGE, "__main__.py")
    if not as_module and started.name != _WORD and Path(__file__).resolve().parents[2].name != _PACKAGE:
        return text  # in a clone
    start = f"python -m {_PACKAGE}" if as_module else _WORD
    return _COMMAND.sub(lambda found: f"{f'{found[1]} -m {_PACKAGE}' if found[1] else start} {word_of(found[2])}", text)
