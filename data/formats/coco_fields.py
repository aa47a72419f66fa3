"""Read the fields of a COCO json's records; convert unambiguous ones of another type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from data.errors import DataError, shown
from data.index.source import Findings

MAX_INT = 2**63 - 1
_WHOLE = re.compile(r"-?[0-9]{1,19}(\.0+)?")


class Fields:
    """Read the fields of one file's records; count those of another type in ``notes``."""

    def __init__(self, path: Path, notes: Findings) -> None:
        self.path, self.notes = path, notes

    def text(self, record: dict[str, Any], row: int, key: str, what: str) -> str:
        """A string. Raises ``DataError`` for anything else."""
        value = record.get(key)
        if type(value) is not str:
            raise self._wrong(record, row, key, what, "a text")
        return value

    def integer(self, record: dict[str, Any], row: int, key: str, what: str) -> int:
        """A 64-bit integer, or one written as "12" or 12.0. Raises ``DataError`` otherwise."""
        value = record.get(key)
        if type(value) is not int:  # not isinstance: true is an int to Python
            whole = _whole(value)
            if whole is None:
                raise self._wrong(record, row, key, what, "a whole number")
            example = f"{what} {shown(record.get('id', row))} has {key}={shown(value)}"
            self.notes.add("whole numbers written as text or with a fraction", [example])
            value = whole
        if not -MAX_INT <= value <= MAX_INT:
            raise DataError(f"{self.path}: an {what} has {key}={shown(value)}. fix: make it a number of 64 bits")
        return value

    def _wrong(self, record: dict[str, Any], row: int, key: str, what: str, expected: str) -> DataError:
        name = shown(record.get("id", row))
        return DataError(f"{self.path}: {what} {name} has {key}={shown(record.get(key))}. fix: make it {expected}")


def _whole(value: Any) -> int | None:
    """The integer that a string or float stands for exactly, else ``None``."""
    if type(value) is float and abs(value) <= 2**53 and value.is_integer():
        return int(value)
    if type(value) is str and _WHOLE.fullmatch(value):
        return int(value.partition(".")[0])
    return None


def is_number(value: Any) -> bool:
    """Whether a float can hold it: neither a bool nor an int with a thousand digits."""
    return type(value) is float or (type(value) is int and -MAX_INT <= value <= MAX_INT)
