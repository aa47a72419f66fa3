"""The error of this package: one sentence that names the fault and its fix."""

import re
import reprlib

# After :// an @ before any of / ? #, or a colon without a port. A password may hold what should be
# quoted: the login goes up to the last @ before a query, else up to the last one.
_LOGIN = re.compile(r"://(?=[^/?#\s]*@|[^/?#\s:]*:(?!\d*([/?#\s]|$)))([^?#\s]*@|\S*@)")
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


class DataError(ValueError):
    """A data set, or an option that must fit it, cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(without_login(message)))


def printable(text: str) -> str:
    """Escape what is not UTF-8, as in file names: printing fails, and OpenCV crashes on it."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_login(text: str) -> str:
    """Replace the user names and passwords of addresses in a text by ``***``."""
    return _LOGIN.sub("://***@", text)


def shown(value: object) -> str:
    """Return a short form of a file's value for a message, however long or deep it is."""
    return _shortened.repr(value)
