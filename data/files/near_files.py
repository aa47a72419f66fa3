"""Suggest an existing file for a missing one: another case or another image suffix."""

from __future__ import annotations

import os

from data.files.headers import IMAGE_SUFFIXES


class NearFiles:
    """Find the file that a name may have meant. Lists each folder once."""

    def __init__(self) -> None:
        self._listings: dict[str, dict[str, str]] = {}

    def hint(self, path: str, any_suffix: bool = True) -> str:
        """The end of a sentence about a missing file: ", but there is ...", or nothing."""
        near = self.other_case(path) or (self._other_suffix(path) if any_suffix else None)
        if near is None or near == path:  # equal: a folder or a broken link
            return ""
        here, there = os.path.split(path), os.path.split(near)
        return f", but there is {there[1] if here[0] == there[0] else near}"

    def other_case(self, path: str) -> str | None:
        """The existing path that differs in upper and lower case only."""
        folder, name = os.path.split(path)
        if not name or "\0" in path:
            return folder if os.path.isdir(folder) else None
        if not os.path.isdir(folder):
            above = self.other_case(folder) if folder != path else None
            if above is None:
                return None
            folder = above
        found = self._names(folder).get(name.lower())
        return os.path.join(folder, found) if found is not None else None

    def _other_suffix(self, path: str) -> str | None:
        folder, name = os.path.split(path)
        names, stem = self._names(folder), os.path.splitext(name.lower())[0]
        found = next((names[stem + suffix] for suffix in sorted(IMAGE_SUFFIXES) if stem + suffix in names), None)
        return os.path.join(folder, found) if found is not None else None

    def _names(self, folder: str) -> dict[str, str]:
        """The entries of a folder by their names in lower case."""
        if folder not in self._listings:
            try:
                self._listings[folder] = {name.lower(): name for name in os.listdir(folder)}
            except (OSError, ValueError):  # ValueError: an impossible name
                self._listings[folder] = {}
        return self._listings[folder]
