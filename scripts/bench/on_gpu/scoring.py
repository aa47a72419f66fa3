"""How much of the forward pass's speed an evaluation keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import Batch
from models import Darknet, Postprocess, for_detection
from scripts.bench.gpu import Rows
from scripts.bench.on_gpu.common import Settings, new_network, seconds_each, synthetic
from train_utils.loop.detect import detect, detect_batches
from train_utils.terminal.progress import Progress

OBJECTS, AROUND = 9, 50  # of an image, in each trained map, and the anchors that see each
CLASS_LOGITS = (3.0, -3.0, -4.0, -5.0)  # of an object's own class and three others
NOTHING = -12.0
COUNT = 3  # batches of an evaluation


class WithMaps(nn.Module):
    """Computes the network's maps and returns others, of a known density, in their place."""

    def __init__(self, network: Darknet, maps: Sequence[Tensor]) -> None:
        super().__init__()
        self.network, self.maps = network, list(maps)

    def forward(self, images: Tensor) -> list[Tensor]:
        self.network(images)
        return self.maps


def evaluation(settings: Settings, rows: Rows) -> None:
    """Images a second of the forward pass alone, and of a whole evaluation up to its scores."""
    network = for_detection(new_network(settings).to(settings.device).eval(), settings.device)
    batch = synthetic(settings, settings.batches[-1])
    images, once = len(batch.images), replace(settings, steps=1)
    with torch.inference_mode():
        shapes = [raw.shape for raw in network(batch.network_input())]
    postprocess = Postprocess(network.heads, confidence=0.001, nms_iou=0.6, max_detections=300, multi_label=True)

    def alone(dtype: torch.dtype | None) -> None:
        list(detect_batches(network, [batch] * COUNT, lambda _: [], settings.device, dtype=dtype))

    def whole(model: nn.Module) -> None:
        progress = Progress(COUNT * images, "evaluate", enabled=False)
        detect(model, [batch] * COUNT, postprocess, _unchanged, settings.device, progress, dtype)

    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        forward = seconds_each(alone, [dtype], once) / COUNT
        rows.add(f"{name}: forward pass alone", images / forward, "images/s")
        for when, draw in (("trained", _trained), ("early", _early)):
            generator = torch.Generator().manual_seed(0)
            model = WithMaps(network, [draw(shape, generator).to(settings.device) for shape in shapes])
            seconds = seconds_each(whole, [model], once) / COUNT
            rows.add(f"{name}: evaluation, maps {when}", images / seconds, "images/s")
            rows.add(f"{name}: against forward alone, maps {when}", 100 * forward / seconds, "%", "70 %")


def _unchanged(batch: Batch, i: int, boxes_xyxy: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return boxes_xyxy


def _early(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A raw map in which nearly each class of each anchor is above the confidence."""
    return torch.randn(shape, generator=generator) - 2


def _trained(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A raw map in which some anchors around each of a few objects see a few classes."""
    maps = torch.randn(shape, generator=generator)
    maps[..., 4:] = NOTHING
    flat = maps.view(len(maps), -1, shape[-1])
    for anchors in flat:
        starts = torch.randint(len(anchors), (OBJECTS, 1), generator=generator)
        places = (starts + torch.arange(AROUND)).flatten() % len(anchors)
        anchors[places, 4] = 2 * torch.randn(len(places), generator=generator)
        for logit in CLASS_LOGITS:
            kinds = torch.randint(shape[-1] - 5, (OBJECTS, 1), generator=generator).expand(-1, AROUND)
            anchors[places, 5 + kinds.flatten()] = logit
    return maps
