"""What two checkpoints are compared by."""

from __future__ import annotations

from torch import Tensor


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest max |a - b| / max |a| of tensors with equal names; 0 if both are 0."""
    assert some.keys() == others.keys()
    return max(
        float((one - others[name]).abs().max() / one.abs().max().clamp(min=1e-300))
        for name, one in ((name, tensor.double()) for name, tensor in some.items())
    )


def parts_of(state: dict[str, object]) -> dict[str, dict[str, Tensor]]:
    """Tensors by name, for each part of a checkpoint that training changes."""
    model, average, optimizer = state["model"], state["ema"], state["optimizer"]
    assert isinstance(model, dict) and isinstance(average, dict) and isinstance(optimizer, dict)
    return {
        "parameters": {name: tensor for name, tensor in model.items() if "running" not in name},
        "average": average,
        "batch norm": {name: tensor for name, tensor in model.items() if "running" in name},
        "momentum": {
            f"{key}.{name}": tensor for key, kept in optimizer["state"].items() for name, tensor in kept.items()
        },
    }
