"""The darknet53 and cspdarknet53 of timm, trained on ImageNet, as the first layers of a network.

A file holds a state dict of timm's CspNet. There images are normalised, and one convolution makes
both paths of a CSP stage; here the first convolution normalises, and each path has its own. There
images are padded with their mean colour and here with black, so maps differ slightly at the edges.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.darknet import Darknet
from models.errors import ModelError
from models.tensor_files import check_values
from models.weights import WeightsReport, check_shapes, for_bn_eps, report_of, stored_names

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours
TIMM_BN_EPS = 1e-5
STEM, NUM_STAGES = "stem.conv1", 5
Tensors = tuple[Tensor, ...]  # beta, gamma, mean, variance, kernels


def is_of_timm(content: Any) -> bool:
    """Whether a file's content is a state dict of timm's CspNet."""
    return isinstance(content, Mapping) and f"{STEM}.conv.weight" in content


def load_timm_backbone(model: Darknet, state: Any, path: Path) -> WeightsReport:
    """Load a state dict of timm's darknet53 or cspdarknet53 into the first layers of ``model``.

    Raises ModelError, and changes nothing, if the file holds another network or the model begins
    with other layers.
    """
    layers = ((index, stored_names(layer)) for index, layer in enumerate(model.layers) if stored_names(layer))
    loads: dict[str, Tensor] = {}
    last = -1
    try:
        for (last, names), tensors in zip(layers, _convolutions(state), strict=False):
            loads |= {f"layers.{last}.{name}": tensor for name, tensor in zip(names, tensors, strict=True)}
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:  # forged shapes, too
        message = f"{path} is not a darknet53 or cspdarknet53 of timm ({error!r}). fix: download it again"
        raise ModelError(message) from error
    own = {name: tensor for name, tensor in model.state_dict().items() if name in loads}
    check_shapes(path, own, loads, "fix: model.width=1 and a network that has this backbone")
    check_values(path, loads.items())
    model.load_state_dict(for_bn_eps(loads, TIMM_BN_EPS, model), strict=False)
    return report_of(model, path, cut=last)


def _convolutions(state: Mapping[str, Tensor]) -> Iterator[Tensors]:
    """The tensors of each convolution of this project, in the order of a .cfg."""

    def read(name: str) -> Tensors:
        norm = (state[f"{name}.bn.{key}"].float() for key in ("bias", "weight", "running_mean", "running_var"))
        return *norm, state[f"{name}.conv.weight"].float()

    beta, gamma, mean, variance, kernels = read(STEM)
    planes = zip(kernels.unbind(1), STD, strict=True)  # strict: ValueError unless there are three channels
    kernels = torch.stack([plane / std for plane, std in planes], dim=1)
    shift = (kernels * torch.tensor(MEAN)[:, None, None]).sum((1, 2, 3))
    yield beta, gamma, mean + shift, variance, kernels
    for stage in (f"stages.{number}" for number in range(NUM_STAGES)):
        yield read(f"{stage}.conv_down")
        is_csp = f"{stage}.conv_exp.conv.weight" in state
        if is_csp:  # the path around the blocks, and the one through them
            yield from zip(*(tensor.chunk(2) for tensor in read(f"{stage}.conv_exp")), strict=True)
        for number in count():
            if f"{stage}.blocks.{number}.conv1.conv.weight" not in state:
                break
            yield read(f"{stage}.blocks.{number}.conv1")
            yield read(f"{stage}.blocks.{number}.conv2")
        if is_csp:
            yield read(f"{stage}.conv_transition_b")
            *norm, kernels = read(f"{stage}.conv_transition")
            around, through = kernels.chunk(2, dim=1)
            yield *norm, torch.cat((through, around), dim=1)  # a .cfg joins them in the other order
