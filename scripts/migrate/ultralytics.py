"""The args.yaml of Ultralytics, and the opt.yaml and hyp.yaml of YOLOv5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from conf import CONF_DIR
from conf.failures import ConfigError
from scripts.migrate.recipe import Recipe


def from_ultralytics(options: dict[str, Any], path: Path) -> Recipe:
    """The options of a run. Raises ConfigError for a task other than detection.

    A step there is made of as many batches as come nearest to ``nbs`` images, and gradients are
    those of the sum over its images, which scales the gains of YOLOv5's loss.
    """
    given = {**options, **(options["hyp"] if isinstance(options.get("hyp"), dict) else {})}
    if given.get("task", "detect") != "detect":
        raise ConfigError(f"{path}: task={given['task']} is not detection. fix: only task=detect has a counterpart")
    if not {"epochs", "lr0"} & given.keys():
        raise ConfigError(f"{path} holds neither epochs nor lr0. fix: name args.yaml, or opt.yaml and hyp.yaml")
    recipe, pop = Recipe("ultralytics"), given.pop
    batch, nominal, size = pop("batch_size", None) or pop("batch", None) or 16, pop("nbs", 64), pop("imgsz", 640)
    size = max(size) if isinstance(size, list) else size
    if batch <= 0:
        recipe.left.append(f"batch: {batch} (train.device_batch_size=auto finds what fits into the memory)")
        batch = nominal
    passes = max(round(nominal / batch), 1)
    step = batch * passes
    recipe.set("train.batch_size", step, f"{passes} x {batch}, since nbs={nominal}" if passes > 1 else "")
    recipe.set("train.image_size", size)
    recipe.set("optim.weight_decay", pop("weight_decay", 0.0005) * step / nominal)
    recipe.set("optim.burn_in_min_steps", math.ceil(100 / passes), f"100 batches there, {passes} to a step")
    recipe.set("augment.perspective", min(0.2, pop("perspective", 0) * size))
    name, lr, momentum = str(given.get("optimizer", "SGD")), pop("lr0", None), pop("momentum", None)
    if name.lower() in recipe.table["words"]["optimizer"]:
        recipe.take({"lr0": lr, "momentum": momentum})
    if "obj" in given:  # YOLOv5's
        why = f"times the {step} images of a step, whose losses are added there"
        for key, ours in (("box", "loss.box"), ("cls", "loss.classification"), ("obj", "loss.objectness")):
            recipe.set(ours, pop(key) * step * ((size / 640) ** 2 if key == "obj" else 1), why)
        recipe.set("loss.iou", "ciou")
    if data := pop("data", None):
        near = path.parent / data
        recipe.set("/data", str((near if near.exists() else Path(data)).absolute()))
    network = Path(str(pop("model", None) or pop("cfg", None) or given.get("weights") or "")).stem
    if (CONF_DIR / "model" / f"{network}.yaml").exists():
        recipe.set("/model", network)
    elif network:
        recipe.left.append(f"model: {network} (a network of another kind; choose one with model=)")
    recipe.take(given)
    return recipe
