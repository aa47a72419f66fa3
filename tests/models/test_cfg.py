"""The .cfg parser and its graph: what is accepted, and the error for each mistake."""

import pytest

from models import Darknet, ModelError, load_cfg, parse_cfg, zoo_cfg

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


def build(text: str) -> Darknet:
    return Darknet(parse_cfg(text, "my.cfg"))


def test_first_of_two_equal_keys_counts_as_in_darknet() -> None:
    assert parse_cfg(SMALL.replace("filters=8", "filters=8\nfilters=16"), "x").layers[0].integer("filters") == 8


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[convolutional]\nfilters=8", "[convolutionl]\nfilters=8", "my.cfg:3: .*did you mean convolutional"),
        ("filters=8", "filter=8", "my.cfg:4: .*no option 'filter'; did you mean filters"),
        ("filters=8", "flipped=1", "my.cfg:4: .*no option 'flipped'"),
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
        ("mask=0,1", "mask=0,2", "my.cfg:14: .*mask must lie in 0..1, got 2"),
        ("anchors=4,6, 10,12", "anchors=4,-6, 10,12", "my.cfg:15: .*anchors must lie in 0.01..1000000, got -6"),
        ("anchors=4,6, 10,12\n", "", "my.cfg:13: .*has no anchors"),
        ("activation=linear", "activation=relu\n[yolo]\nnew_coords=1", "my.cfg:12: .*needs activation=logistic"),
        ("num=2", "num=2\nscale_x_y=0.9", "my.cfg:17: .*scale_x_y must lie in 1..100"),
        ("num=2", "num=2\niou_loss=diuo", "my.cfg:17: .*no iou_loss 'diuo'; did you mean diou"),
        ("[yolo]", "[route]\nlayers=-3\n[yolo]", "my.cfg:14: .*layers refers to layer -3"),
        ("[yolo]", "[upsample]\n[route]\nlayers=-1,0\n[yolo]", "my.cfg:14: .*layer 2 at stride 1, layer 0 at"),
        ("[yolo]", "[sam]\nfrom=0\n[yolo]", "my.cfg:14: .*14 and 8 channels"),
        ("[yolo]", "[shortcut]\n[yolo]", "my.cfg:13: .shortcut. has no from. fix: add a line from="),
        ("[yolo]", "[route]\nlayers=-1\n[yolo]", "my.cfg:15: .*must follow a .convolutional."),
        ("classes=2\n", "classes=2\n[upsample]\n", "my.cfg:18: .*input from the .yolo. layer 2"),
        ("[net]\n", "", "my.cfg:1: 'width=64' comes before .net."),
        ("[yolo]", "[net]\n[yolo]", "my.cfg:13: there is no layer '.net.'"),
    ],
)
def test_mistakes_name_line_and_remedy(old: str, new: str, expected: str) -> None:
    assert SMALL.count(old) == 1
    with pytest.raises(ModelError, match=expected):
        build(SMALL.replace(old, new))


def test_without_mask_the_first_num_anchors_count() -> None:
    assert build(SMALL.replace("mask=0,1\n", "")).heads[0].mask == (0, 1)


def test_network_without_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"my\.cfg:1: \[net\] is not followed by any \[yolo\]"):
        build(SMALL.split("[yolo]", maxsplit=1)[0])


def test_heads_have_one_class_count() -> None:
    second = (
        "[route]\nlayers=0\n[convolutional]\nfilters=8\nactivation=linear\n[yolo]\nmask=0\nanchors=4,6\nclasses=3\n"
    )
    with pytest.raises(ModelError, match=r"my\.cfg:26: .*classes=3, but the \[yolo\] layer 2 has 2"):
        build(SMALL + second)
    assert Darknet(parse_cfg(SMALL + second, "x"), num_classes=5).num_classes == 5


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"cannot read the cfg file /nowhere/a\.cfg"):
        load_cfg("/nowhere/a.cfg")
    with pytest.raises(ModelError, match="yolov3, yolov3-spp, yolov3-tiny"):
        zoo_cfg("yolov9")
