"""YOLOX's forward pass by its own names of tensors, an oracle for models/yolox.py."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional

CLASSES, STRIDES, EPS = 80, (8, 16, 32), 1e-3
# as YOLOX has them
DEPTHS = {"nano": 0.33, "tiny": 0.33, "s": 0.33, "m": 0.67, "l": 1, "x": 1.33, "darknet53": 1}
WIDTHS = {"nano": 0.25, "tiny": 0.375, "s": 0.5, "m": 0.75, "l": 1, "x": 1.25, "darknet53": 1}
IN, NORM = "backbone.backbone", ("running_mean", "running_var", "weight", "bias")


class Yolox:
    """One of DEPTHS. The first forward pass makes its tensors, with the statistics of those images.

    They are random, or ``folded``: pairs of kernels and biases in the order of computing, whose
    batch norms were folded into them.
    """

    def __init__(self, name: str, images: Tensor, folded: Iterator[tuple[Tensor, Tensor]] | None = None) -> None:
        self.name, self.folded, self.state = name, folded, dict[str, Tensor]()
        self.maps = self(images)
        assert next(folded or iter(()), None) is None
        # A file of YOLOX has the heads' tensors by kind, then by level.
        self.state = dict(sorted(self.state.items(), key=lambda item: item[0] if item[0].startswith("head.") else ""))

    def kernels(self, x: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
        if self.folded is not None:
            return next(self.folded)
        most = (3 / math.prod(shape[1:])) ** 0.5  # for maps with the variance of their inputs
        kernels, bias = (torch.empty(some).uniform_(-most, most).to(x) for some in (shape, shape[:1]))
        return kernels, bias

    def conv(self, name: str, x: Tensor, filters: int, size: int = 1, stride: int = 1, groups: int = 1) -> Tensor:
        state, norm = self.state, [f"{name}.bn.{key}" for key in NORM]
        is_new = norm[0] not in state
        if is_new:
            kernels, bias = self.kernels(x, filters, x.shape[1] // groups, size, size)
            norms = kernels.flatten(1).norm(dim=1)  # to train well, kernels have the norm 1
            state[f"{name}.conv.weight"] = kernels / norms[:, None, None, None]
        y = functional.conv2d(x, state[f"{name}.conv.weight"], None, stride, size // 2, groups=groups)
        if is_new:
            variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
            gain = (variance + EPS).sqrt() * norms if self.folded else torch.empty_like(bias).uniform_(0.7, 1.3)
            bias = bias + mean * norms if self.folded else bias
            state |= zip(norm, (mean, variance, gain, bias), strict=True)
        mean, variance, gain, bias = (state[key] for key in norm)
        y = functional.batch_norm(y, mean, variance, gain, bias, eps=EPS)
        return functional.leaky_relu(y, 0.1) if self.name == "darknet53" else functional.silu(y)

    def predict(self, name: str, x: Tensor, filters: int) -> Tensor:
        keys = f"{name}.weight", f"{name}.bias"
        if keys[0] not in self.state:
            self.state |= zip(keys, self.kernels(x, filters, x.shape[1], 1, 1), strict=True)
        return functional.conv2d(x, *(self.state[key] for key in keys))

    def wide(self, name: str, x: Tensor, filters: int, stride: int = 1) -> Tensor:
        if self.name != "nano":
            return self.conv(name, x, filters, 3, stride)
        y = self.conv(f"{name}.dconv", x, x.shape[1], 3, stride, groups=x.shape[1])
        return self.conv(f"{name}.pconv", y, filters)

    def csp(self, name: str, x: Tensor, filters: int, blocks: int, adds: bool = False) -> Tensor:
        through, around = self.conv(f"{name}.conv1", x, filters // 2), self.conv(f"{name}.conv2", x, filters // 2)
        for block in (f"{name}.m.{number}" for number in range(blocks)):
            y = self.wide(f"{block}.conv2", self.conv(f"{block}.conv1", through, filters // 2), filters // 2)
            through = through + y if adds else y
        return self.conv(f"{name}.conv3", torch.cat((through, around), 1), filters)

    def pyramid(self, name: str, x: Tensor, filters: int) -> Tensor:
        x = self.conv(f"{name}.conv1", x, x.shape[1] // 2)
        pooled = [functional.max_pool2d(x, size, 1, size // 2) for size in (5, 9, 13)]
        return self.conv(f"{name}.conv2", torch.cat((x, *pooled), 1), filters)

    def up(self, name: str, x: Tensor, beside: Tensor, filters: int) -> tuple[Tensor, Tensor]:
        x = self.conv(f"backbone.{name}", x, filters)
        return x, torch.cat((functional.interpolate(x, scale_factor=2), beside), 1)

    def pafpn(self, x: Tensor) -> list[Tensor]:
        c, n = [int(64 * WIDTHS[self.name]) << step for step in range(5)], round(3 * DEPTHS[self.name])
        blocks = torch.cat([x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)], 1)
        maps = [self.conv(f"{IN}.stem.conv", blocks, c[0], 3)]
        for level, count in ((1, n), (2, 3 * n), (3, 3 * n), (4, n)):
            stage = f"{IN}.dark{level + 1}"
            y = self.wide(f"{stage}.0", maps[-1], c[level], 2)
            y = self.pyramid(f"{stage}.1", y, c[4]) if level == 4 else y
            maps.append(self.csp(f"{stage}.{1 + (level == 4)}", y, c[level], count, adds=level < 4))
        top, x = self.up("lateral_conv0", maps[4], maps[3], c[3])
        middle, x = self.up("reduce_conv1", self.csp("backbone.C3_p4", x, c[3], n), maps[2], c[2])
        fine = self.csp("backbone.C3_p3", x, c[2], n)
        x = torch.cat((self.wide("backbone.bu_conv2", fine, c[2], 2), middle), 1)
        middle = self.csp("backbone.C3_n3", x, c[3], n)
        x = torch.cat((self.wide("backbone.bu_conv1", middle, c[3], 2), top), 1)
        return [fine, middle, self.csp("backbone.C3_n4", x, c[4], n)]

    def chain(self, name: str, x: Tensor, filters: int, numbers: Iterable[int]) -> Tensor:
        for number in numbers:
            grows = x.shape[1] == filters  # 3x3 to twice as many, or 1x1
            x = self.conv(f"{name}.{number}", x, filters * (1 + grows), 1 + 2 * grows)
        return x

    def fpn(self, x: Tensor) -> list[Tensor]:
        x, maps = self.conv(f"{IN}.stem.0", x, 32, 3), []
        for level, blocks in enumerate((1, 2, 8, 8, 4), 1):
            stage, start = (f"{IN}.stem", 1) if level == 1 else (f"{IN}.dark{level}", 0)
            x = self.conv(f"{stage}.{start}", x, 32 << level, 3, 2)
            for number in range(start + 1, start + 1 + blocks):
                y = self.conv(f"{stage}.{number}.layer1", x, 16 << level)
                x = x + self.conv(f"{stage}.{number}.layer2", y, 32 << level, 3)
            maps.append(x)
        x = self.pyramid(f"{IN}.dark5.7", self.chain(f"{IN}.dark5", x, 512, (5, 6)), 512)
        top = self.chain(f"{IN}.dark5", x, 512, (8, 9))
        middle = self.chain("backbone.out1", self.up("out1_cbl", top, maps[3], 256)[1], 256, range(5))
        return [self.chain("backbone.out2", self.up("out2_cbl", middle, maps[2], 128)[1], 128, range(5)), middle, top]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[Tensor]:
        """Raw maps (n, 85, h, w) of images (n, 3, h, w), BGR in 0..255."""
        maps, filters = [], int(256 * WIDTHS[self.name])
        for level, neck in enumerate(self.fpn(images) if self.name == "darknet53" else self.pafpn(images)):
            stem, parts = self.conv(f"head.stems.{level}", neck, filters), {}
            for tower, kinds in (("cls", {"cls": CLASSES}), ("reg", {"reg": 4, "obj": 1})):
                x = stem
                for number in (0, 1):
                    x = self.wide(f"head.{tower}_convs.{level}.{number}", x, filters)
                for kind, values in kinds.items():
                    parts[kind] = self.predict(f"head.{kind}_preds.{level}", x, values)
            maps.append(torch.cat((parts["reg"], parts["obj"], parts["cls"]), 1))
        return maps


def decoded(maps: list[Tensor]) -> Tensor:
    """Corners in pixels and scores (n, cells, 4 + classes)."""
    parts = []
    for raw, stride in zip(maps, STRIDES, strict=True):
        rows, columns = torch.meshgrid(torch.arange(raw.shape[2]), torch.arange(raw.shape[3]), indexing="ij")
        centre, half = (raw[:, :2] + torch.stack((columns, rows))) * stride, raw[:, 2:4].exp() * stride / 2
        scores = raw[:, 4:5].sigmoid() * raw[:, 5:].sigmoid()
        parts.append(torch.cat((centre - half, centre + half, scores), 1).flatten(2))
    return torch.cat(parts, 2).mT


def nano_of_onnx(path: Path, images: Tensor) -> Yolox:
    """The network of an exported file, with the statistics of these images."""
    graph = onnx.load(path).graph
    values = {entry.name: torch.from_numpy(numpy_helper.to_array(entry).copy()) for entry in graph.initializer}
    stored = [(values[node.input[1]], values[node.input[2]]) for node in graph.node if node.op_type == "Conv"]
    return Yolox("nano", images, iter(stored))
