"""Batch norm for CUDA over ranks, on CPUs: against GlobalBatchNorm2d, and what the host learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models import Darknet, zoo_cfg
from tests.host_reads import HostReads
from tests.runs.process_group import run_group
from train_utils.distributed import init_distributed_mode, stack_over_ranks, sum_over_ranks
from train_utils.parallel.reduced_batchnorm import ReducedBatchNorm2d
from train_utils.parallel.sync_batchnorm import GlobalBatchNorm2d
from train_utils.parallel.wrap import convert_sync_batchnorm
from train_utils.processes.world import World

CHANNELS, RANKS = 7, 2
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
SHAPES = [(2, CHANNELS, 6, 4), (1, CHANNELS, 1, 1), (3, CHANNELS, 5, 5)]


def plain_norm(dtype: torch.dtype) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(CHANNELS, eps=1e-4, momentum=0.3).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.normal_(norm.bias)
    return norm


def pass_through(norm: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradients and statistics after two passes, the second with gradients."""
    norm(x)
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    grads = [x.grad, *(parameter.grad for parameter in norm.parameters())]
    return [y.detach(), *(found for found in grads if found is not None), *norm.buffers()]


def compare_on_this_rank() -> list[str]:
    """Names of the cases in which the two batch norms differ on this rank."""
    rank, differing = init_distributed_mode("cpu", 60).rank, []
    for dtype, tolerance in TOLERANCE.items():
        start = plain_norm(torch.float32 if dtype == torch.bfloat16 else dtype)
        for shape in SHAPES:
            for layout, memory_format in LAYOUTS.items():
                torch.manual_seed(1 + rank)
                size = (*shape[:3], shape[3] + rank)  # ranks may differ in size, as with train.rect
                x = (torch.randn(size) * 2 + 3).to(dtype).contiguous(memory_format=memory_format)
                grad = torch.randn_like(x)
                reduced, other = (
                    kind(copy.deepcopy(start), exchange)
                    for kind, exchange in ((ReducedBatchNorm2d, sum_over_ranks), (GlobalBatchNorm2d, stack_over_ranks))
                )
                found, wanted = pass_through(reduced, x, grad), pass_through(other, x, grad)
                case = f"{dtype} {layout} {shape}"
                for one, expected in zip(found, wanted, strict=True):
                    layout_kept = one.dim() < 4 or one.is_contiguous(memory_format=memory_format)
                    same = one.dtype == expected.dtype and torch.allclose(one, expected, rtol=tolerance, atol=tolerance)
                    if not (layout_kept and same):
                        differing.append(f"{case}: {one} instead of {expected}")
    return differing + compiled_differs(rank)


def compiled_differs(rank: int) -> list[str]:
    """The same if rank 0 compiles it, as one graph that holds the exchange of both passes."""
    x, start = torch.randn(2, CHANNELS, 4, 4, dtype=torch.float64) + rank, plain_norm(torch.float64)
    eager, other = (ReducedBatchNorm2d(copy.deepcopy(start), sum_over_ranks) for _ in range(2))
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True, disable=rank > 0)
    pairs = zip(pass_through(eager, x, x), pass_through(compiled, x, x), strict=True)
    return [f"compiled: {found} instead of {one}" for one, found in pairs if not torch.allclose(one, found, rtol=1e-11)]


def test_it_is_the_batch_norm_of_all_ranks_on_two_processes() -> None:
    assert run_group(compare_on_this_rank, RANKS) == [[]] * RANKS


def test_the_host_learns_nothing_and_two_exchanges_are_all() -> None:
    exchanged = []

    def add(tensor: Tensor) -> Tensor:
        exchanged.append(tensor.numel())
        return tensor * RANKS

    norm = ReducedBatchNorm2d(plain_norm(torch.float32), add)
    x = torch.randn(2, CHANNELS, 6, 4).requires_grad_()
    with HostReads() as counted:
        norm(x).sum().backward()
    assert not counted.reads and not counted.copies, counted
    assert exchanged == [2 * CHANNELS + 1, 2 * CHANNELS]


@pytest.mark.parametrize("mean", [1e4, -1e6])
def test_a_large_mean_costs_no_digits(mean: float) -> None:
    """In float32 the mean of the squares minus the square of the mean would be 0 or worse."""
    x = (torch.randn(4, CHANNELS, 8, 8, dtype=torch.float64) + mean).float()
    norm = ReducedBatchNorm2d(nn.BatchNorm2d(CHANNELS, momentum=1.0), lambda tensor: tensor * RANKS)
    norm(x)
    assert norm.running_var is not None
    unbiased = x.double().var((0, 2, 3), correction=0) * (x[:, 0].numel() * 2 / (x[:, 0].numel() * 2 - 1))
    torch.testing.assert_close(norm.running_var.double(), unbiased, rtol=2e-3, atol=0)


def gpus(world_size: int) -> World:
    device = torch.device("cuda", 0)
    return World(0, 0, world_size, world_size, node_rank=0, num_nodes=1, device=device, launcher="none", backend="nccl")


@pytest.mark.parametrize(
    ("world_size", "of_torch", "kind"),
    [(2, False, ReducedBatchNorm2d), (2, True, nn.SyncBatchNorm), (1, False, nn.BatchNorm2d)],
)
def test_what_gpus_use_keeps_names_tensors_and_frozen_layers(world_size: int, of_torch: bool, kind: type) -> None:
    model = Darknet(zoo_cfg("yolov3-tiny"), num_classes=2, width=0.125)
    model.freeze(3)
    before = dict(model.state_dict(keep_vars=True))
    model = convert_sync_batchnorm(model, gpus(world_size), of_torch=of_torch)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(type(norm) is kind for norm in norms)
    assert [norm.training for norm in norms] == [False] * 2 + [True] * (len(norms) - 2), "frozen are layers 0 and 2"
    assert torch.isfinite(copy.deepcopy(model).eval()(torch.rand(1, 3, 64, 64))[0]).all()


def test_frozen_weights_get_no_gradient() -> None:
    norm = ReducedBatchNorm2d(plain_norm(torch.float32), lambda tensor: tensor * RANKS)
    norm.requires_grad_(False)
    x = torch.randn(2, CHANNELS, 3, 3).requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad is not None and norm.weight.grad is None and norm.bias.grad is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_of_a_gpu_agree_with_the_formulas(dtype: torch.dtype, layout: str) -> None:
    x = (torch.randn(4, CHANNELS, 9, 5) * 2 + 3).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    grad = torch.randn_like(x)
    found, wanted = (
        pass_through(
            ReducedBatchNorm2d(plain_norm(torch.float32), lambda tensor: tensor * RANKS).to(device),
            x.to(device),
            grad.to(device),
        )
        for device in ("cuda", "cpu")
    )
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), expected, rtol=2e-2, atol=2e-2)
