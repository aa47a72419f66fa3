"""The .cfg parser and the graph built from it: what is accepted, and what each mistake is answered with."""

from pathlib import Path

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


def test_small_cfg_builds() -> None:
    model = build(SMALL)
    assert len(model.layers) == 3
    assert model.heads[0].layer == 2 and model.heads[0].stride == 2
    assert model.heads[0].anchors == ((4, 6), (10, 12)) and model.heads[0].num_classes == 2


def test_spaces_comments_and_trailing_commas_do_not_matter() -> None:
    text = "# head\n; other comment\n[ net ]\n\n" + SMALL.split("\n", 1)[1]
    text = text.replace("mask=0,1", "mask = 0, 1,").replace("filters=8", "  filters =  8  # eight")
    text = text.replace("[convolutional]", "[conv]")
    assert build(text).heads == build(SMALL).heads


def test_first_of_two_equal_keys_counts_as_in_darknet() -> None:
    assert parse_cfg(SMALL.replace("filters=8", "filters=8\nfilters=16"), "x").layers[0].integer("filters") == 8


def test_text_is_kept_for_checkpoints() -> None:
    cfg = load_cfg(zoo_cfg("yolov3-tiny"))
    again = parse_cfg(cfg.text, cfg.source)
    assert again == cfg


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[convolutional]\nfilters=8", "[convolutionl]\nfilters=8", "my.cfg:3: .*did you mean convolutional"),
        ("filters=8", "filter=8", "my.cfg:4: .*no option filter; did you mean filters"),
        ("filters=8", "filters=eight", "my.cfg:4: .*whole number, got 'eight'"),
        ("filters=8", "filters=0", "my.cfg:4: .*filters must be 1 or more, got 0"),
        ("filters=8", "filters", "my.cfg:4: 'filters' is neither"),
        ("filters=8", "filters=8\ngroups=2", "my.cfg:5: .*groups=2 must divide the 3 input channels"),
        ("activation=leaky", "activation=leeky", "my.cfg:8: .*did you mean leaky"),
        ("pad=1", "pad=0", "my.cfg:3: .*does not divide the map by 2"),
        ("filters=14", "filters=15", "my.cfg:13: .*needs filters=14 .* which has 15"),
        ("mask=0,1", "mask=0,2", "my.cfg:14: .*mask names anchor 2"),
        ("mask=0,1", "mask=", "my.cfg:14: .*mask is empty"),
        ("anchors=4,6, 10,12", "anchors=4,6, 10", "my.cfg:15: .*num=2 needs 4 anchor values, got 3"),
        ("anchors=4,6, 10,12", "anchors=4,-6, 10,12", "my.cfg:15: .*above 0, got -6"),
        ("anchors=4,6, 10,12\n", "", "my.cfg:13: .*has no anchors"),
        ("num=2", "num=2\nnew_coords=1", "my.cfg:17: .*new_coords"),
        ("num=2", "num=2\nscale_x_y=nan", "my.cfg:17: .*scale_x_y needs a number"),
        ("[yolo]", "[route]\nlayers=-3\n[yolo]", "my.cfg:14: .*layers refers to layer -3"),
        ("[yolo]", "[route]\nlayers=0,5\n[yolo]", "my.cfg:14: .*layers refers to layer 5"),
        (
            "[yolo]",
            "[upsample]\nstride=2\n[route]\nlayers=-1,0\n[yolo]",
            "my.cfg:15: .*layer 2 at stride 1, layer 0 at",
        ),
        ("[yolo]", "[shortcut]\nfrom=0\n[yolo]", "my.cfg:14: .*14 and 8 channels"),
        ("[yolo]", "[route]\nlayers=-1\n[yolo]", "my.cfg:15: .*must follow a .convolutional."),
        ("classes=2\n", "classes=2\n[upsample]\n", "my.cfg:18: .*input from the .yolo. layer 2"),
        ("[net]\n", "", "my.cfg:1: 'width=64' stands before any section"),
        ("[net]\nwidth=64\n", "", "does not begin with .net."),
        ("[yolo]", "[net]\n[yolo]", "my.cfg:13: .*given twice"),
    ],
)
def test_mistakes_name_line_and_remedy(old: str, new: str, expected: str) -> None:
    assert SMALL.count(old) == 1
    with pytest.raises(ModelError, match=expected):
        build(SMALL.replace(old, new))


def test_network_without_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no \[yolo\] section"):
        build(SMALL.split("[yolo]")[0])


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"cannot read the cfg file /nowhere/a\.cfg"):
        load_cfg("/nowhere/a.cfg")
    with pytest.raises(ModelError, match="yolov3, yolov3-spp, yolov3-tiny"):
        zoo_cfg("yolov9")


def test_darknets_training_options_and_any_bytes_in_comments_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "trained.cfg"
    # A byte order mark, an option of Darknet's own schedule, and a comment that is no UTF-8.
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.encode().replace(b"[net]", b"[net]\nburn_in=1000 # \xff"))
    assert len(load_cfg(path).layers) == 3
