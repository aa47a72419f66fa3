"""The .cfg parser and its graph: the error for each mistake, and damaged files in bounded time."""

import random
import re
import time
from pathlib import Path

import pytest
import torch

from models import Darknet, ModelError, count_flops, graph, load_cfg, parse_cfg, zoo_cfg
from models.cfg import ZOO
from models.darknet import fitted_cfg
from tests.models.cfg_writer import cfg, conv, head, route, section, shortcut
from tests.runs.test_attack import DAMAGES

SMALL = """[net]
width=64
[convolutional]
filters=8
size=3
stride=2
pad=1
activation=leaky
[convolutional]
filters=14
size=1
activation=linear
[yolo]
mask=0,1
anchors=4,6, 10,12
num=2
classes=2
"""
OTHER_HEAD = route(0) + head(0, classes=3)


def build(text: str) -> Darknet:
    return Darknet(parse_cfg(text, "my.cfg"))


def test_as_in_darknet_the_first_of_equal_keys_counts_and_without_mask_the_first_num_anchors() -> None:
    assert parse_cfg(SMALL.replace("filters=8", "filters=8\nfilters=16"), "x").layers[0].integer("filters") == 8
    assert build(SMALL.replace("mask=0,1\n", "")).heads[0].mask == (0, 1)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[convolutional]\nfilters=8", "[convolutionl]\nfilters=8", "my.cfg:3: .*did you mean convolutional"),
        ("filters=8", "filter=8", "my.cfg:4: .*no option 'filter'; did you mean filters"),
        ("filters=8", "filters=eight", "my.cfg:4: .*whole number, got 'eight'"),
        ("filters=8", "filters=0", "my.cfg:4: .*filters must lie in 1..2147483647, got 0"),
        ("filters=8", "filters", "my.cfg:4: 'filters' is neither"),
        ("activation=leaky", "activation=leeky", "my.cfg:8: .*did you mean leaky"),
        ("pad=1", "pad=0", "my.cfg:3: .*does not divide a map at stride 1 by 2"),
        ("stride=2", "stride=2000\npad=0\npadding=0", "my.cfg:3: .*multiples of 2,000 pixels"),
        ("[yolo]", "[avgpool]\n[maxpool]\nsize=2\nstride=2\n[yolo]", "my.cfg:14: .*a map at 1x1 by 2"),
        ("[yolo]", "[avgpool]\n[upsample]\n[yolo]", "my.cfg:14: .*enlarges a map of one pixel"),
        ("[yolo]", "[upsample]\nstride=100\n[yolo]", "my.cfg:13: .*14 channels at stride 1/50"),
        ("filters=14", "filters=15", "my.cfg:13: .*needs filters=14 .* which has 15"),
        ("mask=0,1", "mask=0,2", "my.cfg:14: .*mask selects 2, but anchors lists 0..1. fix: "),
        ("anchors=4,6, 10,12", "anchors=4,-6, 10,12", "my.cfg:15: .*anchors must lie in 0.01..1000000, got -6$"),
        ("anchors=4,6, 10,12\n", "", "my.cfg:13: .*has no anchors"),
        (
            "activation=linear",
            "activation=relu\n[yolo]\nanchors=1,1\nnew_coords=1",
            "my.cfg:12: .*needs activation=logistic",
        ),
        ("num=2", "num=2\nscale_x_y=0.9", "my.cfg:17: .*scale_x_y must lie in 1..100"),
        ("num=2", "num=2\niou_loss=diuo", "my.cfg:17: .*no iou_loss 'diuo'; known are ciou"),
        ("size=3", "size=2", "my.cfg:3: .*fix: use an odd size"),
        ("mask=0,1", "mask=0 1 2", "my.cfg:14: .*fix: .*commas"),
        ("4,6, 10,12", "4,6; 10,12", "my.cfg:14: .*';' begins a comment"),
        ("4,6, 10,12", "4,6,\n10,12", "my.cfg:16: .*fix: put a list on one line"),
        ("[yolo]", "[route]\nlayers=-3\n[yolo]", "my.cfg:14: .*layers refers to layer -3"),
        ("[yolo]", "[upsample]\n[route]\nlayers=-1,0\n[yolo]", "my.cfg:14: .*layer 2 at stride 1, layer 0 at"),
        ("[yolo]", "[sam]\nfrom=0\n[yolo]", "my.cfg:14: .*14 and 8 channels"),
        ("[yolo]", "[shortcut]\n[yolo]", "my.cfg:13: .shortcut. has no from. fix: add a line from="),
        ("[yolo]", "[route]\nlayers=-1\n[yolo]", "my.cfg:15: .*must follow a .convolutional."),
        ("classes=2\n", "classes=2\n[upsample]\n", "my.cfg:18: .*input from the .yolo. layer 2"),
        ("[net]\n", "", "my.cfg:1: 'width=64' comes before .net."),
        (SMALL[SMALL.index("[yolo]") :], "", "my.cfg:1: .net. is not followed by any .yolo."),
        ("classes=2\n", f"classes=2\n{OTHER_HEAD}", r"my.cfg:30: .*classes=3, but the .yolo. layer 2 has 2"),
        ("[yolo]", "[net]\n[yolo]", "my.cfg:13: there is no layer '.net.'"),
    ],
)
def test_mistakes_name_line_and_remedy(old: str, new: str, expected: str) -> None:
    assert SMALL.count(old) == 1
    with pytest.raises(ModelError, match=expected):
        build(SMALL.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("leaky", name) for name in ("hard_mish", "hardswish", "hswish", "prelu", "relu1", "celu")]
    + [("stride=2", "stride_x=2"), ("[yolo]", "[dropblock]\n[yolo]"), ("[yolo]", "[deconvolutional]\n[yolo]")],
)  # fmt: skip
def test_no_other_computation_is_proposed(old: str, new: str) -> None:
    with pytest.raises(ModelError, match="known are "):
        build(SMALL.replace(old, new))


