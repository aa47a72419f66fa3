"""One of the two processes of test_fused_norm.py, with Triton's interpreter.

``fused_norm_rank.py <folder> <rank>`` writes largest errors, by case, to ``<folder>/<rank>.json``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf import compose, schema
from conf.cli import launch
from models import Darknet, for_detection, fused_norm, parse_cfg
from models.layers import ACTIVATIONS
from tests.models.cfg_writer import cfg, conv, head
from tests.models.small_network import randomise
from train_utils.auto import choose_mode
from train_utils.compile import INPUT_ONLY
from train_utils.distributed import World, max_over_ranks, sum_over_ranks
from train_utils.sync_batchnorm import convert_batch_norm

Errors = dict[str, float]
CHANNELS = 20
SHAPES = [(2, CHANNELS, 5, 3), (1, CHANNELS, 7, 6)]  # of the two ranks
ONE_GPU = World(0, 0, 1, 1, 1, torch.device("cuda"), "none")
NETWORK = cfg(  # with a batch norm that two layers share
    conv(20, 3, 2), conv(20, 3, 1, "mish"), conv(20, 3, 1, "swish", share_index=-1), conv(8, 1, 1, "relu6"),
    conv(8, 3, 1, "linear"), head(0, 1), side=32,
)  # fmt: skip
FORMATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
ALONE = [*((name, torch.float64) for name in ("leaky", "relu", "swish", "mish", "linear", "tanh"))]
ALONE += (("mish", dtype) for dtype in FORMATS[1:])
TOGETHER = [("leaky", dtype) for dtype in FORMATS[:3]]
MANY_VALUES = [(0.5, torch.bfloat16), (1e4, torch.float32)]  # mean and format


def rows(maps: Sequence[Tensor]) -> Tensor:
    """All positions of all maps as one batch of 1x1 maps."""
    return torch.cat([x.detach().double().permute(0, 2, 3, 1).flatten(0, 2) for x in maps])[:, :, None, None]


def largest(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest error, relative to the largest value."""
    assert found is not None and expected is not None and found.isfinite().all()
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def norm_errors(activation: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> Errors:
    """A step against float64 over the maps of all ranks, of which this one has one."""
    rank, ranks = (dist.get_rank(), len(shapes)) if len(shapes) > 1 else (0, 1)
    torch.manual_seed(0)
    maps, grads = ([(torch.randn(shape) * 2 + mean).to(device, dtype) for shape in shapes] for mean in (3, 0))
    norm = nn.BatchNorm2d(CHANNELS, eps=1e-3, momentum=0.3)
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.normal_(norm.bias)
    norm = norm.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    reference, activate = copy.deepcopy(norm).double(), ACTIVATIONS[activation]()
    x, whole = maps[rank].clone().requires_grad_(), rows(maps).requires_grad_()
    y = fused_norm.normalise_and_activate(x, norm, activate, sum_over_ranks if ranks > 1 else None)
    expected = activate(reference(whole))
    y.backward(grads[rank])
    expected.backward(rows(grads))
    assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous(memory_format=torch.channels_last)
    first = sum(len(rows([one])) for one in maps[:rank])
    own = slice(first, first + len(rows([x])))
    assert whole.grad is not None and x.grad is not None
    found = {
        "y": largest(rows([y]), expected[own]),
        "dx": largest(rows([x.grad]), whole.grad[own]),
        "dweight": largest(sum_over_ranks(norm.weight.grad), reference.weight.grad),
        "dbias": largest(sum_over_ranks(norm.bias.grad), reference.bias.grad),
        **{name: largest(buffer, getattr(reference, name)) for name, buffer in norm.named_buffers()},
    }
    return {name: float(max_over_ranks(torch.tensor(value))) for name, value in found.items()}


def many_values(mean: float, dtype: torch.dtype) -> Errors:
    """Statistics of a million values in a channel."""
    x, norm = (torch.randn(1, 1, 1024, 1024, dtype=torch.float64) + mean).to(dtype), nn.BatchNorm2d(1, momentum=1.0)
    with torch.no_grad(), mock.patch.multiple(fused_norm, TILE=2**14, PROGRAMS=2):  # the interpreter needs large tiles
        fused_norm.normalise_and_activate(x, norm, nn.Identity())
    variance, mean_of = torch.var_mean(x.double(), (0, 2, 3))
    return {"mean": largest(norm.running_mean, mean_of), "variance": largest(norm.running_var, variance)}


def network_errors() -> Errors:
    """A training pass of a converted network, and the detector made of it, against torch's."""
    plain = randomise(Darknet(parse_cfg(NETWORK, "fused.cfg"))).double().train()
    fused, names = copy.deepcopy(plain), [name for name, _ in plain.named_modules()]
    options = compose.compose("train", schema.TrainConfig, ["data=shapes", "train.fused_norm=true"]).train
    with mock.patch.object(launch, "compiler", lambda: "g++"):
        assert choose_mode(options, ONE_GPU) == INPUT_ONLY
        convert_batch_norm(fused, options, ONE_GPU, images=1)
    fused.freeze(1)
    plain.freeze(1)
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with mock.patch.object(nn.BatchNorm2d, "forward", side_effect=nn.BatchNorm2d.forward, autospec=True) as by_torch:
        raw, expected = fused(images)[0], plain(images)[0]
    assert by_torch.call_count == 6, "five of the plain network, one that is frozen"
    raw.square().sum().backward()
    expected.square().sum().backward()
    assert [name for name, _ in fused.named_modules()] == names and list(fused.state_dict()) == list(plain.state_dict())
    pairs = zip(fused.parameters(), plain.parameters(), strict=True)
    of_grads = [largest(one.grad, other.grad) for one, other in pairs if other.requires_grad]
    buffers = [largest(fused.get_buffer(name), buffer) for name, buffer in plain.named_buffers()]
    detector = for_detection(copy.deepcopy(fused).eval(), ONE_GPU.device)
    return {
        "raw map": largest(raw, expected), "gradients": max(of_grads), "buffers": max(buffers),
        "evaluation": largest(detector(images)[0], plain.eval()(images)[0]),
    }  # fmt: skip


def main(folder: str, number: str) -> None:
    """Half of what one process can do alone, then what needs both."""
    rank, found = int(number), dict[str, Errors]()
    torch.set_num_threads(1)
    if rank == 1:
        found |= {f"{mean} {dtype}": many_values(mean, dtype) for mean, dtype in MANY_VALUES}
        found["network"] = network_errors()
    # So each program has several tiles, also in small maps.
    with mock.patch.multiple(fused_norm, TILE=128, MOST_CHANNELS=16, PROGRAMS=4):
        if rank == 0:
            found |= {f"{name} {dtype}": norm_errors(name, dtype, SHAPES[:1]) for name, dtype in ALONE}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        found |= {f"ranks {name} {dtype}": norm_errors(name, dtype, SHAPES) for name, dtype in TOGETHER}
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
