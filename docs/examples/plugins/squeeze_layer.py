"""A layer: squeeze and excitation (Hu et al. 2018), which weighs the channels of a map.

    [squeeze]
    ratio=8

in a .cfg, then ``python train.py model.cfg=my.cfg plugins=[squeeze_layer.py]``.
"""

from models.cfg import Section
from models.graph import Graph, Node
from plugins import LAYERS, SECTION_KEYS, layer_keys


def squeeze(graph: Graph, section: Section) -> Node:
    """Squeeze and excitation of the previous map."""
    from torchvision.ops import SqueezeExcitation  # slow to import

    ratio = section.integer("ratio", 16, minimum=1)  # the bottleneck has this many times fewer channels
    source, shape = graph.previous()
    return Node(SqueezeExcitation(shape.channels, max(1, shape.channels // ratio)), (source,), shape)


LAYERS["squeeze"] = squeeze
SECTION_KEYS["squeeze"] = layer_keys("ratio")
