"""Collect the options of an experiment from another system, and write it as YAML."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.migrate.python_file import UnreadError


class Recipe:
    """Options of train.py by dotted key, and of groups by ``/group``.

    The system's YAML table beside this file has the counterparts of its options (``same``, and
    ``words`` for single values), options to set in any case (``always``), notes, and its options
    that do not concern training (``elsewhere``).
    """

    def __init__(self, system: str) -> None:
        self.table = yaml.safe_load(Path(__file__).with_name(f"{system}.yaml").read_text(encoding="utf-8"))
        self.values: dict[str, Any] = dict(self.table["always"])
        self.notes: dict[str, str] = {}
        self.left: list[str] = []

    def set(self, key: str, value: Any, note: str = "") -> None:
        """Set an option; ``note`` says how it differs."""
        self.values[key] = value
        if note or key in self.table["notes"]:
            self.notes[key] = note or self.table["notes"][key]

    def take(self, options: Mapping[str, Any]) -> None:
        """Set the counterparts of these options; list those that have none, unless they are off."""
        for key, value in options.items():
            meant = self.table["words"].get(key, {}).get(str(value).lower())
            for ours, word in (meant or {}).items():
                self.set(ours, word)
            note = self.table["notes"].get(key, "")
            if key in self.table["same"] and value is not None and not isinstance(value, UnreadError):
                self.set(self.table["same"][key], value, note)
            elif value and meant is None and key not in self.table["elsewhere"].split():
                self.left.append(f"{key}: {value}" + f" ({note})" * bool(note))

    def text(self, origin: str) -> str:
        """The experiment as YAML."""
        tree: dict[str, Any] = {}
        for key, value in sorted(self.values.items()):
            section, _, name = key.rpartition(".")
            inner = tree
            for part in filter(None, section.split(".")):
                inner = inner.setdefault(part, {})
            if not key.startswith("/"):
                inner[name] = value
        chosen = [{f"override {key}": value} for key, value in self.values.items() if key.startswith("/")]
        groups = [f"  - {yaml.safe_dump(each, width=math.inf, allow_unicode=True).strip()}" for each in chosen]
        lines = ["# @package _global_", f"# From {origin}, by scripts.migrate.", "defaults:", *groups, "  - _self_", ""]
        lines += [yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)]
        differing = [f"{key}: {note}" for key, note in self.notes.items()]
        for title, entries in (("Differs in meaning", differing), ("Without a counterpart", self.left)):
            lines += [f"# {title}:"] * bool(entries)
            lines += [
                f"# {line}" for each in entries for line in textwrap.wrap(f"- {each}", 96, subsequent_indent="  ")
            ]
        return "\n".join(lines) + "\n"