def test_silu_is_swish(tmp_path: Path) -> None:
    text, images = SMALL.replace("leaky", "swish"), torch.rand(1, 3, 64, 64)
    swish, silu = build(text), build(text.replace("swish", "silu"))
    silu.load_state_dict(swish.state_dict())
    assert silu.eval()(images)[0].equal(swish.eval()(images)[0])
    assert fitted_cfg(silu) == text  # Darknet takes an activation that it does not know for relu
    for encoding in ("utf-16", "utf-16-le"):
        (tmp_path / "a.cfg").write_text(text, encoding)
        with pytest.raises(ModelError, match=r"UTF-16.* fix: save it as UTF-8"):
            load_cfg(tmp_path / "a.cfg")


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"cannot read the cfg file /nowhere/a\.cfg"):
        load_cfg("/nowhere/a.cfg")
    with pytest.raises(ModelError, match="yolov3, yolov3-spp, "):
        zoo_cfg("yolov9")


CASES, KINDS = 150, ("a word", "two words", "a line", "cut", "flipped", "a NUL")
EVERY_KIND = cfg(
    conv(8, 3, 2), conv(8, 3, dilation=2), conv(8, 3, share_index=-1), shortcut(-2),
    section("maxpool", size=2, stride=2), route(-1, groups=2, group_id=1), section("upsample", stride=2),
    route(-1, 3), conv(16, 3, groups=4, xnor=0), section("avgpool"), conv(16, activation="logistic"),
    section("scale_channels", from_=8), section("dropout", probability=0.1), section("reorg3d", stride=2),
    conv(64), section("sam", from_=-2), conv(14, xnor=1), head(0, 1),
    route(-3), head(2, num=3, new_coords=1, activation="logistic"),
)  # fmt: skip


def thin(text: str) -> str:
    """The .cfg with a sixteenth of its filters except before heads, which makes building cheap."""
    return re.sub(r"filters=(?!255)(\d+)", lambda found: f"filters={max(8, int(found[1]) // 16)}", text)


# Files to damage; half of the draws pick the one with every kind of layer.
ORIGINALS = [thin(zoo_cfg(name).text) for name in sorted(ZOO)]
ORIGINALS += [EVERY_KIND] * len(ORIGINALS)


def run(model: Darknet) -> None:
    """Run one image of the smallest size, or only build shapes if it would take seconds."""
    side = model.max_stride
    largest = max(shape.channels * shape.size((side, side))[0] * shape.size((side, side))[1] for shape in model.shapes)
    device = "cpu" if count_flops(model, (side, side)) < 5e8 and largest < 2e6 else "meta"
    with torch.no_grad():
        maps = model.to(device).eval()(torch.zeros(1, model.in_channels, side, side, device=device))
    for raw, its in zip(maps, model.heads, strict=True):
        assert raw.shape[1:] == (len(its.anchors), side // its.stride, side // its.stride, 5 + its.num_classes)


@pytest.mark.release
def test_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_VALUES", 3_000_000)  # near the real limit each would take seconds to draw
    rng = random.Random(0)
    outcomes = {"runs": 0, "refused": 0}
    for case in range(CASES):
        text = rng.choice(ORIGINALS)
        for _ in range(rng.choice((1, 1, 2))):
            text = DAMAGES[rng.choice(KINDS)](text.encode(), rng).decode("utf-8", "ignore")
        start = time.process_time()
        try:
            run(Darknet(parse_cfg(text, "fuzz.cfg")))
            outcomes["runs"] += 1
        except ModelError as error:
            message = str(error)
            assert re.match(r"fuzz\.cfg:\d+: ", message) and message.isprintable() and len(message) < 700, (case, text)
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"case {case}: {type(error).__name__}: {error}\n{text}")
        assert time.process_time() - start < 10, (case, text)  # a bound on hangs, not on speed
    assert min(outcomes.values()) > CASES // 10, outcomes  # the damage is neither too little nor too much


@pytest.mark.parametrize(
    "layers",
    [
        [conv(8, 3, 2), conv(60000, 127)],  # 31 GB of weights
        [conv(8, 3, 2), *["[route]\nlayers=-1,-1\n"] * 40],  # 2^43 channels
        [conv(8, 3, 2), *[section("upsample", stride=2)] * 30],
        [conv(8, 3, 2), *[section("maxpool", size=2, stride=2)] * 30],
        [conv(8, 3, 3), conv(8, 3, 5), conv(8, 3, 7), conv(8, 3, 11), conv(8, 3, 13)],
        [section("avgpool"), *["[route]\nlayers=-1,-1\n"] * 40],
    ],
)
def test_what_no_machine_could_hold_is_refused_before_memory_is_taken(layers: list[str]) -> None:
    with pytest.raises(ModelError, match=r"huge\.cfg:\d+: .*fix: check"):
        Darknet(parse_cfg(cfg(*layers, head(0)), "huge.cfg"))
