"""Read the args.yaml of Ultralytics, or the opt.yaml and hyp.yaml of YOLOv5."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from conf import GROUPS_DIR
from conf.failures import ConfigError
from scripts.migrate.recipe import Recipe


def from_ultralytics(options: dict[str, Any], path: Path) -> Recipe:
    """The options of a run. Raises ConfigError for a task other than detection.

    There, a step accumulates as many batches as come nearest to ``nbs`` images.
    """
    given = {**options, **(options["hyp"] if isinstance(options.get("hyp"), dict) else {})}
    if given.get("task", "detect") != "detect":
        raise ConfigError(f"{path}: task={given['task']} is not detection. fix: only task=detect has a counterpart")
    if not {"epochs", "lr0"} & given.keys():
        raise ConfigError(f"{path} holds neither epochs nor lr0. fix: name args.yaml, or opt.yaml and hyp.yaml")
    recipe, pop = Recipe("ultralytics"), given.pop
    size = _step(recipe, given, path)
    recipe.set("augment.perspective", min(0.19, pop("perspective", 0) * size))
    recipe.set("augment.scale", min(0.99, pop("scale", 0.5)))
    if zoom := pop("multi_scale", None):
        part = 0.5 if zoom is True else zoom
        recipe.set("train.multi_scale", [1 - part, 1 + part])
    if re.fullmatch(r"(train|exp)\d*", str(given.get("name"))):  # what a folder is called without a name
        del given["name"]
    name, lr, momentum = str(given.get("optimizer", "SGD")), pop("lr0", None), pop("momentum", None)
    if name.lower() in recipe.table["words"]["optimizer"]:
        recipe.take({"lr0": lr, "momentum": momentum})
    if data := pop("data", None):
        near = path.parent / data
        place = (near if near.exists() else Path(data)).absolute()
        recipe.set("/data", str(place), "" if place.exists() else f"no such file here: data=<where {data} is now>")
    network = Path(str(pop("model", None) or pop("cfg", None) or given.get("weights") or "")).stem
    if (GROUPS_DIR / "model" / f"{network}.yaml").exists():
        recipe.set("/model", network)
    elif network:
        recipe.left.append(f"model: {network} (a network of another kind; choose one with model=)")
    if given.get("classes") == 0:  # a class, unlike options that are off
        given["classes"] = [0]
    recipe.take(given)
    return recipe


def _step(recipe: Recipe, given: dict[str, Any], path: Path) -> int:
    """Set the batch size, the image size and what depends on them; return the image size."""
    sides = given["imgsz"] if isinstance(given.get("imgsz"), list) else [given.get("imgsz")]
    batch, nominal = given.get("batch_size") or given.get("batch") or 16, given.get("nbs") or 64
    if not all(isinstance(value, int | float) for value in (batch, nominal, *filter(None, sides))):
        raise ConfigError(f"{path}: batch, nbs or imgsz is no number. fix: name the file as the training wrote it")
    size = max(side or 640 for side in sides)
    if batch < 1:
        recipe.left.append(f"batch: {batch} (train.device_batch_size=auto finds what fits into the memory)")
        batch = nominal
    passes = max(round(nominal / batch), 1)
    step = batch * passes
    recipe.set("train.batch_size", step, f"{passes} x {batch}, since nbs={nominal}" if passes > 1 else "")
    recipe.set("train.image_size", size, f"imgsz={sides}; training is on squares here" if len(set(sides)) > 1 else "")
    recipe.set("optim.weight_decay", round(given.pop("weight_decay", 0.0005) * step / nominal, 10))
    recipe.set("optim.burn_in_min_steps", math.ceil(100 / passes), f"100 batches there, {passes} to a step")
    return size
