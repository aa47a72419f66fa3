"""Fetch published weights, or list them.

    python -m scripts.get_weights list
    python -m scripts.get_weights yolov4-tiny

``model.weights=coco`` and ``backbone`` fetch them on their own; this is for machines whose compute
nodes have no network. Files are stored in YOLO_HOME, by default ~/.cache/hydra-yolov3-spp.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("get_weights"))

from conf import schema
from conf.cli import run_files
from data.progress import log
from models.cfg import ZOO
from models.config import LICENCE, PUBLISHED

ROW = "  {:<22}{:<30}{:>12}{:>8}{:>7}  {:<15}{}"
TITLES = "model=", "AP", "parameters", "GFLOPs", "ms", "licence", "take it"


def get_weights(config: schema.GetWeightsConfig) -> None:
    """Fetch the weights called ``config.name``, or list all if that is ``list``."""
    if config.name == "list":
        for row in (TITLES, *([name, *network.row] for name, network in ZOO.items())):
            log.info(ROW.format(*row))
        log.info(f"sources: docs/train/pretrained.md\n\nweights in {run_files.weights_folder()}:")
    for entry in PUBLISHED:
        use = f"model={' or '.join(entry.networks)} model.weights={entry.alias}"
        if config.name == "list":
            here = "here" if (run_files.weights_folder() / entry.file_name).is_file() else ""
            size = f"{entry.size / 1e6:.0f} MB" if entry.size is not None else ""
            log.info(f"  {entry.name:<34}{size:>6}  {here:<6}{use}")
        elif config.name == entry.name:
            log.info(f"{run_files.fetch_weights(entry)} is here: {use}")
    if config.name == "list":
        log.info(LICENCE)
