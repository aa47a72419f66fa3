"""Read the training options of an MMYOLO configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.failures import ConfigError
from scripts.migrate.python_file import read_python
from scripts.migrate.recipe import Recipe
from train_utils.run.same_training import flat

SECTIONS = ("train_cfg", "optim_wrapper", "randomness", "param_scheduler", "custom_hooks", "load_from")
OPTIMIZER = "optim_wrapper.optimizer."
UNUSED = (".type", ".border", ".border_val", ".img_scale", ".pad_val")  # ends of keys without a meaning here


def from_mmyolo(path: Path) -> Recipe:
    """The options of a training. Raises ConfigError if the file has no ``train_dataloader``."""
    given = read_python(path)
    loader, model = given.get("train_dataloader"), given.get("model") or {}
    if not isinstance(loader, dict):
        raise ConfigError(f"{path} has no train_dataloader. fix: name an MMYOLO configuration of version 0.2 or later")
    head = str((model.get("bbox_head") or {}).get("type"))
    if other := re.search("Rotated|Ins|Pose", head):
        raise ConfigError(
            f"{path}: {head} is not for upright boxes ({other[0]}). fix: name a detection's configuration"
        )
    recipe, dataset = Recipe("mmyolo"), loader.get("dataset") or {}
    options = {key: value for key, value in given.items() if key in SECTIONS} | {
        "model": {"test_cfg": model.get("test_cfg")},
        "default_hooks": {"param_scheduler": given.get("default_hooks", {}).get("param_scheduler")},
        "train_dataloader": {**loader, "dataset": None},
    }
    values = {**flat(options), "model": model.get("type"), **_augmentation(recipe, given, dataset)}
    gpus = re.search(r"(\d+)xb\d+", path.name)
    batch = values.pop("train_dataloader.batch_size", 16)
    if not isinstance(batch, int):
        raise ConfigError(f"{path}: batch_size is {batch}, which was not computed. fix: write its number there")
    batch *= int(gpus[1]) if gpus else 1
    recipe.set("train.batch_size", batch, "on all GPUs, as the file's name has it" if gpus else "times the GPUs there")
    if values.pop(f"{OPTIMIZER}batch_size_per_gpu", None) is not None:
        decay = values.pop(f"{OPTIMIZER}weight_decay", 0.0)
        scaled = round(decay * batch * max(round(64 / batch), 1) / 64, 10)
        recipe.set("optim.weight_decay", scaled, f"{decay} for a nominal batch of 64")
    size, zoom = given.get("img_scale"), values.pop("YOLOv5RandomAffine.scaling_ratio_range", None)
    if isinstance(size, list):
        recipe.set("train.image_size", max(size), f"{size} there, squares here" if len(set(size)) > 1 else "")
    if isinstance(zoom, list):
        recipe.set("augment.scale", round(min(0.99, max(1 - zoom[0], zoom[1] - 1)), 6))
    _data(recipe, given, dataset)
    recipe.take({key: value for key, value in values.items() if key == f"{OPTIMIZER}type" or not key.endswith(UNUSED)})
    return recipe


def _augmentation(recipe: Recipe, given: Mapping[str, Any], dataset: dict[str, Any]) -> dict[str, Any]:
    """The options of the pipeline's augmentations by ``<step>.<key>``; other steps are listed."""
    flat: dict[str, Any] = {}
    pipeline = dataset.get("pipeline") or (dataset.get("dataset") or {}).get("pipeline") or given.get("train_pipeline")
    if not isinstance(pipeline, list):
        return flat
    for step in pipeline:
        kind = str(step.get("type", "")).removeprefix("mmdet.") if isinstance(step, dict) else ""
        if kind.startswith(("YOLOv5", "Mosaic", "RandomFlip", "Albu")):
            flat |= {f"{kind}.{key}": value for key, value in step.items() if key not in ("type", "pre_transform")}
        elif kind and kind not in recipe.table["steps"].split():
            recipe.left.append(f"pipeline: {kind}")
    return {"Mosaic.prob": float("Mosaic" in str(pipeline)), **flat}


def _data(recipe: Recipe, given: Mapping[str, Any], dataset: dict[str, Any]) -> None:
    """Set the data sets, if they are COCO files."""
    sets = {"train": dataset.get("dataset") or dataset, "val": (given.get("val_dataloader") or {}).get("dataset") or {}}
    sets = {split: part for split, part in sets.items() if isinstance(part.get("ann_file"), str)}
    if not sets or "Coco" not in str(sets.get("train", {}).get("type")):
        recipe.left.append(f"dataset: {dataset.get('type')} (name the set by data=)")
        return
    recipe.set("/data", "coco")
    for split, part in sets.items():
        recipe.values.setdefault("data.root", str(part.get("data_root") or "."))
        prefix = part.get("data_prefix") or {}
        recipe.set(f"data.{split}.annotations", part["ann_file"])
        recipe.set(f"data.{split}.images", prefix.get("img") or prefix.get("img_path") or ".")
    names = (sets["train"].get("metainfo") or {}).get("classes")
    if isinstance(names, list):
        recipe.set("data.names", names)
