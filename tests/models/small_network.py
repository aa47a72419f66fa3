"""A small detector with a shortcut and two heads: its .cfg, and the same network in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Darknet, parse_cfg
from tests.models.cfg_writer import cfg, conv, head, route, section, shortcut


def cfg_text(num_classes: int = 2) -> str:
    """The .cfg; layers 5 and 11 feed the heads, with one anchor each."""

    one, other = (head(mask, anchors="10,14, 23,27", classes=num_classes, num=2) for mask in (0, 1))
    filters = f"filters={5 + num_classes}"
    return cfg(
        conv(8, 3), conv(16, 3, 2), conv(8), conv(16, 3), shortcut(-3),
        one.replace(filters, f"{filters}   # of the first head"),
        route(4), conv(8), section("upsample", stride=2), route(-1, 0), other, side=32,
    )  # fmt: skip


def small(num_classes: int = 2, width: float = 1.0) -> Darknet:
    """The network in evaluation mode, with random values, also in the running statistics."""
    return randomise(Darknet(parse_cfg(cfg_text(2), "small.cfg"), num_classes, width)).eval()


def randomise(model: Darknet) -> Darknet:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("running_var", "norm.weight")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.normal_(0, 0.3)
    return model


class PlainNetwork(nn.Module):
    """The network of cfg_text without this project.

    names: those of a convolution and of its batch norm in the Sequential of each layer, with {n}
    for a running number. eps: what the batch norm adds to variances.
    """

    def __init__(
        self, container: str, names: tuple[str, str], eps: float, norm_first: bool = False, num_classes: int = 2
    ) -> None:
        super().__init__()
        shapes = {0: (3, 8, 3, 1), 1: (8, 16, 3, 2), 2: (16, 8, 1, 1), 3: (8, 16, 3, 1), 8: (16, 8, 1, 1)}
        shapes |= {5: (16, 5 + num_classes, 1, 1), 11: (16, 5 + num_classes, 1, 1)}
        layers = [nn.Sequential() for _ in range(13)]
        for number, layer in enumerate(sorted(shapes)):
            inputs, filters, size, stride = shapes[layer]
            has_norm = layer not in (5, 11)
            made = {names[0]: nn.Conv2d(inputs, filters, size, stride, size // 2, bias=not has_norm)}
            if has_norm:
                made[names[1]] = nn.BatchNorm2d(filters, eps=eps)
            for name in sorted(made, key=list(made).index, reverse=norm_first):
                layers[layer].add_module(name.format(n=number), made[name])
        self.container = container
        setattr(self, container, nn.ModuleList(layers))
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.9)
        self.eval()

    def layer(self, index: int, x: Tensor) -> Tensor:
        modules = list(getattr(self, self.container)[index])
        norms = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
        x = next(module for module in modules if isinstance(module, nn.Conv2d))(x)
        return F.leaky_relu(norms[0](x), 0.1) if norms else x

    def forward(self, images: Tensor) -> list[Tensor]:
        """The inputs of the two heads: (batch, 5 + classes, rows, columns)."""
        first = self.layer(0, images)
        down = self.layer(1, first)
        joined = down + self.layer(3, self.layer(2, down))
        up = F.interpolate(self.layer(8, joined), scale_factor=2)
        return [self.layer(5, joined), self.layer(11, torch.cat([up, first], dim=1))]
