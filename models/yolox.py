"""The .cfg files of YOLOX's usual networks, which differ in two numbers. Imports no torch."""

from typing import Any

# Blocks of the first stage and filters of the first convolution: YOLOX's depth * 3 and width * 64.
SIZES = {"nano": (1, 16), "tiny": (1, 24), "s": (1, 32), "m": (2, 48), "l": (3, 64), "x": (4, 80)}
HEADER = """\
# YOLOX-{name} (Ge et al. 2021, arXiv 2107.08430): one anchor a cell, decoupled heads. Darknet has no linear_xy (the
# centre of a box lies raw x, y cells from the corner of its cell) and no bn_eps. scale_x_y says which cells learn it.
[net]
width={side}
height={side}
channels=3
bn_eps=0.001
"""


class Layers:
    """The layers of a .cfg. What adds some returns the number of the last."""

    def __init__(self, is_depthwise: bool) -> None:
        self.is_depthwise = is_depthwise
        self.sections: list[str] = []

    def add(self, kind: str, **options: Any) -> int:
        """A section of that kind."""
        lines = [f"{key}={value}" for key, value in options.items()]
        self.sections.append("\n".join([f"[{kind}]", *lines, ""]))
        return len(self.sections) - 1

    def route(self, *layers: int) -> int:
        """The maps of ``layers``, unless it is the last one alone, which is read anyway."""
        last = len(self.sections) - 1
        return last if layers == (last,) else self.add("route", layers=",".join(map(str, layers)))

    def conv(self, filters: int, size: int = 1, stride: int = 1, **more: int) -> int:
        """A convolution with batch norm."""
        shape = {"filters": filters, "size": size, "stride": stride, "padding": (size - 1) // 2, **more}
        return self.add("convolutional", batch_normalize=1, **shape, activation="swish")

    def wide(self, channels: int, filters: int, stride: int = 1) -> int:
        """A 3x3 convolution of a map with that many channels."""
        if not self.is_depthwise:
            return self.conv(filters, 3, stride)
        self.conv(channels, 3, stride, groups=channels)
        return self.conv(filters)

    def stage(self, source: int, filters: int, blocks: int, has_shortcuts: bool = False) -> int:
        """Half of the filters go through the blocks, half around them."""
        half = filters // 2
        through = self.conv(half)
        for _ in range(blocks):
            start = through
            self.conv(half)
            through = self.wide(half, half)
            if has_shortcuts:
                through = self.add("shortcut", **{"from": start}, activation="linear")
        self.route(source)
        around = self.conv(half)
        self.route(through, around)
        return self.conv(filters)


def yolox_cfg(name: str) -> str:
    """The text of the .cfg of YOLOX-``name``, one of SIZES."""
    blocks, first = SIZES[name]
    c2, c3, c4, c5 = (first << step for step in range(1, 5))
    net = Layers(is_depthwise=name == "nano")
    net.conv(first, 6, 2)  # in YOLOX 3x3 on blocks of 2x2 pixels
    maps = []
    for filters, count in ((c2, blocks), (c3, 3 * blocks), (c4, 3 * blocks)):
        source = net.wide(filters // 2, filters, 2)
        maps.append(net.stage(source, filters, count, has_shortcuts=True))
    net.wide(c4, c5, 2)
    pools = [net.conv(c4)]
    for size in (5, 9, 13):
        net.route(pools[0])
        pools.append(net.add("maxpool", size=size, stride=1))
    net.route(*pools)
    net.stage(net.conv(c5), c5, blocks)
    # The neck: up to stride 8, and down again.
    coarse = net.conv(c4)
    net.stage(net.route(net.add("upsample", stride=2), maps[2]), c4, blocks)
    middle = net.conv(c3)
    outputs = [net.stage(net.route(net.add("upsample", stride=2), maps[1]), c3, blocks)]
    for filters, beside in ((c3, middle), (c4, coarse)):
        source = net.route(net.wide(filters, filters, 2), beside)
        outputs.append(net.stage(source, 2 * filters, blocks))
    for level, source in enumerate(outputs):
        net.route(source)
        stem = net.conv(c3)
        parts = []
        for values in (5, 80):  # box and objectness, classes
            net.route(stem)
            net.wide(c3, c3)
            net.wide(c3, c3)
            parts.append(net.add("convolutional", filters=values, activation="linear"))
        net.route(*parts)
        net.add("yolo", mask=level, anchors="8,8, 16,16, 32,32", num=3, classes=80, scale_x_y=6, linear_xy=1)
    return "\n".join([HEADER.format(name=name, side=416 if first < 32 else 640), *net.sections])
