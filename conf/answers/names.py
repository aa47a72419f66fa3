"""What other YOLO programs and Darknet call an option, a value or a file, and what it is here.

Names that differ from ours by a few letters only are found without a table.
"""

from __future__ import annotations

from pathlib import Path

import yaml

TABLE: dict[str, str] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
KEYS = {name: keys.split() for names, keys in TABLE.items() for name in names.split()}

# Values of other programs as regular expressions, by the last word of the key.
VALUES = {
    "device": {r"gpu|(cuda:)?\d+(,\d+)*": "cuda"},
    "precision": {"true": "auto", "false|fp32|32": "float32", "half|fp16|16": "float16", "bf16": "bfloat16"},
    "cache": {"true": "ram", "false": "none"},
    "resume": {"true": "auto"},
}

# What takes a file, by its suffix: the first key that a program has.
FILES = {
    ".cfg": ("model.cfg",),
    ".weights": ("weights", "model.weights"),
    ".pt": ("ckpt", "model.weights"),
    ".pth": ("model.weights",),
}
