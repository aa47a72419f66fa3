"""The files that name the images and classes of a YOLO set: data.yaml or Darknet's obj.data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from data.errors import DataError, shown
from data.files.text import read_lines

YAML_SUFFIXES = (".yaml", ".yml")
SET_SUFFIXES = (*YAML_SUFFIXES, ".data")
USUAL_NAMES = ("data.yaml", "data.yml", "obj.data")


def find_set_file(root: Path) -> Path:
    """Find the data.yaml or obj.data of a folder. Raises ``DataError`` where there is none."""
    for name in USUAL_NAMES:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"data.root: {root} holds no {' or '.join(USUAL_NAMES)}. fix: data.root=<such a file>, or "
        "data.train.annotations=<a folder of images, or a list of them>"
    )


class _WithoutAliases(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses aliases: a few lines of them are billions of values."""

    def compose_node(self, *arguments: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} holds an alias")
        return super().compose_node(*arguments)


def load_yaml(path: Path, aliases: bool = False) -> dict[str, Any]:
    """Read the keys of a data.yaml, or another YAML file. Raises ``DataError`` where it is none."""
    try:
        content = yaml.load(path.read_bytes(), yaml.SafeLoader if aliases else _WithoutAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: e.g. a date with a 13th month
        raise DataError(f"{path} is not valid YAML ({' '.join(str(error).split())}). fix: correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys. fix: name a data.yaml with train, val and names")
    return content


def names_of_yaml(content: dict[str, Any], path: Path) -> list[str] | None:
    """The class names of a data.yaml: a list, or a dictionary with keys 0, 1, ... or "0", "1", ...

    ``None`` where it has none. Raises ``DataError`` for unusable ones.
    """
    names = content.get("names")
    if names is None:
        return None
    if isinstance(names, dict):
        names = {int(key) if isinstance(key, str) and key.isdecimal() else key: name for key, name in names.items()}
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(
                f"{path}: the keys of names are {shown(list(names))}. fix: number them from 0 on, none left out"
            )
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise DataError(f"{path} has names={shown(names)}. fix: make it a list with at least one class")
    for name in names:
        # YAML reads yes, no, on and off as booleans.
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise DataError(f"{path} has the class name {shown(name)}. fix: make it a text, in quotes")
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise DataError(f"{path} has two classes of the name {twice!r}. fix: give each its own name")
    count = content.get("nc", len(texts))
    if count != len(texts):
        raise DataError(f"{path} has nc={shown(count)}, but {len(texts)} names. fix: correct one of them")
    return texts


def darknet_options(path: Path) -> dict[str, str]:
    """Read the ``key = value`` lines of Darknet's obj.data. Raises ``DataError`` for others."""
    options = {}
    for number, line in enumerate(read_lines(path, "Darknet's obj.data, with train=, valid= and names="), start=1):
        text = line.strip()
        if text and text[0] not in "#;":
            key, found, value = (part.strip() for part in text.partition("="))
            if not found:
                raise DataError(f"{path}:{number} is {shown(text)} instead of key = value. fix: correct the line")
            options[key] = value
    return options


def darknet_path(name: str, path: Path, base: Path) -> Path:
    """Find a file that the obj.data at ``path`` names, in the first of ``darknet_folders``.

    Darknet itself starts at the current folder, which usually holds ``data/obj.data``. Raises
    ``DataError`` where there is none.
    """
    name = name.replace("\\", "/")
    tried = list(dict.fromkeys(folder / name for folder in darknet_folders(path, base)))
    place = next((candidate for candidate in tried if candidate.exists()), None)
    if place is None:
        looked = ", ".join(map(str, tried))
        raise DataError(f"{path} names {name}, but there is no such file (looked for {looked}). fix: correct its path")
    return place


def darknet_folders(path: Path, base: Path) -> list[Path]:
    """The folders that paths in obj.data, and in the lists it names, may be relative to."""
    return [path.parent, path.parent.parent, base, Path.cwd()]
