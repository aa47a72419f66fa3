"""Which classes of a data set are used, in which order, and which files name them."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from data.errors import DataError
from data.files.text import read_lines
from data.formats.set_files import YAML_SUFFIXES, darknet_options, darknet_path, load_yaml, names_of_yaml

NAME_FILES = "a text file with one class per line, a data.yaml, Darknet's obj.data or a COCO json"


def choose_classes(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """Select the classes (id to name) in ``names``, in its order; ``None`` takes all.

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
                f"data.names holds {name!r}, which is not a category of {path}: {hint} fix: correct data.names"
            )
    return {id_of[name]: name for name in names}


def read_names(path: Path) -> tuple[list[str], list[int] | None]:
    """Class names of a file; for a COCO json, sorted by category id, the ids as well.

    The suffix tells which of ``NAME_FILES`` it is. Raises ``DataError`` where it is none.
    """
    suffix = path.suffix.lower()
    ids = None
    try:
        if suffix == ".json":
            categories = json.loads(path.read_bytes())["categories"]
            by_id = {int(category["id"]): str(category["name"]) for category in categories}
            ids = sorted(by_id)
            names = [by_id[number] for number in ids]
        elif suffix in YAML_SUFFIXES:
            names = names_of_yaml(load_yaml(path), path) or []
        elif suffix == ".data":
            options = darknet_options(path)
            if "names" not in options:
                raise DataError(f"{path} has no names=. fix: add the line, or name {NAME_FILES}")
            return _lines_of(darknet_path(options["names"], path, path.parent)), None
        else:
            names = _lines_of(path)
    except OSError as error:
        raise DataError(f"the class names {path} cannot be read ({error.strerror}). fix: name {NAME_FILES}") from error
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a list of class names. fix: name {NAME_FILES}") from error
    if not names:
        raise DataError(f"{path} holds no class names. fix: name {NAME_FILES}")
    return names, ids


def _lines_of(path: Path) -> list[str]:
    """The lines of a text file, a class each. Empty ones are allowed at the end only."""
    lines = [line.strip() for line in read_lines(path, "obj.names, with one class per line")]
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines:
        raise DataError(
            f"{path}:{lines.index('') + 1} is empty, but each line counts as a class. fix: write a name, or remove it"
        )
    return lines
