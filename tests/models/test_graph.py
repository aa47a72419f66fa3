"""Every odd construct of published .cfg files in small files: read, run, trained and stored."""

import math
from pathlib import Path

import pytest
import torch

from models import Darknet, ModelError, load_cfg, load_darknet_weights, parse_cfg, save_darknet_weights, with_box_bins
from models.cfg import SECTION_KEYS
from models.decode import decode
from tests.models.cfg_writer import CLASSES, cfg, conv, head, route, section, shortcut
from tests.models.small_network import randomise
from tests.models.test_cfg import EVERY_KIND

TWENTY = ",  ".join(f"{n},{n + 1}" for n in range(10, 30))


def build(text: str) -> Darknet:
    return Darknet(parse_cfg(text, "odd.cfg"))


def exercise(model: Darknet, folder: Path) -> None:
    """Run two image sizes and a backward pass, then save and load .weights."""
    randomise(model).train()
    step = model.max_stride
    for height, width in ((step, step), (2 * step, 3 * step)):
        maps = model(torch.rand(2, 3, height, width))
        for raw, its in zip(maps, model.heads, strict=True):
            values = 4 * max(1, its.box_bins) + 1 + CLASSES
            assert raw.shape == (2, len(its.anchors), height // its.stride, width // its.stride, values)
    sum(raw.square().mean() for raw in maps).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    twin = build(model.cfg.text)
    save_darknet_weights(model, folder / "a.weights")
    report = load_darknet_weights(twin, folder / "a.weights")
    save_darknet_weights(twin, folder / "b.weights")
    assert report.is_whole and (folder / "a.weights").read_bytes() == (folder / "b.weights").read_bytes()
    images = torch.rand(1, 3, step, step)
    with torch.no_grad():
        for ours, theirs in zip(model.eval()(images), twin.eval()(images), strict=True):
            assert ours.isfinite().all() and ours.equal(theirs)


def pyramid(*heads: str, levels: int = 5) -> str:
    """Maps at strides 8, 16, ... with one head each, as in the scaled v4 and v7 families."""
    stem = "".join(conv(8, 3, 2, "mish") for _ in range(3))
    body = "".join(conv(8, 3, 2, "mish") for _ in range(levels - 1))
    text = stem + body
    for level, one in enumerate(heads):
        text += route(2 + level) + one
    return cfg(text, side=8 * 2 ** (levels - 1))


@pytest.mark.parametrize("activation", ["logistic", "linear"])
def test_five_strides_and_more_anchors_than_num(activation: str, tmp_path: Path) -> None:
    """cspx-p7-mish: num=16, twenty pairs, masks up to 19; raw maps are logits."""
    heads = [
        head(*range(4 * level, 4 * level + 4), anchors=TWENTY, num=16, activation=activation, new_coords=1,
             scale_x_y="2.0")
        for level in range(5)
    ]  # fmt: skip
    model = build(pyramid(*heads))
    assert [its.stride for its in model.heads] == [8, 16, 32, 64, 128] and model.max_stride == 128
    assert model.heads[4].anchors == ((26, 27), (27, 28), (28, 29), (29, 30))
    assert all(its.new_coords and its.scale_x_y == 2 for its in model.heads)
    assert isinstance(model.head_convolutions(model.heads[0])[0].activation, torch.nn.Identity)
    notes = [note.split(": ", 1)[1] for note in model.notes]
    assert sum("read as logistic" in note for note in notes) == (5 if activation == "linear" else 0)
    exercise(model, tmp_path)


def test_masks_of_unequal_length_and_a_missing_comma(tmp_path: Path) -> None:
    """cspx-p7-mish_hp: heads of 2, 3 and 4 anchors; `61,45    61,45` is one number too few."""
    anchors = "13,17,  31,25,   24,51, 61,45    61,45,  48,102, 119,96"
    heads = [head(*mask, anchors=anchors, num=7) for mask in ((0, 1), (1, 2, 3), (3, 4, 5, 6))]
    model = build(pyramid(*heads, levels=3))
    assert model.heads[0].all_anchors[3:] == ((61, 4561), (45, 48), (102, 119), (96, 0.5))
    assert [len(its.anchors) for its in model.heads] == [2, 3, 4]
    assert len(model.notes) == 3 and "a comma may be missing; the last pair is 96,0.5" in model.notes[0]
    exercise(model, tmp_path)


def test_comments_in_values_and_blanks(tmp_path: Path) -> None:
    text = cfg(
        conv(8, 3, 2), conv(8), "[route]\nlayers = -1, 0 ###S4\n", conv(8), "[route]\nlayers = 1,3 ###P6\n", head(0)
    )
    plain = build(text.replace(" ###S4", "").replace(" ###P6", ""))
    assert build(text).sources == plain.sources and plain.sources[2] == (1, 0) and plain.sources[4] == (1, 3)
    odd = "; first\n# second\n" + text.replace("[route]", "[ route ] # third").replace("filters=8", "fil ters\t= 8 ; x")
    odd = odd.replace("[net]", "\n\t[net]\ntime_steps=1\t# for 8GB GPU")
    odd = odd.replace("[net]", "[network]").replace("4,6, 10,12", "4, 6,10 ,12").rstrip("\n")
    path = tmp_path / "windows.cfg"
    path.write_bytes(b"\xef\xbb\xbf" + odd.replace("\n", "\r\n").encode() + b"  # \xff\xfe caf\xe9 \x0c \xc2\x85")
    model = Darknet(load_cfg(path))
    assert model.sources == plain.sources and model.heads == plain.heads
    assert [layer.line for layer in model.cfg.layers[:2]] == [9, 16]  # as an editor counts


def test_shortcuts_between_unequal_maps(tmp_path: Path) -> None:
    """yolov3-tiny-prn adds the first half of a wider map, resnet152_trident a narrower map."""
    text = cfg(
        conv(8, 3, 2), conv(16, 3, 2), conv(32, 3), shortcut(1, activation="leaky"),  # 16 channels added to 32
        conv(16), shortcut(2, -3, activation="leaky"),  # the first 16 of 32, and all of 16
        head(3, 4, anchors=TWENTY, num=6), route(3), conv(8), section("upsample", stride=2), shortcut(0), head(1, 2),
    )  # fmt: skip
    model = build(text)
    assert model.sources[3] == (2, 1) and model.sources[5] == (4, 2, 2)
    assert [model.shapes[index].channels for index in (3, 5)] == [32, 16]
    exercise(model, tmp_path)


def test_every_kind_of_layer(tmp_path: Path) -> None:
    model = build(EVERY_KIND)
    assert {section.kind for section in model.cfg.layers} == SECTION_KEYS.keys()
    assert [layer.xnor for layer in model.layers if hasattr(layer, "xnor")].count(True) == 1
    exercise(model, tmp_path)


def test_options_of_training_change_nothing() -> None:
    text = cfg(conv(8, 3, 2), section("maxpool", size=2, stride=2), head(0))
    more = text.replace("size=2\n", "size=2\nstopbackward=1\nmaxpool_zero_nonmax=1\nlearning_rate=0.1\n")
    more = more.replace("[net]\n", "[net]\nsequential_subdivisions=4\nseq_scales=0.5, 1, 0.5, 1\nema_alpha=0.9998\n")
    more = more.replace("mask=", "counters_per_class=100, 10,  2100\nobjectness_smooth=1\nmax_delta=40\nmask=")
    assert build(more).shapes == build(text).shapes


@pytest.mark.parametrize("sizes", [(5, 9, 13), (3, 5, 9), (13, 5, 5), (3, 4, 9)])
def test_pools_of_one_map_see_their_own_windows(sizes: tuple[int, ...]) -> None:
    """As in YOLOv3-SPP, whatever they are computed from; also for values that are not finite."""
    pools = [section("maxpool", size=size, stride=1) + route(-2 - 2 * place) for place, size in enumerate(sizes)]
    text = cfg(conv(8, 1), "".join(pools), route(*(1 + 2 * place for place in range(len(sizes)))), head(0))
    model, found = build(text).eval(), list[torch.Tensor]()
    model.layers[0].register_forward_hook(lambda layer, args, x: x.masked_fill(x > 1.5, torch.inf))
    for place in (0, 2 * len(sizes) + 1):
        model.layers[place].register_forward_hook(lambda layer, args, x: found.append(x))
    with torch.no_grad():
        model(torch.randn(2, 3, 20, 17))
    x, joined = found
    assert x.isinf().any() and x.shape == (2, 8, 20, 17)
    padded = [torch.nn.functional.pad(x, ((size - 1) // 2, size // 2) * 2, value=-torch.inf) for size in sizes]
    windows = [map.unfold(2, size, 1).unfold(3, size, 1) for map, size in zip(padded, sizes, strict=True)]
    expected = [window.amax((4, 5)) for window in windows]
    assert joined.equal(torch.cat(expected, dim=1))


def test_what_sections_leave_out_is_as_in_darknet_and_filters_are_scaled_to_the_nearest_multiple() -> None:
    yolo = section("yolo", anchors="4,6, 10,12, 20,9", num=2, classes=CLASSES)
    first = section("convolutional", filters=31, batch_normalize=1) + route(0, groups=2)
    pools = section("maxpool", size=3, stride=1) + section("maxpool", stride=4) + section("upsample")
    text = cfg(first, pools, conv(4), conv(4, groups=4), conv(14, batch_normalize=0), yolo)
    model = Darknet(parse_cfg(text, "odd.cfg"), width=0.7)
    assert isinstance(model.layers[0].activation, torch.nn.Sigmoid)
    assert [model.layers[index].conv.out_channels for index in (0, 5, 6, 7)] == [24, 8, 8, 14]
    assert model.layers[6].conv.groups == 8, "still depthwise"
    assert (model.layers[0].norm.eps, model.layers[0].norm.momentum) == (1e-6, 0.03)
    assert model.sources[2] == (1,), "half of the channels, not all of them"
    assert model.layers[3].size == 4 and model.heads[0].stride == 2 and model.heads[0].anchors == ((4, 6), (10, 12))


def decoupled(boxes: int = 5, classes: int = CLASSES, mask: str = "0", join: str = "-2,-1", **more: int) -> str:
    """Two branches on one map, joined by a [route] before their [yolo]."""
    branches = conv(8) + conv(boxes, batch_normalize=0, activation="linear") + route(-2)
    branches += conv(classes, batch_normalize=0, activation="linear") + section("route", layers=join)
    yolo = section("yolo", mask=mask, anchors="4,6, 8,9", classes=CLASSES, scale_x_y=6, **more)
    return cfg(conv(8, 3, 2), branches, yolo)


def test_boxes_and_classes_from_branches_of_their_own(tmp_path: Path) -> None:
    model = build(decoupled(join="-3,-1"))
    exercise(model, tmp_path)
    images = torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        for part in model.head_convolutions(model.heads[0]):
            part.conv.weight.zero_()
        boxes, classes = (part.conv.bias for part in model.head_convolutions(model.heads[0]))
        assert model.eval()(images)[0][0, 0, 2, 3].equal(torch.cat((boxes, classes)))
    assert Darknet(model.cfg, num_classes=7)(images)[0].shape == (1, 1, 4, 4, 12)


def test_the_sides_of_a_box_as_distributions(tmp_path: Path) -> None:
    model = Darknet(with_box_bins(build(decoupled(join="-3,-1")).cfg, 3))
    assert build(decoupled(13, join="-3,-1", box_bins=3)).heads == model.heads
    exercise(model, tmp_path)
    assert Darknet(model.cfg, num_classes=7)(torch.rand(1, 3, 8, 8))[0].shape == (1, 1, 4, 4, 20)
    assert Darknet(with_box_bins(model.cfg, 0)).heads == build(decoupled(join="-3,-1")).heads
    raw = torch.full((1, 1, 4, 4, 15), -9.0)  # left 2 cells, top 1, right 0.25 * 2 and bottom 0
    raw[0, 0, 2, 1, [2, 4, 6, 9]], raw[0, 0, 2, 1, 8] = torch.tensor([9.0, 9, 9, 9]), 9 - math.log(3)
    boxes, _ = decode([raw], model.heads)
    corners = torch.tensor([(1.5 - 2) * 2, (2.5 - 1) * 2, (1.5 + 0.5) * 2, 2.5 * 2])  # middles of a cell of 2 pixels
    torch.testing.assert_close(boxes[0].view(4, 4, 4)[2, 1], corners, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "0,1"}, "has one anchor only"),
        ({"boxes": 6}, "needs filters=5 in layer 2, which has 6"),
        ({"classes": 3}, "needs filters=2 in layer 4, which has 3"),
        ({"join": "-1,-3"}, "needs filters=5 in layer 4, which has 2"),
        ({"join": "-1,0"}, "needs filters=5 in layer 4"),
        ({"join": "-1,-2,-3"}, "must follow a .convolutional. layer"),
        ({"join": "-1,9"}, "layers refers to layer 9"),
        ({"box_bins": 1}, "box_bins must be 0, or 2 and more"),
        ({"box_bins": 65}, "box_bins must lie in 0"),
    ],
)
def test_branches_that_make_no_raw_map_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(decoupled(**{"join": "-3,-1"} | change))
    with pytest.raises(ModelError, match=r"a .route. of two such without groups"):
        build(decoupled(classes=5, join="-3,-1\ngroups=5").replace("classes=2", "classes=5"))


def test_a_layer_with_weights_that_no_head_reads_is_refused() -> None:
    """On several processes DDP would wait for its gradients."""
    text = cfg(conv(8, 3, 2), conv(8), head(0))
    dead = cfg(conv(8, 3, 2), conv(8), route(0), head(0))
    with pytest.raises(ModelError, match=r"^odd\.cfg:\d+: \[convolutional\] leads to no \[yolo\].* fix: "):
        build(dead)
    lent = cfg(conv(8, 3, 2), conv(8), route(0), conv(8, share_index=1), head(0))
    assert len(build(text).heads) == len(build(lent).heads) == 1, "its weights are read where they are shared"
