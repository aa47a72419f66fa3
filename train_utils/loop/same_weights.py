"""Check that all ranks still train the same model, by comparing fingerprints of its tensors."""

from __future__ import annotations

import struct
from itertools import chain

import torch
from torch import Tensor, nn

from train_utils.distributed import stack_over_ranks
from train_utils.errors import TrainError
from train_utils.parallel.wrap import own_statistics
from train_utils.processes.world import World

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
ROW_FACTOR = 0x1E3779B97F4A7C15  # odd and without pattern: makes factors of different rows unrelated


def check_in_sync(model: nn.Module, world: World, step: int, lr: float, every: int) -> None:
    """Compare the training of all ranks after optimiser step ``step``, every ``every`` steps.

    ``every`` 0 means never. ``model`` is the plain model in training mode. The check covers step,
    learning rate ``lr``, parameters and buffers, but not batch-norm statistics that each rank keeps
    for itself. All ranks call this together. Raises TrainError with the same sentence on all ranks;
    it names the first tensor that differs and the ranks on which it differs from rank 0.
    """
    if world.world_size == 1 or every == 0 or step % every:
        return
    own = own_statistics(model)
    tensors = {
        name: tensor for name, tensor in chain(model.named_parameters(), model.named_buffers()) if name not in own
    }
    prints = torch.stack([fingerprint(tensor) for tensor in tensors.values()]).cpu()
    counters = torch.tensor([step, struct.unpack("<q", struct.pack("<d", lr))[0]])
    of_ranks = stack_over_ranks(torch.cat((counters, prints)))
    if not (differs := of_ranks != of_ranks[0]).any():
        return
    first = int(differs.any(0).nonzero()[0])
    ranks = differs[:, first].nonzero().flatten().tolist()
    what = ("the step count", "the learning rate", *tensors)[first]
    where = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
    raise TrainError(
        f"after step {int(of_ranks[0, 0])} the ranks no longer train the same model: {what} differs on {where} "
        "from rank 0. fix: resume the run from its last checkpoint; if the error returns, look for a faulty "
        "device, another torch version or other data on these ranks"
    )


def fingerprint(tensor: Tensor) -> Tensor:
    """A number (int64, on the tensor's device) computed from a tensor's bits, equal on any device.

    It sums the elements' bits as integers modulo 2**64, each row (first dimension) times its own
    factor. One differing element always shows; several could only cancel by chance.
    """
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    rows = bits.sum(dim=tuple(range(1, bits.ndim)), dtype=torch.int64) if bits.ndim > 1 else bits.long()
    factors = torch.arange(rows.numel(), device=rows.device).view_as(rows) * 2 * ROW_FACTOR + 1
    return (rows * factors).sum()
