"""Find anchors that fit the boxes of a data set.

    python -m scripts.anchors data=bccd model=yolov3-tiny image_size=320 out=mine/model/cells.yaml
    python train.py --config-dir mine data=bccd model=cells

It runs k-means with IoU as the distance, refines the result at random, and prints the recall before
and after.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("anchors")
    raise SystemExit

import shlex
from pathlib import Path

import numpy as np

from conf import ConfigError
from conf.network import load_network
from conf.schema_tools import AnchorsConfig
from data import open_annotations
from data.anchors import (
    Sizes,
    best_overlaps,
    kmeans_anchors,
    nearest_anchors,
    network_sizes,
    recall,
    refine_anchors,
)
from models import Darknet
from train_utils.options import option
from train_utils.progress import Progress


def find_anchors(config: AnchorsConfig) -> Sizes:
    """Find, print and return anchors (k, 2) in pixels, as many as the model has.

    With ``out`` it also writes the override file and a picture. Raises ConfigError if the data set
    has too few boxes.
    """
    network = load_network(config.model)
    current = np.array(Darknet(network).heads[0].all_anchors)
    sizes = network_sizes(open_annotations(config.data, "train"), config.image_size)
    generator = np.random.default_rng(config.seed)
    sample = sizes if len(sizes) <= config.sample else sizes[generator.choice(len(sizes), config.sample, replace=False)]
    try:
        start = kmeans_anchors(sample, len(current), generator)
    except ValueError as error:
        raise ConfigError(f"data={config.data.name}: {error}. fix: a model with fewer anchors, or more data") from error

    with Progress(config.rounds, "refine", enabled=True, unit="rounds") as progress:

        def report(done: int, fitness: float) -> None:
            progress.at(done, lambda: {"mean IoU": f"{fitness:.4f}"})

        found = refine_anchors(sample, start, config.rounds, generator, report).round(1)
    print(f"{len(sizes):,} boxes of data={config.data.name} at {config.image_size} pixels")
    for name, anchors in ((f"{config.model.cfg} as it is", current), ("k-means", start), ("refined", found)):
        print(describe(name, sizes, anchors, config.min_iou))
    if config.out is not None:
        path = Path(config.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(override(found, config), encoding="utf-8")
        draw(sizes, current, found, path.with_suffix(".png"))
        folder = path.absolute().parent.parent
        words = f"{shlex.quote(str(folder))} {option('model', path.stem)}"
        print(f"wrote {path} and {path.with_suffix('.png')}: train.py --config-dir {words}")
    return found


def describe(name: str, sizes: Sizes, anchors: Sizes, min_iou: float) -> str:
    """Mean best overlap and recall, then the anchors with their shares of the boxes."""
    shares = np.bincount(nearest_anchors(sizes, anchors), minlength=len(anchors)) / len(sizes)
    listed = "  ".join(f"{w:g},{h:g} ({share:.0%})" for (w, h), share in zip(anchors.round(1), shares, strict=True))
    return (
        f"{name}: mean best IoU {best_overlaps(sizes, anchors).mean():.3f}, "
        f"recall {recall(sizes, anchors, min_iou):.4f} at IoU {min_iou:g}, {recall(sizes, anchors, 0.5):.4f} at 0.5\n"
        f"  {listed}"
    )


def override(anchors: Sizes, config: AnchorsConfig) -> str:
    """The text of a YAML file for the group ``model``: the configured model with these anchors."""
    chosen = Path(config.model.cfg)
    base = "base" if chosen.suffix == ".cfg" else config.model.cfg
    cfg = f"cfg: {chosen.absolute()}\n" if chosen.suffix == ".cfg" else ""
    pairs = ", ".join(f"[{width:g}, {height:g}]" for width, height in anchors)
    about = f"# Anchors for data={config.data.name} at {config.image_size} pixels, found by scripts/anchors.py.\n"
    return f"{about}defaults:\n  - {base}\n  - _self_\n{cfg}anchors: [{pairs}]\n"


def draw(sizes: Sizes, before: Sizes, after: Sizes, out: Path) -> None:
    """Draw all box sizes and the anchors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    shown = sizes[:: max(1, len(sizes) // 20000)]
    axis.scatter(shown[:, 0], shown[:, 1], s=2, alpha=0.2, color="grey", label="boxes")
    axis.scatter(before[:, 0], before[:, 1], marker="x", color="tab:blue", label="anchors before")
    axis.scatter(after[:, 0], after[:, 1], marker="+", s=90, color="tab:red", label="anchors found")
    axis.set(xscale="log", yscale="log", xlabel="width, pixels", ylabel="height, pixels")
    axis.legend()
    figure.savefig(out, dpi=110)
