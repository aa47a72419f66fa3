"""Edit the text of a .cfg. Checkpoints store the text, so they keep the edits."""

from collections.abc import Iterable, Sequence

from models.cfg import Cfg, Section, parse_cfg
from models.darknet import Darknet
from models.errors import ModelError
from models.heads import read_anchors
from models.layers import Convolution, SharedConvolution


def with_anchors(cfg: Cfg, anchors: Sequence[Sequence[float]] | str) -> Cfg:
    """Replace the anchors, (width, height) in pixels at network scale, in all [yolo] sections.

    The masks stay, so the number of anchors must not change: ModelError otherwise, and for "auto",
    which is resolved when a training starts.
    """
    if isinstance(anchors, str):
        raise ModelError("model.anchors=auto is for train.py, which fits them to its data. fix: leave it out here")
    text = ",  ".join(f"{width:g},{height:g}" for width, height in anchors)
    changes: list[tuple[Section, str, str]] = []
    for section in cfg.layers:
        if section.kind != "yolo":
            continue
        count = len(read_anchors(section)[0])
        if count != len(anchors):
            raise ModelError(
                f"model.anchors holds {len(anchors)} anchors, {cfg.source}:{section.line} needs {count}."
                f" fix: give {count} pairs of width and height"
            )
        changes += [(section, "anchors", text), (section, "num", str(count))]
    return parse_cfg(_with_options(cfg.text, changes), cfg.source)


def with_scale_x_y(cfg: Cfg, scale_x_y: float) -> Cfg:
    """Replace scale_x_y in all [yolo] sections."""
    changes = [(section, "scale_x_y", f"{scale_x_y:g}") for section in cfg.layers if section.kind == "yolo"]
    return parse_cfg(_with_options(cfg.text, changes), cfg.source)


def fitted_cfg(model: Darknet) -> str:
    """The text of `model.cfg` with the filters, groups and classes of the built model.

    Darknet reads it together with the file that save_darknet_weights writes.
    """
    changes = (
        (section, key, str(value))
        for section, layer in zip(model.cfg.layers, model.layers, strict=True)
        for key, value in _own_values(section, layer, model.num_classes).items()
        if section.integer(key, -1) != value
    )
    return _with_options(model.cfg.text, changes)


def _own_values(section: Section, layer: object, num_classes: int) -> dict[str, int]:
    """The values of the built layer for the options that class count and width affect."""
    if section.kind == "yolo":
        return {"classes": num_classes}
    if isinstance(layer, SharedConvolution):
        layer = layer.source
    if isinstance(layer, Convolution):
        values = {"filters": layer.conv.out_channels}
        return values | {"groups": layer.conv.groups} if "groups" in section.options else values
    return {}


def _with_options(text: str, changes: Iterable[tuple[Section, str, str]]) -> str:
    """Set each (section, key, value), on the key's line or on a new one at the section's top."""
    lines = text.split("\n")  # as the parser counts them
    edits = [
        (section.option_lines.get(key, section.line), key in section.option_lines, f"{key}={value}")
        for section, key, value in changes
    ]
    for number, replaces, line in sorted(edits, reverse=True):  # from the end, so that earlier line numbers stay valid
        lines[number - 1 if replaces else number : number] = [line]
    return "\n".join(lines)
