"""Read the training options of Darknet: the [net] section of a .cfg, and its .data file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from data.formats.set_files import darknet_options
from data.formats.yolo_files import find_images
from models.cfg.parse import load_cfg
from scripts.migrate.recipe import Recipe


def from_darknet(path: Path, data: Path) -> Recipe:
    """The options of ``darknet detector train <data> <path>``.

    Darknet's loss is a sum over each image and a mean over the batch, like loss=darknet, so the
    learning rate is the same. Raises DataError, ModelError.
    """
    cfg = load_cfg(path)
    given: dict[str, Any] = {key: yaml.safe_load(value) for key, value in cfg.net.options.items()}
    heads: dict[str, str] = {}
    for layer in cfg.layers:
        heads |= layer.options if layer.kind == "yolo" else {}
    recipe, pop = Recipe("darknet"), given.pop
    recipe.set("model.cfg", str(path.absolute()))
    batch, passes, steps = given.get("batch", 1), pop("subdivisions", 1), pop("max_batches", 0)
    if passes > 1 and batch % passes == 0:
        recipe.set("train.device_batch_size", batch // passes)
    recipe.set("train.image_size", max(pop("width", 416), pop("height", 416)))
    if steps:
        images = sum(map(len, find_images(data, data.parent, "train").groups))
        epochs = math.ceil(steps * batch / max(images, 1))
        recipe.set("train.epochs", epochs, f"max_batches={steps} steps of {batch} of the {images} images")
    else:
        recipe.left.append("max_batches: the .cfg has none, so train.epochs is that of train.py")
    recipe.set("optim.burn_in_momentum", given.get("momentum", 0.9))
    if given.get("policy") == "steps":
        scales = [float(part) for part in str(given.get("scales", 1)).split(",") if part.strip()]
        recipe.set("optim.final_lr_ratio", round(math.prod(scales), 10))
    for key, ours in (("saturation", "augment.hsv_saturation"), ("exposure", "augment.hsv_value")):
        most = pop(key, 1)
        recipe.set(
            ours, round(min(1.0, max(0.0, most - 1)), 6), f"{key}={most}: a factor up to it, or 1 over it, there"
        )
    for key in ("translate", "scale"):
        recipe.set(f"augment.{key}", float(heads.get("jitter", 0.2)), "jitter moves each edge by this share there")
    recipe.take({"letter_box": 0, "random": float(heads.get("random", 0)), **given})
    recipe.set("/data", str(data.absolute()))
    recipe.take(darknet_options(data))
    return recipe
