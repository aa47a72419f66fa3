"""YOLOX as torch modules with its names of tensors, an oracle for models/yolox.py."""

from collections import OrderedDict
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

CLASSES, STRIDES = 80, (8, 16, 32)
# depth and width as YOLOX has them
SIZES = {
    "nano": (0.33, 0.25),
    "tiny": (0.33, 0.375),
    "s": (0.33, 0.5),
    "m": (0.67, 0.75),
    "l": (1, 1),
    "x": (1.33, 1.25),
}


def up(images: Tensor) -> Tensor:
    return functional.interpolate(images, scale_factor=2)


class Maker:
    """Makes the modules of one network: with SiLU or leaky ReLU, and depthwise or not."""

    def __init__(self, name: str) -> None:
        self.is_depthwise, self.is_leaky = name == "nano", name == "darknet53"

    def conv(self, inputs: int, filters: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
        conv = nn.Conv2d(inputs, filters, size, stride, size // 2, groups=groups, bias=False)
        act = nn.LeakyReLU(0.1) if self.is_leaky else nn.SiLU()
        return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(filters, eps=1e-3), act=act))

    def wide(self, inputs: int, filters: int, stride: int = 1) -> nn.Module:
        if not self.is_depthwise:
            return self.conv(inputs, filters, 3, stride)
        dconv = self.conv(inputs, inputs, 3, stride, inputs)
        return nn.Sequential(OrderedDict(dconv=dconv, pconv=self.conv(inputs, filters)))


class Focus(nn.Module):
    def __init__(self, make: Maker, filters: int) -> None:
        super().__init__()
        self.conv = make.conv(12, filters, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat([x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)], 1))


class Block(nn.Module):
    def __init__(self, make: Maker, filters: int, adds: bool) -> None:
        super().__init__()
        self.conv1, self.conv2, self.adds = make.conv(filters, filters), make.wide(filters, filters), adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.adds else y


