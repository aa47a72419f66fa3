"""Which classes of a data set are used, and in which order."""

from __future__ import annotations

import difflib
from pathlib import Path

from data.errors import DataError


def choose_classes(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """The classes, id to name, that ``names`` holds, in that order; all of them where it is ``None``.

    Raises ``DataError`` where a name is not among those of ``path``.
    """
    if names is None:
        return by_id
    id_of = {name: number for number, name in by_id.items()}
    for name in names:
        if name not in id_of:
            near = difflib.get_close_matches(name, id_of, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its categories are {', '.join(id_of)}."
            raise DataError(
                f"data.names holds {name!r}, which is no category of {path}: {hint} fix: correct data.names"
            )
    return {id_of[name]: name for name in names}
