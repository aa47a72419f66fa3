"""Whether a checkpoint belongs to the training configured now: which options may differ on
resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_utils.errors import CheckpointError

# Options that do not change the weights, except for rounding; a key that ends in a dot covers all
# below it. Two of them choose the micro-batch, which is compared separately.
WITHOUT_EFFECT = (
    "name", "run_dir", "resume", "resume_force", "debug", "logger.", "evaluate.", "data.name", "data.root", "data.val.",
    "data.workers", "data.cache", "data.index_dir", "model.cfg", "model.weights", "model.fresh_heads", "train.device",
    "train.device_batch_size", "train.max_device_batch_size", "train.timeout_seconds", "train.best_only",
    "train.save_every_steps", "train.save_every_minutes", "train.check_sync_every", "train.max_nonfinite_steps",
    "train.on_nonfinite", "train.patience", "train.deterministic", "train.cudnn_benchmark",
)  # fmt: skip
# Where the training set is; irrelevant if its content is the same.
PLACES = ("data.format", "data.train.", "data.names", "data.shapes.")


def check_same_training(state: dict[str, Any], own: dict[str, Any], folder: Path, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint's ``state`` and the description ``own`` mean one
    training.

    Another network or other class names never do. ``force`` lets other options and data pass.
    """
    for key in ("network", "names"):
        if _without_place(state[key]) != _without_place(own[key]):
            raise CheckpointError(
                f"resume={folder}: its {key} differs from the one configured now. fix: resume with the options of "
                f"{folder / 'config.yaml'}, or start a new run with model.weights={folder / 'checkpoints/best.pt'}"
            )
    changed = changed_values(state["config"], own["config"])
    free: tuple[str, ...] = WITHOUT_EFFECT
    data = {key: own["data"][key] for key in state.get("data", {})}  # earlier versions kept no digest
    if "digest" in data and data == state["data"]:
        free += PLACES  # the same images and boxes may lie elsewhere, in another format
    telling = [line for line in changed if not _is_below(line.partition(":")[0], free)]
    for key, name in (("micro_batch", "images in one forward pass over all processes"), ("data", "training set")):
        now = data if key == "data" else own.get(key)
        if key in state and state[key] != now:
            telling.append(f"{name}: {state[key]} -> {now}")
    if telling and not force:
        raise CheckpointError(
            f"resume={folder}: the training would not go on as it began ({'; '.join(telling)}). fix: leave these "
            "as they were, or resume_force=true"
        )


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List differences of two configurations as ``key: old -> new``, except the run's folder.

    Keys that ``before`` lacks are skipped: the program did not know them then.
    """
    lines = []
    for key in before:
        old, new = before[key], now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_values(old, new, f"{prefix}{key}.")
        elif old != new and f"{prefix}{key}" not in ("run_dir", "resume", "resume_force"):
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines


def _without_place(part: Any) -> Any:
    """Drop the .cfg's path and the images seen (earlier versions) from a network's description."""
    return {key: part[key] for key in part if key not in ("source", "seen")} if isinstance(part, Mapping) else part


def _is_below(key: str, options: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(option if option.endswith(".") else f"{option}.") for option in options)