class Csp(nn.Module):
    def __init__(self, make: Maker, inputs: int, filters: int, blocks: int, adds: bool = False) -> None:
        super().__init__()
        half = filters // 2
        self.conv1, self.conv2 = make.conv(inputs, half), make.conv(inputs, half)
        self.conv3 = make.conv(filters, filters)
        self.m = nn.Sequential(*[Block(make, half, adds) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        through, around = self.conv1(x), self.conv2(x)
        return self.conv3(torch.cat((self.m(through), around), 1))


class Pyramid(nn.Module):
    def __init__(self, make: Maker, inputs: int, filters: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = make.conv(inputs, inputs // 2), make.conv(inputs * 2, filters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv2(torch.cat((x, *(functional.max_pool2d(x, size, 1, size // 2) for size in (5, 9, 13))), 1))


class CspDarknet(nn.Module):
    def __init__(self, make: Maker, c: list[int], depth: int) -> None:
        super().__init__()
        self.stem = Focus(make, c[0])
        for stage, blocks in ((1, depth), (2, 3 * depth), (3, 3 * depth)):
            wide = make.wide(c[stage - 1], c[stage], 2)
            setattr(self, f"dark{stage + 1}", nn.Sequential(wide, Csp(make, c[stage], c[stage], blocks, adds=True)))
        self.dark5 = nn.Sequential(
            make.wide(c[3], c[4], 2), Pyramid(make, c[4], c[4]), Csp(make, c[4], c[4], depth, adds=False)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        third = self.dark3(self.dark2(self.stem(x)))
        return [third, fourth := self.dark4(third), self.dark5(fourth)]


class Pafpn(nn.Module):
    def __init__(self, make: Maker, depth: float, width: float) -> None:
        super().__init__()
        c, n = [int(64 * width) * 2**step for step in range(5)], round(3 * depth)
        self.backbone = CspDarknet(make, c, n)
        self.lateral_conv0, self.C3_p4 = make.conv(c[4], c[3]), Csp(make, 2 * c[3], c[3], n)
        self.reduce_conv1, self.C3_p3 = make.conv(c[3], c[2]), Csp(make, 2 * c[2], c[2], n)
        self.bu_conv2, self.C3_n3 = make.wide(c[2], c[2], 2), Csp(make, 2 * c[2], c[3], n)
        self.bu_conv1, self.C3_n4 = make.wide(c[3], c[3], 2), Csp(make, 2 * c[3], c[4], n)
        self.widths = c[2:]

    def forward(self, x: Tensor) -> list[Tensor]:
        third, fourth, fifth = self.backbone(x)
        top = self.lateral_conv0(fifth)
        middle = self.reduce_conv1(self.C3_p4(torch.cat((up(top), fourth), 1)))
        fine = self.C3_p3(torch.cat((up(middle), third), 1))
        mid = self.C3_n3(torch.cat((self.bu_conv2(fine), middle), 1))
        return [fine, mid, self.C3_n4(torch.cat((self.bu_conv1(mid), top), 1))]


class Residual(nn.Module):
    def __init__(self, make: Maker, filters: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = make.conv(filters, filters // 2), make.conv(filters // 2, filters, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer2(self.layer1(x))


class Darknet53(nn.Module):
    def __init__(self, make: Maker) -> None:
        super().__init__()

        def stage(filters: int, blocks: int) -> list[nn.Module]:
            return [make.conv(filters // 2, filters, 3, 2), *(Residual(make, filters) for _ in range(blocks))]

        self.stem = nn.Sequential(make.conv(3, 32, 3), *stage(64, 1))
        self.dark2, self.dark3 = nn.Sequential(*stage(128, 2)), nn.Sequential(*stage(256, 8))
        self.dark4 = nn.Sequential(*stage(512, 8))
        before, after = [make.conv(1024, 512), make.conv(512, 1024, 3)], [make.conv(512, 1024, 3), make.conv(1024, 512)]
        self.dark5 = nn.Sequential(*stage(1024, 4), *before, Pyramid(make, 1024, 512), *after)

    def forward(self, x: Tensor) -> list[Tensor]:
        third = self.dark3(self.dark2(self.stem(x)))
        return [third, fourth := self.dark4(third), self.dark5(fourth)]


class Fpn(nn.Module):
    def __init__(self, make: Maker) -> None:
        super().__init__()

        def embedding(inputs: int, filters: int) -> nn.Module:
            pairs = ((inputs, filters, 1), (filters, 2 * filters, 3), (2 * filters, filters, 1))
            return nn.Sequential(*(make.conv(*pair) for pair in (*pairs, *pairs[1:])))

        self.backbone = Darknet53(make)
        self.out1_cbl, self.out1 = make.conv(512, 256), embedding(768, 256)
        self.out2_cbl, self.out2 = make.conv(256, 128), embedding(384, 128)
        self.widths = [128, 256, 512]

    def forward(self, x: Tensor) -> list[Tensor]:
        third, fourth, fifth = self.backbone(x)
        middle = self.out1(torch.cat((up(self.out1_cbl(fifth)), fourth), 1))
        return [self.out2(torch.cat((up(self.out2_cbl(middle)), third), 1)), middle, fifth]


class Heads(nn.Module):
    def __init__(self, make: Maker, widths: list[int], filters: int) -> None:
        super().__init__()

        def towers() -> nn.ModuleList:
            return nn.ModuleList(nn.Sequential(*(make.wide(filters, filters) for _ in "12")) for _ in widths)

        self.cls_convs, self.reg_convs = towers(), towers()
        for kind, values in (("cls", CLASSES), ("reg", 4), ("obj", 1)):
            setattr(self, f"{kind}_preds", nn.ModuleList(nn.Conv2d(filters, values, 1) for _ in widths))
        self.stems = nn.ModuleList(make.conv(inputs, filters) for inputs in widths)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        outputs = []
        for level, map_ in enumerate(maps):
            x = self.stems[level](map_)
            classes = self.cls_preds[level](self.cls_convs[level](x))
            box = self.reg_convs[level](x)
            outputs.append(torch.cat((self.reg_preds[level](box), self.obj_preds[level](box), classes), 1))
        return outputs


class Yolox(nn.Module):
    """One of SIZES, or darknet53: images (n, 3, h, w), BGR in 0..255, to raw (n, 85, h, w)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make = Maker(name)
        self.backbone = Fpn(make) if name == "darknet53" else Pafpn(make, *SIZES[name])
        self.head = Heads(make, self.backbone.widths, int(256 * SIZES.get(name, (1, 1))[1]))

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.head(self.backbone(images))


@torch.no_grad()
def trained_like(name: str, images: Tensor) -> Yolox:
    """A network of random weights, with the statistics of the maps of these images."""
    model = Yolox(name).to(images.dtype).eval()

    def fill(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        norm.running_var, norm.running_mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        nn.init.uniform_(norm.weight, 0.7, 1.3)
        nn.init.uniform_(norm.bias, -0.5, 0.5)

    hooks = [norm.register_forward_pre_hook(fill) for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
    model(images)
    for hook in hooks:
        hook.remove()
    return model


def decoded(maps: list[Tensor]) -> Tensor:
    """Corners in pixels and scores (n, cells, 4 + classes)."""
    parts = []
    for raw, stride in zip(maps, STRIDES, strict=True):
        rows, columns = torch.meshgrid(torch.arange(raw.shape[2]), torch.arange(raw.shape[3]), indexing="ij")
        centre, half = (raw[:, :2] + torch.stack((columns, rows))) * stride, raw[:, 2:4].exp() * stride / 2
        scores = raw[:, 4:5].sigmoid() * raw[:, 5:].sigmoid()
        parts.append(torch.cat((centre - half, centre + half, scores), 1).flatten(2))
    return torch.cat(parts, 2).mT


@torch.no_grad()
def nano_of_onnx(path: Path, images: Tensor) -> Yolox:
    """The network of an exported file, whose batch norms were folded into the convolutions.

    Here kernels have the norm 1 and batch norms the statistics of the maps of these images. The
    file has its convolutions in the order of computing.
    """
    graph = onnx.load(path).graph
    values = {entry.name: torch.from_numpy(numpy_helper.to_array(entry).copy()) for entry in graph.initializer}
    stored = [[values[name] for name in node.input[1:]] for node in graph.node if node.op_type == "Conv"]
    done: list[tuple[Tensor, Tensor]] = []  # norms of kernels, biases

    def fill(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(module, nn.Conv2d):
            kernels, bias = stored[len(done)]
            norms = kernels.flatten(1).norm(dim=1).clamp(min=1e-9)
            done.append((norms, bias))
            if module.bias is None:
                kernels = kernels / norms[:, None, None, None]
            else:
                module.bias.copy_(bias)
            module.weight.copy_(kernels)
        elif isinstance(module, nn.BatchNorm2d):
            norms, bias = done[-1]
            module.running_var, module.running_mean = torch.var_mean(inputs[0], (0, 2, 3))
            module.weight.copy_((module.running_var + module.eps).sqrt() * norms)
            module.bias.copy_(bias + module.running_mean * norms)

    model = Yolox("nano").eval()
    hooks = [module.register_forward_pre_hook(fill) for module in model.modules()]
    model(images)
    assert len(done) == len(stored)
    for hook in hooks:
        hook.remove()
    return model
