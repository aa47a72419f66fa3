"""The error of this package: one sentence that names the fault and its fix."""

import re
import reprlib
import unicodedata

# After ://, an @ before any of / ? #, or a colon without a port. A password may contain what should
# be quoted, so the login ends at the last @ before a query, else at the last one.
_LOGIN = re.compile(r"://(?=[^/?#\s]*@|[^/?#\s:]*:(?!\d*([/?#\s]|$)))([^?#\s]*@|\S*@)")
JOINERS = "\u200c\u200d"
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


class DataError(ValueError):
    """A data set, or an option that must fit it, cannot be used."""

    def __init__(self, message: str) -> None:
        # Of a loader's process, torch makes an error of several lines.
        super().__init__("\n".join(map(printable, without_login(message).split("\n"))))


def printable(text: str) -> str:
    """Escape what has no sign or is not Unicode: it could forge lines, or steer a terminal.

    Spaces and the joiners of Persian and Indian scripts stay. OpenCV and torch's memory-mapped
    files need Unicode, too.
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


def shown(value: object) -> str:
    """Shorten a value from a file, however long or deep, for a message."""
    return _shortened.repr(value)
