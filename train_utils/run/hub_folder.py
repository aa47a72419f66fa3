"""A trained network as a folder for a model hub: weights as safetensors, the rest as plain text.

``model.safetensors`` holds the averaged weights, ``model.cfg`` the network, ``config.json``
everything else that a checkpoint says about them, and the digest over all three. ``model.names``
repeats the class names for other programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from train_utils.errors import CheckpointError, first_line
from train_utils.run.checkpoint_files import HUB_WEIGHTS
from train_utils.run.plain_data import digest_of, to_plain

CFG, NAMES, REST = "model.cfg", "model.names", "config.json"
FORMAT, VERSION = "hydra-yolov3-spp network", 1


def write_hub_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a checkpoint, which has no optimiser, to an existing folder.

    Raises OSError if the files cannot be written.
    """
    weights = to_plain(state["ema"], copied=True)  # none may share memory
    network = {key: value for key, value in state["network"].items() if key != "cfg"}
    rest = json.loads(json.dumps({**state, "network": network, "ema": None}))
    content = {"format": FORMAT, "version": VERSION, "digest": _digest(rest, state["network"]["cfg"], weights)}
    # Not by save_file, which has its own error for a full disk and lets nobody else read the file.
    (folder / HUB_WEIGHTS).write_bytes(save(weights, {"format": "pt"}))
    (folder / CFG).write_bytes(state["network"]["cfg"].encode())
    (folder / NAMES).write_text("".join(f"{name}\n" for name in state["names"]), encoding="utf-8")
    (folder / REST).write_text(json.dumps(content | {"state": rest}, indent=1) + "\n", encoding="utf-8")


def read_hub_folder(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, as it was written. Raises CheckpointError if it is not intact."""
    content = _rest(folder)
    try:
        cfg = (folder / CFG).read_bytes().decode()
        weights = load_file(folder / HUB_WEIGHTS)
    except Exception as error:  # damaged bytes can raise any error
        raise CheckpointError(f"{folder} cannot be read ({first_line(error)}). fix: download it again") from error
    rest: dict[str, Any] = content["state"]
    if _digest(rest, cfg, weights) != content.get("digest"):
        raise CheckpointError(
            f"{folder} is damaged: {HUB_WEIGHTS}, {CFG} and {REST} do not match their digest. fix: download it again"
        )
    return {**rest, "network": {**rest["network"], "cfg": cfg}, "ema": weights}


def peek_hub_config(folder: Path) -> dict[str, Any]:
    """Read only the configuration. Raises CheckpointError."""
    config: dict[str, Any] = _rest(folder)["state"]["config"]
    return config


def _rest(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / REST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / REST} cannot be read ({first_line(error)}). fix: download it again"
        ) from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{folder} is not a folder of scripts.publish of this version. fix: give one that is")
    return content


def _digest(rest: dict[str, Any], cfg: str, weights: dict[str, Any]) -> str:
    return digest_of([rest, cfg, dict(sorted(weights.items()))])
