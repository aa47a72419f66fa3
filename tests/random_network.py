"""Checkpoints of untrained networks."""

from collections.abc import Sequence
from pathlib import Path

import torch

from conf.compose import to_dictionary
from conf.schema import TrainConfig
from train_utils.build import build_model, describe_network
from train_utils.checkpoint import save_checkpoint


def save_random_network(
    path: Path, config: TrainConfig, names: Sequence[str], category_ids: Sequence[int], seed: int, gain: float
) -> None:
    """Save the network of ``config`` with scores that lie apart, by ``gain`` on its heads."""
    torch.manual_seed(seed)
    model, _ = build_model(config.model, len(names))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(torch.rand(8, 3, config.train.image_size, config.train.image_size))  # statistics of batch norms
        for head in model.heads:
            convolution = model.head_convolutions(head)[0].conv
            convolution.weight.mul_(gain)
            convolution.bias.zero_()
    options = to_dictionary(config)
    options["data"] = {**options["data"], "name": "drawn"}
    save_checkpoint(path, {
        "network": describe_network(model, config.model), "ema": model.state_dict(), "names": list(names),
        "category_ids": list(category_ids), "config": options, "epoch": 1, "step": 0, "seen": 0, "optimizer": {},
        "weights_version": [0, 2, 5],
    })  # fmt: skip
