"""Turn the options of another system into an experiment of this project.

    python -m scripts.migrate args.yaml out=mine.yaml            # Ultralytics
    python -m scripts.migrate opt.yaml hyp.yaml out=mine.yaml    # YOLOv5
    python -m scripts.migrate obj.data my.cfg out=mine.yaml      # Darknet
    python -m scripts.migrate yolov5_s.py out=mine.yaml          # MMYOLO; the file is not run
    python train.py experiment=mine.yaml

Comments say which options differ in meaning, and list those without a counterpart.
"""

from __future__ import annotations

import os
from pathlib import Path

from conf.failures import ConfigError
from conf.schema_tools import MigrateConfig
from data.formats.set_files import YAML_SUFFIXES, load_yaml


def migrate(config: MigrateConfig) -> str:
    """Print the experiment, or write it to ``out``; return its text.

    Raises ConfigError if ``out`` exists or the files are of no known system, DataError and
    ModelError for files that cannot be read.
    """
    from scripts.migrate.darknet import from_darknet  # these import numpy, which --help does without
    from scripts.migrate.mmyolo import from_mmyolo
    from scripts.migrate.ultralytics import from_ultralytics

    files = [Path(os.path.expanduser(name)) for name in config.files]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise ConfigError(f"files: there is no {missing[0]}. fix: name the files of the other system")
    if config.out is not None and Path(config.out).exists():
        raise ConfigError(f"out={config.out} exists. fix: name another file")
    by_suffix = {path.suffix.lower(): path for path in files}
    if by_suffix.keys() == {".data", ".cfg"}:
        recipe = from_darknet(by_suffix[".cfg"], by_suffix[".data"])
    elif by_suffix.keys() == {".py"} and len(files) == 1:
        recipe = from_mmyolo(files[0])
    elif by_suffix.keys() <= set(YAML_SUFFIXES):
        recipe = from_ultralytics({key: value for path in files for key, value in load_yaml(path).items()}, files[0])
    else:
        known = (
            "args.yaml, opt.yaml and hyp.yaml, a .cfg with its .data (whose images make the epochs), or MMYOLO's .py"
        )
        raise ConfigError(f"{files[0]} is not enough, or of no known system. fix: {known}")
    text = recipe.text(" and ".join(path.name for path in files))
    if config.out is not None:
        Path(config.out).write_text(text, encoding="utf-8")
    print(text if config.out is None else f"wrote {config.out}: python train.py experiment={config.out}")
    return text
