"""The error of this package: one sentence for the user that names what is wrong and how to put it right."""

from __future__ import annotations

import reprlib

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


class DataError(ValueError):
    """A data set, or a setting that must fit it, cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text with escapes for file names that are not UTF-8: Python's form of those cannot be printed or logged."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """A value of a file as a message shows it: in short, however long or deep it is."""
    return _shortened.repr(value)
