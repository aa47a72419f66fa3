"""Find anchors that fit the boxes of a data set.

    python -m scripts.anchors data=bccd model=yolov3-tiny image_size=320 out=mine/model/cells.yaml
    python train.py --config-dir mine data=bccd model=cells

Runs k-means with IoU as the distance, refines the result at random, and prints the recall of the
anchors before and after.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("anchors"))

import shlex
from pathlib import Path

import numpy as np

from conf import ConfigError, schema
from conf.cli import run_files
from conf.options import option
from data import open_annotations
from data.anchors import SEED, Sizes, kmeans_anchors, match_anchors, network_sizes, recall, refine_anchors
from data.errors import as_started
from data.progress import log
from train_utils import auto, build

SEARCHED_BOXES = 50_000  # a sample for the search; recall and IoU are those of all boxes


def find_anchors(config: schema.AnchorsConfig) -> Sizes:
    """Find and print the anchors that the heads use; return all of the model (k, 2) in pixels.

    With ``out`` it also writes the options of the model. Raises ConfigError if the data set has too
    few boxes, or if the [yolo] sections list different anchors.
    """
    if config.out is not None:
        run_files.refuse_existing(Path(config.out), "out")
    chosen, slots = auto.anchors_of(build.build_meta_model(config.model).heads)
    current = chosen[slots]
    annotations = open_annotations(config.data, "train")
    sizes = network_sizes(annotations, config.image_size)
    searched = network_sizes(annotations, config.image_size, SEARCHED_BOXES)
    generator = np.random.default_rng(SEED)
    try:
        start = kmeans_anchors(searched, len(current), generator)
    except ValueError as error:
        raise ConfigError(f"data={config.data.name}: {error}", "a model with fewer anchors, or more data") from error
    refined = refine_anchors(searched, start, config.rounds, generator).round(1)
    log.info(f"{len(sizes):,} boxes of data={config.data.name} at {config.image_size} pixels")
    found = {f"{config.model.cfg} as it is": current, "k-means": start, "refined": refined}
    for name, anchors in found.items():
        overlaps, nearest = match_anchors(sizes, anchors)
        shares = np.bincount(nearest, minlength=len(anchors)) / len(sizes)
        listed = [f"{w:g},{h:g} ({share:.0%})" for (w, h), share in zip(anchors.round(1), shares, strict=True)]
        recalls = [f"{recall(sizes, anchors, iou):.4f} at IoU {iou:g}" for iou in (config.min_iou, 0.5)]
        log.info(f"{name}: mean best IoU {overlaps.mean():.3f}, recall {', '.join(recalls)}\n  {'  '.join(listed)}")
    chosen[slots] = refined
    if config.out is not None:
        path = Path(config.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        cfg, pairs = Path(config.model.cfg), ", ".join(f"[{width:g}, {height:g}]" for width, height in chosen)
        base = f"base\n  - _self_\ncfg: {cfg.absolute()}" if cfg.suffix == ".cfg" else f"{cfg}\n  - _self_"
        about = f"# Anchors for data={config.data.name} at {config.image_size} pixels, found by scripts/anchors.py."
        path.write_text(f"{about}\ndefaults:\n  - {base}\nanchors: [{pairs}]\n", encoding="utf-8")
        folder = shlex.quote(str(path.absolute().parent.parent))
        log.info(f"wrote {path}: {as_started('python train.py')} --config-dir {folder} {option('model', path.stem)}")
    return chosen
