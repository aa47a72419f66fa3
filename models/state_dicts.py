"""Initial weights from another training of the same network, possibly for other classes."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from models.darknet import Darknet
from models.errors import ModelError


def load_weights_of_checkpoint(model: Darknet, weights: Mapping[str, Tensor], path: Path, fresh_heads: bool) -> str:
    """Copy a state dict into `model`, with fresh_heads all but the convolutions in front of [yolo]; says in one
    sentence what was loaded.

    Raises ModelError naming the first tensor that is missing or has another shape; nothing is changed then.
    """
    own = model.state_dict()
    heads = tuple(f"layers.{head.layer - 1}." for head in model.heads)
    wanted = [name for name in own if not (fresh_heads and name.startswith(heads))]
    for name in wanted:
        theirs = tuple(weights[name].shape) if name in weights else None
        if theirs != tuple(own[name].shape):
            hint = (
                "model.fresh_heads=true to load everything but the heads"
                if name.startswith(heads)
                else ("the model=, model.cfg= and model.width= that the checkpoint was trained with")
            )
            found = "none" if theirs is None else f"shape {theirs}"
            raise ModelError(
                f"model.weights={path}: {name} needs shape {tuple(own[name].shape)}, the file has {found}. fix: {hint}"
            )
    model.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    return f"loaded {len(wanted)} of {len(own)} tensors from {path}{'; the heads start fresh' if fresh_heads else ''}"
