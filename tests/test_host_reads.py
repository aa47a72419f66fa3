"""The counter of host reads sees each way to wait for a device, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms

from tests.host_reads import HostReads

X = torch.arange(6.0).view(2, 3)
DEVICE = torch.device("cpu")  # as a device that is handed in


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: 1 if (x > 9).any() else 0,
        lambda x: x[x > 2],
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 2),
        lambda x: x.long().flatten().bincount(),
        lambda x: x.unique(),
        lambda x: torch.repeat_interleave(x, x[0].long(), dim=1),
        lambda x: torch.equal(x, x),
        lambda x: x.tolist(),
        lambda x: x.double().cpu().numpy(),
        lambda x: x.to("cpu"),
        lambda x: nms(x.view(-1)[None, :4], x[:1, 0], 0.5),
    ],
)
def test_reads(read: Callable[[Tensor], object], mode: Callable[[], torch.no_grad]) -> None:
    with mode(), HostReads() as counted:
        read(X)
    assert counted.reads.total() == 1 and not counted.copies, counted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_only_queues_work_is_no_read(mode: Callable[[], torch.no_grad]) -> None:
    with mode(), HostReads(X) as counted:
        x = X.clone()
        x[x > 2] = 0.0
        x[torch.arange(2, device=DEVICE)] += 1
        x.to(DEVICE, torch.float64).to("cpu", non_blocking=True)
        X.tolist()  # named as a tensor on the host
    assert not counted.reads and not counted.copies, counted


def test_launches_and_copies_in_both_passes() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with HostReads() as counted:
        (weight @ X.t()).reshape(-1)[None].sum().backward()
        torch.tensor([1.0], device=DEVICE)
    assert counted.launches == {"aten::mm": 2, "aten::sum": 1, "aten::ones_like": 1}
    assert counted.copies.total() == 1 and not counted.reads
