"""Whether a checkpoint belongs to the training configured now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train_utils.errors import CheckpointError

# Options, or whole sections, that do not change the weights, except for rounding.
# tests/conf/test_option_roles.py decides about every option.
WITHOUT_EFFECT = (
    "name", "run_dir", "resume", "resume_force", "extend", "devices", "debug", "plugins", "logger",
    "evaluate", "data.name", "data.root", "data.val", "data.workers", "data.cache", "data.index_dir",
    "model.cfg", "model.weights", "model.fresh_heads", "train.device", "train.timeout_seconds",
    "train.save_every_steps", "train.save_every_minutes", "train.max_nonfinite_steps",
    "train.patience", "train.deterministic",
)  # fmt: skip
# Where the training set is; irrelevant if its content is the same.
PLACES = ("data.format", "data.train", "data.names", "data.shapes")


def _positives_before(loss: Mapping[str, Any]) -> dict[str, Any]:
    """What ranked positives before there was a choice."""
    return {"positives_by": "shape" if loss.get("positives") is None else "overlap"}


# What versions did that lacked these options of a section, where its choice (None: any) has them.
Earlier = dict[str, Any] | Callable[[Mapping[str, Any]], dict[str, Any]]
OF_EARLIER_VERSIONS: tuple[tuple[str, str | None, Earlier], ...] = (
    ("optim", None, {"name": "sgd", "flat_fraction": 0.0}),
    ("loss", None, {"name": "yolov3"}),
    ("loss", "yolov3", {"balance": "equal", "class_weights": None}),
    ("loss", "yolov3", _positives_before),
)
# Never listed as changed: every resume changes them.
OF_THE_RESUME = ("run_dir", "resume", "resume_force", "extend")
OF_AN_EXTENSION = ("train.epochs", "train.extended_after")  # may change where a finished run becomes a longer one


def check_same_training(state: dict[str, Any], own: dict[str, Any], folder: Path, force: bool) -> None:
    """Raise CheckpointError unless ``state`` and the description ``own`` are of one training.

    ``state`` is a checkpoint's. Another network or other class names are always refused. ``force``
    accepts other options and data.
    """
    for key in ("network", "names"):
        if _without_place(state[key]) != _without_place(own[key]):
            raise CheckpointError(
                f"resume={folder}: its {key} differs from the one configured now. fix: resume with the options of "
                f"{folder / 'config.yaml'}, or start a new run with model.weights={folder / 'checkpoints/best.pt'}"
            )
    free: tuple[str, ...] = WITHOUT_EFFECT
    data = {key: own["data"][key] for key in state.get("data", {})}  # earlier versions kept no digest
    if "digest" in data and data == state["data"]:
        free += PLACES  # the same images and boxes may lie elsewhere, in another format
    changed = changed_values(with_earlier(state["config"]), own["config"])
    if OF_AN_EXTENSION[0] in changed and is_extension(state, own["config"]["train"]):
        free += OF_AN_EXTENSION
    differences = [f"{key}: {change}" for key, change in changed.items() if not is_covered(key, free)]
    if "data" in state and state["data"] != data:
        differences.append(f"training set: {state['data']} -> {data}")
    if differences and not force:
        raise CheckpointError(
            f"resume={folder}: the training would change ({'; '.join(differences)}). fix: leave these options as they "
            "were, or resume_force=true"
        )


def is_extension(state: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the options ``now``, a section ``train``, extend the finished run of a checkpoint."""
    before = state["config"]["train"]
    finished = [*before.get("extended_after", []), before["epochs"]]  # absent in earlier versions
    return bool(state["epoch"] == before["epochs"] and now["extended_after"] == finished)


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Differences of two configurations by full key, as ``old -> new``, except OF_THE_RESUME.

    Keys that ``before`` lacks are skipped: the program did not know them then.
    """
    changed: dict[str, str] = {}
    for name, old in before.items():
        key, new = f"{prefix}{name}", now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed |= changed_values(old, new, f"{key}.")
        elif old != new and key not in OF_THE_RESUME:
            changed[key] = f"{old} -> {new}"
    return changed


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries, joining keys with dots."""
    table: dict[str, Any] = {}
    for key, value in nested.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def is_covered(key: str, options: tuple[str, ...]) -> bool:
    """Whether ``options`` name ``key`` or a section that contains it."""
    return f"{key}.".startswith(tuple(f"{option}." for option in options))


def with_earlier(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run with those of OF_EARLIER_VERSIONS that they lack."""
    filled = dict(config)
    for section, choice, options in OF_EARLIER_VERSIONS:
        if section in filled and choice in (None, filled[section].get("name")):
            filled[section] = (options(filled[section]) if callable(options) else options) | filled[section]
    return filled


def _without_place(part: Any) -> Any:
    """Drop the .cfg's path and the images seen (earlier versions) from a network's description."""
    return {key: part[key] for key in part if key not in ("source", "seen")} if isinstance(part, Mapping) else part
