"""Turn boxes in a CSV file into a COCO json.

    python -m scripts.convert_data csv=boxes.csv images=pictures out=boxes.json
    python -m scripts.convert_data csv=open-images.csv images=train names=classes.csv out=train.json

The id of an annotation is the number of its row, so that later messages name the row.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("convert_data")
    raise SystemExit

import json
from pathlib import Path

from conf.failures import ConfigError
from conf.schema_tools import ConvertDataConfig
from data.formats.csv_boxes import read_csv
from data.formats.csv_to_coco import to_coco
from train_utils.shell import option


def convert(config: ConvertDataConfig) -> Path:
    """Write the json and return its path. Raises ConfigError if ``out`` exists, or DataError."""
    path, out = Path(config.csv), Path(config.out)
    images = Path(config.images) if config.images is not None else path.parent
    if not images.is_dir():
        raise ConfigError(f"images={images} is not a folder. fix: name the folder of the images")
    if out.exists():
        raise ConfigError(f"out={out} exists. fix: name another file")
    names = Path(config.names) if config.names is not None else None
    content = to_coco(read_csv(path, config.corners_in_bbox), path, images, names, config.empty)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content), encoding="utf-8")
    classes = ", ".join(category["name"] for category in content["categories"][:10])
    counts = f"{len(content['images'])} images, {len(content['annotations'])} boxes"
    print(f"{out}: {counts}, {len(content['categories'])} classes: {classes}")
    paths = option("data.train.annotations", out.absolute()), option("data.train.images", images.absolute())
    print(f"python train.py data=coco {option('data.name', out.stem)} data.split=0.1 {' '.join(paths)}")
    return out
