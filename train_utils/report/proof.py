"""``proof.json``: what a run was made of and what it gave, with digests to check both by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_utils.errors import TrainError
from train_utils.run.checkpoint_files import FOLDER
from train_utils.run.plain_data import digest_of
from train_utils.run.whole_files import whole_file

FILE, TABLE = "proof.json", "proof_data.csv"
BEST, LAST, PREVIOUS = (f"{FOLDER}/{name}.pt" for name in ("best", "last", "last.previous"))
UNKNOWN = "unknown"


def read_proof(folder: Path) -> dict[str, Any]:
    """Read ``proof.json``, its digest unchecked. Raises TrainError if it is absent or damaged."""
    path = folder / FILE
    if not path.is_file():
        raise TrainError(f"{folder} holds no {FILE}: no run, or one of an earlier version. fix: name a run's folder")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainError(f"{path} cannot be read ({error}). fix: restore it") from error


def write_proof(folder: Path, proof: dict[str, Any]) -> None:
    """Write ``proof.json`` with its own digest, whole or not at all. Raises OSError."""
    with whole_file(folder / FILE) as file:
        json.dump(proof | {"digest": digest_of_proof(proof)}, file, indent=1)


def digest_of_proof(proof: Mapping[str, Any]) -> str:
    """A SHA-256 of everything else in a proof."""
    return digest_of({key: value for key, value in proof.items() if key != "digest"})
