"""Text files that list something, line by line."""

from __future__ import annotations

from pathlib import Path

from data.errors import DataError


def read_lines(path: Path, example: str) -> list[str]:
    """The lines of a UTF-8 text file; invalid bytes become surrogates, as in file names.

    Raises ``DataError``, proposing ``example``, where the file is not text.
    """
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:  # binary, or UTF-16
        raise DataError(f"{path} is not a text file in UTF-8. fix: name a list such as {example}")
    return content.decode("utf-8", "surrogateescape").splitlines()
