"""Gradients that are sums of one image's after another, in an order that makes no difference: on a CPU.

How a convolution's kernel for a batch adds up depends on how many images are in it, so two processes with four images
each round otherwise than one with eight, and a deep network multiplies that (docs/results.md). Here every image passes
the convolution by itself; its gradients are rounded to multiples of one small number and summed in float64, where
sums of such multiples are exact. So the update has the same bits at any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from train_utils.sync_batchnorm import GlobalBatchNorm2d

# Of this are float32 gradients multiples before they are summed: 6e-14, which no optimiser's step feels in a float32
# weight. Sums are exact up to 2**53 times as much, 512; beyond, they are rounded as any sum is.
QUANTUM = 2.0**-44
EXCHANGED = 2**20  # numbers at a time, 8 MiB
ROUNDER = 1.5 * 2**52 * QUANTUM  # added and taken away again it rounds to a multiple: what float64 has no digits for

SumOverRanks = Callable[[Tensor], Tensor]


class GradientSums:
    """The gradients of one step, in float64, by parameter."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add the ``gradient`` of some images: (images, *the parameter's shape)."""
        gradient = gradient.double()
        if parameter.dtype != torch.float64:
            gradient = (gradient + ROUNDER) - ROUNDER
        total = gradient[0] if len(gradient) == 1 else gradient.sum(0)
        if parameter in self._sums:
            self._sums[parameter] += total
        else:
            self._sums[parameter] = total

    def finish(self, model: nn.Module, sum_over_ranks: SumOverRanks) -> None:
        """Give each parameter that is trained the sum over all ranks, together with what autograd left in its
        ``.grad``; all ranks call this together. One whose layer took no part on this rank counts as zero here."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for group in _groups(trained):
            totals = sum_over_ranks(torch.cat([self._total(parameter).flatten() for parameter in group]))
            for parameter, total in zip(group, totals.split([p.numel() for p in group]), strict=True):
                parameter.grad = torch.empty_like(parameter)  # in its memory format
                parameter.grad.copy_(total.view(parameter.shape))

    def _total(self, parameter: nn.Parameter) -> Tensor:
        total = self._sums.pop(parameter, None)
        if total is None:
            total = torch.zeros(parameter.shape, dtype=torch.float64)
        return total if parameter.grad is None else total + parameter.grad

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSums:
        return GradientSums()  # of a copied model: its parameters are others


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in their order, so many together as make one exchange worth while."""
    group: list[nn.Parameter] = []
    for parameter in parameters:
        group.append(parameter)
        if sum(member.numel() for member in group) >= EXCHANGED:
            yield group
            group = []
    if group:
        yield group


class ImagewiseConv2d(nn.Conv2d):
    """``conv`` with its parameters and state dict, which in training takes the images of a batch one by one.

    Its gradients go to ``sums`` instead of the parameters' ``.grad``. Float32, float64, or what autocast asks for.
    """

    def __init__(self, conv: nn.Conv2d, sums: GradientSums) -> None:
        assert conv.padding_mode == "zeros" and not isinstance(conv.padding, str), conv
        nn.Module.__init__(self)
        self.__dict__.update({key: value for key, value in conv.__dict__.items() if key not in self.__dict__})
        self._parameters = conv._parameters
        self.training = conv.training
        self.sums = sums

    def forward(self, input: Tensor) -> Tensor:
        """Maps (batch, channels, rows, columns), as nn.Conv2d."""
        if not self.training:
            return super().forward(input)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        convolved: Tensor = _Imagewise.apply(input, weight, bias, self)
        return convolved


class _Imagewise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ImagewiseConv2d) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        with torch.autocast(x.device.type, enabled=False):
            return torch.cat([layer._conv_forward(image, weight, bias) for image in x.split(1)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: ImagewiseConv2d = ctx.layer
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], layer.weight.requires_grad, False]
        of_images = []
        for image, its_grad in zip(x.split(1), grad.split(1), strict=True):
            of_image, of_weight, _ = torch.ops.aten.convolution_backward(
                its_grad, image, weight, None, layer.stride, layer.padding, layer.dilation, False, (0, 0),
                layer.groups, wanted,
            )  # fmt: skip
            of_images.append(of_image)
            if wanted[1]:
                layer.sums.add(layer.weight, of_weight[None])
            if layer.bias is not None and layer.bias.requires_grad:
                layer.sums.add(layer.bias, its_grad.sum((2, 3), dtype=layer.bias.dtype))
        return torch.cat(of_images) if wanted[0] else None, None, None, None


class ImageSummed(nn.Module):
    """A model whose gradients are summed image by image, over all ranks; in place of DistributedDataParallel.

    Each rank calls backward on its share of the loss: the shares are summed, not averaged. The maps come in float64,
    and the loss is computed so: vector instructions and the plain ones for what is left of an array differ in the last
    bit of an exponential, and what is left depends on the number of images.
    """

    def __init__(self, module: nn.Module, sums: GradientSums, sum_over_ranks: SumOverRanks) -> None:
        super().__init__()
        self.module = module
        self.sums = sums
        self.sum_over_ranks = sum_over_ranks

    def forward(self, images: Tensor) -> list[Tensor]:
        """The maps of the module, in float64."""
        return [raw.double() for raw in self.module(images)]

    def finish(self) -> None:
        """Give the parameters the gradients of the step, behind its last backward pass."""
        self.sums.finish(self.module, self.sum_over_ranks)


def use_image_sums(model: nn.Module, sums: GradientSums) -> nn.Module:
    """The model, changed in place, with the gradients of convolutions and GlobalBatchNorm2d in ``sums``, from where
    ``ImageSummed`` takes them. Names and state dict stay as they are."""
    if type(model) is nn.Conv2d:
        return ImagewiseConv2d(model, sums)
    if isinstance(model, GlobalBatchNorm2d):
        model.sums = sums
    for name, child in model.named_children():
        setattr(model, name, use_image_sums(child, sums))
    return model
