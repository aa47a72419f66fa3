"""An optimiser: Lion (Chen et al. 2023), which steps by the sign of a momentum.

``python train.py plugins=[lion_optimiser.py] optim=adamw optim.name=lion optim.lr=1e-4``
"""

from collections.abc import Callable
from typing import Any

import torch

from plugins import OPTIMISERS


class Lion(torch.optim.Optimizer):
    """The training sets ``lr``, ``betas`` and ``weight_decay`` of the groups before each step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient; nothing here waits for the device."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                direction = state["momentum"].lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["momentum"].lerp_(weight.grad, 1 - second)


OPTIMISERS["lion"] = Lion
