"""``loggers.json`` in the run folder: the ids by which a resumed run finds its runs again."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock

from train_utils.run.whole_files import whole_file

_lock = Lock()  # each logger starts in its own thread


def read_id(folder: Path, service: str) -> str | None:
    """The id of this run at ``service``; None if it has none yet. Raises OSError, ValueError."""
    found = _read(folder).get(service)
    return None if found is None else str(found)


def write_id(folder: Path, service: str, own_id: str) -> str:
    """Keep and return the id of this run at ``service``. Raises OSError, ValueError."""
    with _lock:
        ids = _read(folder) | {service: own_id}
        with whole_file(folder / "loggers.json") as file:
            json.dump(ids, file)
    return own_id


def _read(folder: Path) -> dict[str, str]:
    path = folder / "loggers.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
