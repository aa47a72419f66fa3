"""The error of this package: one sentence that names the fault and its fix."""

import re
import reprlib

# After ://, an @ before any of / ? #, or a colon without a port. A password may contain what should
# be quoted, so the login ends at the last @ before a query, else at the last one.
_LOGIN = re.compile(r"://(?=[^/?#\s]*@|[^/?#\s:]*:(?!\d*([/?#\s]|$)))([^?#\s]*@|\S*@)")
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


class DataError(ValueError):
    """A data set, or an option that must fit it, cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(without_login(message)))


def printable(text: str) -> str:
    """Escape what is not Unicode, as in file names of other encodings; it cannot be printed."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_login(text: str) -> str:
    """Replace user names and passwords in addresses by ``***``."""
    return _LOGIN.sub("://***@", text)


def shown(value: object) -> str:
    """Shorten a value from a file, however long or deep, for a message."""
    return _shortened.repr(value)
