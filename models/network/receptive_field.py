"""How much of the image one cell of a map sees."""

from fractions import Fraction

from torch import nn

from models.network.darknet import Darknet
from models.network.graph import IMAGES
from models.network.layers import Convolution, SharedConvolution
from models.network.pools import Blur, MaxPool, Reorg, ScrambledReorg, SumPool

Field = tuple[Fraction, Fraction] | None  # (rows, columns) in pixels; None: the whole image


def receptive_fields(model: Darknet) -> list[Field]:
    """For each layer the (rows, columns) of pixels that affect one cell; None for the image.

    A window of k rows adds k - 1 times the stride of the map that it slides over. Where maps meet,
    the largest field counts (Araujo, Norris and Sim 2019, "Computing receptive fields of
    convolutional neural networks").
    """
    fields: dict[int, Field] = {IMAGES: (Fraction(1), Fraction(1))}
    for index, layer in enumerate(model.layers):
        sources = model.sources[index]
        known = [field for source in sources if (field := fields[source]) is not None]
        stride = (Fraction(1), Fraction(1)) if sources[0] == IMAGES else model.shapes[sources[0]].stride
        if len(known) < len(sources) or stride is None or isinstance(layer, nn.AdaptiveAvgPool2d | ScrambledReorg):
            fields[index] = None
            continue
        reach = _window(layer) - 1
        rows, columns = (max(field[axis] for field in known) + reach * stride[axis] for axis in (0, 1))
        fields[index] = rows, columns
    return [fields[index] for index in range(len(model.layers))]


def _window(layer: nn.Module) -> int:
    """Rows (and columns) of the input that one cell of the layer's map depends on."""
    if isinstance(layer, nn.Sequential):  # a pool and its low-pass filter, on maps of the same stride
        return 1 + sum(_window(part) - 1 for part in layer)
    if isinstance(layer, SharedConvolution):
        return layer.dilation * (layer.source.conv.kernel_size[0] - 1) + 1
    if isinstance(layer, Convolution):
        kernel = layer.conv.dilation[0] * (layer.conv.kernel_size[0] - 1) + 1
        return kernel if layer.blur is None else kernel + _window(layer.blur) - 1
    if isinstance(layer, Blur):
        return layer.kernel.shape[-1]
    if isinstance(layer, MaxPool):
        return layer.size
    return layer.stride if isinstance(layer, Reorg | SumPool) else 1
