"""The forward parts on a CUDA device without a GPU: its tensors have shapes, but no values.

Where tensors of two devices meet, and where the host reads a value or a size, torch raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from data import Batch
from models import Darknet, zoo_cfg
from models.decode import decode
from tests.models.small_network import small
from tests.train_utils.losses import COST, GRAPHS, loss_of
from train_utils.compile import compile_step

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """The mode, with autocast as on a GPU; without one torch turns it off."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    with FakeTensorMode() as mode:
        yield mode


def batch() -> Batch:
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8).to(memory_format=torch.channels_last)
    return Batch(images, torch.zeros(5, 6), torch.zeros(2).long(), torch.zeros(0, 4).double(), torch.ones(2, 3))


def forward(name: str, precision: torch.dtype = torch.float32) -> tuple[Darknet, list[Tensor]]:
    with CUDA:
        model = Darknet(zoo_cfg(name), 2, width=0.25).train()
    with torch.autocast("cuda", precision, enabled=precision is not torch.float32):
        return model, model(batch().to(CUDA).network_input())


@pytest.mark.parametrize(
    ("name", "precision", "losses"),
    [
        ("yolov3-tiny", torch.float16, GRAPHS),
        pytest.param("yolov4-csp", torch.bfloat16, GRAPHS[:1], marks=pytest.mark.release),
    ],
)
def test_input_network_losses_and_decoding_stay_on_their_device(fake, name, precision, losses) -> None:
    model, raw_maps = forward(name, precision)
    assert all(raw.device == CUDA and raw.dtype == precision for raw in raw_maps)
    targets = batch().to(CUDA).targets
    for options in losses:
        loss = loss_of(model.heads, *options)
        for rows in (targets, targets[:0]):
            for part in loss(raw_maps, rows):
                assert part.device == CUDA and part.shape == () and part.dtype == torch.float32
    boxes, scores = decode([raw.detach() for raw in raw_maps], model.heads)
    assert boxes.device == scores.device == CUDA and boxes.shape[:2] == scores.shape[:2]


@pytest.mark.release
def test_compiled_parts_hold_nothing_of_the_host(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch does not record them as CUDA graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def traced(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **named: compile(*args, backend=traced, **named))
    with CUDA:
        model = small(2).train()
    given, raw_maps = batch().to(CUDA), None
    for options in GRAPHS:
        count = 2 if options == COST else 1  # heads, which it ranks together; one saves time
        plain = loss_of(model.heads[:count], *options)
        loss, to_input = compile_step(model, plain, Batch.network_input, "default", 1)
        raw_maps = raw_maps or model(to_input(given))
        loss.sums(raw_maps[:count], given.targets, loss.count_positives(given.targets), 0.5)
    assert len(graphs) == 2 + len(GRAPHS), "two of the input"
    for node in (node for graph in graphs for node in graph.graph.nodes):
        values = tree_leaves(node.meta.get("example_value"))
        assert all(value.device == CUDA for value in values if isinstance(value, Tensor)), node.format_node()
